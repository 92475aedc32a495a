"""How contextual the vectors of words are (Ethayarajh 2019, arXiv:1909.00512), on lines of text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.geometry.vector_measures import explainable_variance, intra_sentence_similarity, mean_cosine
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, mean_of_words
from bert_jax.tokenizers.tokenizer import Tokenizer

Occurrence = tuple[int, int]
"""Index of a row, and of a word in it."""


class ChosenWords(NamedTuple):
    """Which occurrences are measured."""

    words: list[str]
    occurrences: list[list[Occurrence]]
    """Of each word, as many for all words, in different rows."""
    random: list[Occurrence]
    """A word of each row."""
    candidates: int
    """Words with enough occurrences, of which `words` are a random sample."""


class ContextVectors(NamedTuple):
    """Vectors of the chosen words in every hidden state, and what is measured on whole rows."""

    words: np.ndarray
    """float32 [L1, W, c, H]: c occurrences of W words."""
    random: np.ndarray
    """float32 [L1, n, H]: a random word of each row."""
    intra_sentence: np.ndarray
    """[L1, n]: of each row."""


def with_word_ids(rows: Sequence[TextRow], tokenizer: Tokenizer) -> list[TextRow]:
    """The rows with `word_ids` of words as the vocabulary marks them; special tokens belong to none.

    Raises:
      UserError: the vocabulary does not mark words.
    """
    continues = tokenizer.continues_word
    split = []
    for row in rows:
        ordinary = ~np.isin(row.input_ids, tokenizer.special_ids)
        # A piece after a special token begins a word, whatever it is.
        begins = ordinary & ~(continues[row.input_ids] & np.r_[False, ordinary[:-1]])
        word_ids = np.where(ordinary, np.cumsum(begins) - 1, -1)
        split.append(row._replace(word_ids=word_ids.astype(np.int32)))
    return split


def choose_words(
    rows: Sequence[TextRow], tokenizer: Tokenizer, words: int, contexts: int, rng: np.random.Generator
) -> ChosenWords:
    """Draw words that occur in enough rows, `contexts` of these rows for each, and a random word of each row.

    Args:
      rows: of `with_word_ids`, each with a word.
      tokenizer: of the model.
      words: largest number of words.
      contexts: occurrences of a word, in different rows; words in fewer rows are left out.
      rng: draws.

    Raises:
      UserError: no word occurs in that many rows.
    """
    found: dict[tuple[int, ...], list[Occurrence]] = {}
    random = []
    for index, row in enumerate(rows):
        count = int(row.word_ids.max()) + 1
        first: dict[tuple[int, ...], int] = {}
        for word in range(count):
            first.setdefault(tuple(row.input_ids[row.word_ids == word].tolist()), word)
        for pieces, word in first.items():
            found.setdefault(pieces, []).append((index, word))
        random.append((index, int(rng.integers(count))))
    candidates = sorted(pieces for pieces, where in found.items() if len(where) >= contexts)
    require(
        len(candidates) > 0,
        f"geometry: no word occurs in {contexts} of {len(rows)} texts: give more texts, or lower --geometry.contexts",
    )
    chosen = [candidates[i] for i in np.sort(rng.permutation(len(candidates))[:words])]
    occurrences = [[found[p][i] for i in np.sort(rng.permutation(len(found[p]))[:contexts])] for p in chosen]
    return ChosenWords([tokenizer.decode(pieces) for pieces in chosen], occurrences, random, len(candidates))


def word_vectors(
    model: LoadedModel, rows: Sequence[TextRow], chosen: ChosenWords, *, progress: bool = False
) -> ContextVectors:
    """Run the rows and keep the vectors of the chosen words, the means of their tokens' vectors."""
    states, width = model.config.num_layers + 1, model.config.hidden_size
    shape = len(chosen.words), len(chosen.occurrences[0])
    words = np.zeros((states, *shape, width), np.float32)
    random = np.zeros((states, len(rows), width), np.float32)
    intra = np.zeros((states, len(rows)))
    by_row: dict[int, list[tuple[int, int, int]]] = {}
    for w, where in enumerate(chosen.occurrences):
        for c, (index, word) in enumerate(where):
            by_row.setdefault(index, []).append((w, c, word))
    with progress_bar("geometry of words", len(rows), "text", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id):
            hidden = capture(model, batch, ["hidden_states"])["hidden_states"]
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                vectors = mean_of_words(rows[index], hidden[:, b])
                intra[:, index] = intra_sentence_similarity(vectors)
                random[:, index] = vectors[:, chosen.random[index][1]]
                for w, c, word in by_row.get(int(index), ()):
                    words[:, w, c] = vectors[:, word]
            bar.update(int((batch.indices >= 0).sum()))
    return ContextVectors(words, random, intra)


def measure(vectors: ContextVectors) -> dict[str, Any]:
    """The three measures of each hidden state, and their baselines of random words.

    The baseline of the explainable variance are groups of random words of the same size, because the smallest possible
    value depends on the size.
    """
    states, _, contexts, width = vectors.words.shape
    groups = vectors.random.shape[1] // contexts
    random = vectors.random[:, : groups * contexts].reshape(states, groups, contexts, width)
    anisotropy = mean_cosine(vectors.random)
    variance = explainable_variance(random).mean(1)
    raw = {
        "self_similarity": mean_cosine(vectors.words).mean(1),
        "intra_sentence_similarity": vectors.intra_sentence.mean(1),
        "explainable_variance": explainable_variance(vectors.words).mean(1),
    }
    baselines = {"self_similarity": anisotropy, "intra_sentence_similarity": anisotropy}
    baselines["explainable_variance"] = variance
    return {
        "anisotropy": anisotropy.tolist(),
        "explainable_variance_of_random_words": variance.tolist(),
        **{name: values.tolist() for name, values in raw.items()},
        **{f"{name}_adjusted": (values - baselines[name]).tolist() for name, values in raw.items()},
    }
