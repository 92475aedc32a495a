"""How contextual the vectors of words are (Ethayarajh 2019, arXiv:1909.00512), on lines of text."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, percentiles, resampled_means
from bert_jax.analysis.geometry.vector_measures import explainable_variance, intra_sentence_similarity, mean_cosine
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, mean_of_words
from bert_jax.tokenizers.tokenizer import Tokenizer

TEXT_RESAMPLES = 1_000
"""Of intervals of cosines between all pairs of texts."""
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


class Measures(NamedTuple):
    """What is measured in every hidden state, and what it is compared with."""

    self_similarity: Float[np.ndarray, "L1 W"]
    """Of every word."""
    summary: dict[str, Any]
    """Means with intervals, as plain values."""


def measure(vectors: ContextVectors, *, seed: int = 0) -> Measures:
    """The three measures of each hidden state, and their baselines of random words.

    The baseline of the explainable variance are groups of random words of the same size, because the smallest possible
    value depends on the size. Intervals are of the bootstrap over words, over texts, or over both where the baseline of
    random words is subtracted.

    Args:
      vectors: of `word_vectors`.
      seed: of the bootstrap over texts.
    """
    states, _, contexts, width = vectors.words.shape
    groups = vectors.random.shape[1] // contexts
    random = vectors.random[:, : groups * contexts].reshape(states, groups, contexts, width)
    texts = vectors.random.shape[1]
    drawn = np.random.default_rng(seed).multinomial(texts, np.full(texts, 1 / texts), TEXT_RESAMPLES).astype(float)
    anisotropy = mean_cosine(vectors.random), resampled_cosines(vectors.random, drawn)
    self_similarity = mean_cosine(vectors.words)
    raw = {
        "self_similarity": _resampled(self_similarity),
        "intra_sentence_similarity": (vectors.intra_sentence.mean(1), drawn @ vectors.intra_sentence.T / texts),
        "explainable_variance": _resampled(explainable_variance(vectors.words)),
    }
    of_groups = _resampled(explainable_variance(random))
    baselines = dict.fromkeys(raw, anisotropy) | {"explainable_variance": of_groups}
    adjusted = {
        f"{name}_adjusted": tuple(one - other for one, other in zip(pair, baselines[name], strict=True))
        for name, pair in raw.items()
    }
    found = {"anisotropy": anisotropy, "explainable_variance_of_random_words": of_groups, **raw, **adjusted}
    return Measures(
        self_similarity,
        {name: BootstrapMean(value, *percentiles(resampled))._asdict() for name, (value, resampled) in found.items()},
    )


def _resampled(values: Float[np.ndarray, "L1 n"]) -> tuple[np.ndarray, np.ndarray]:
    """Means, [L1], and those of bootstrap samples, [TEXT_RESAMPLES, L1]."""
    value, resampled = resampled_means(np.asarray(values, np.float64))
    return value, resampled[:TEXT_RESAMPLES]


def resampled_cosines(
    vectors: Float[np.ndarray, "L1 n H"], drawn: Float[np.ndarray, "R n"]
) -> Float[np.ndarray, "R L1"]:
    """`mean_cosine` of bootstrap samples; a pair of a vector and itself, which a sample may have twice, does not count.

    Args:
      vectors: of each text.
      drawn: how often each text is in a sample.
    """
    same, pairs = np.square(drawn).sum(1), np.square(drawn.sum(1))
    units = np.asarray(vectors, np.float64) / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
    different = np.where(pairs > same, pairs - same, np.nan)  # a sample of one text has no pairs
    return np.stack([(np.square(drawn @ one).sum(1) - same) / different for one in units], axis=1)
