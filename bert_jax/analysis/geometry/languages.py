"""What sentence vectors know of their language: language centroids (Libovicky et al. 2019, arXiv:1911.03310)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.geometry.vector_measures import class_means, nearest_centroid
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches, sample_texts
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

SPLITS = ("centre of the centroids", "centroids", "centre of the test", "test")
LEAST = 2 * len(SPLITS)
"""Sentences that a language needs."""


class LanguageSample(NamedTuple):
    """Sentences of languages, in four splits."""

    codes: list[str]
    rows: list[TextRow]
    names: list[str]
    """Of the rows: code and number of the line."""
    languages: np.ndarray
    """int64 [n]: index of each row's language."""
    splits: np.ndarray
    """int64 [n]: index in SPLITS."""
    skipped_languages: dict[str, int]
    """Languages with fewer than LEAST sentences that fit, and their number."""
    skipped_lines: int
    unknown_share: dict[str, float]
    """Of the tokens of each language, those that the vocabulary does not have."""


def sample_languages(
    paths: Sequence[StoredPath], tokenizer: Tokenizer, max_length: int, count: int, seed: int
) -> LanguageSample:
    """Draw sentences of every language and give them in turn to the splits.

    Args:
      paths: a file per language, whose name without ending is the code; a sentence per line.
      tokenizer: of the model.
      max_length: tokens of a sentence, special ones included; longer ones are skipped.
      count: most sentences of a language.
      seed: of the draw.

    Raises:
      UserError: a file is not UTF-8, or fewer than two languages have enough sentences.
    """
    codes: list[str] = []
    rows: list[TextRow] = []
    names: list[str] = []
    languages, splits, skipped, skipped_lines, unknown = [], [], {}, 0, {}
    for path in paths:
        sample = sample_texts([path], tokenizer, max_length, count, seed, least=0)
        found, skipped_lines = sample.rows, skipped_lines + sample.skipped
        if len(found) < LEAST:
            skipped[path.stem] = len(found)
            continue
        tokens = np.concatenate([row.input_ids[1:-1] for row in found])
        unknown[path.stem] = float((tokens == tokenizer.unk_id).mean())
        languages += [len(codes)] * len(found)
        splits += [i % len(SPLITS) for i in range(len(found))]
        codes.append(path.stem)
        rows += found
        names += [f"{path.stem}, line {number}" for number in sample.numbers]
    require(
        len(codes) >= 2,
        f"geometry: {len(codes)} of {len(paths)} languages have {LEAST} different sentences that fit: give two "
        "languages or more",
    )
    return LanguageSample(codes, rows, names, np.array(languages), np.array(splits), skipped, skipped_lines, unknown)


def sentence_vectors(model: LoadedModel, rows: Sequence[TextRow], *, progress: bool = False) -> np.ndarray:
    """The mean over the tokens between [CLS] and [SEP] of every hidden state, float32 [L1, n, H]."""
    config = model.config
    vectors = np.zeros((config.num_layers + 1, len(rows), config.hidden_size), np.float32)
    with progress_bar("geometry of languages", len(rows), "text", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id):
            hidden = capture(model, batch, ["hidden_states"])["hidden_states"]
            for b, index in enumerate(batch.indices):
                if index >= 0:
                    vectors[:, index] = hidden[:, b, 1 : batch.lengths[b] - 1].mean(1)
            bar.update(int((batch.indices >= 0).sum()))
    return vectors


class Identified(NamedTuple):
    """Which sentences of the test split have the right language, by hidden state."""

    plain: Float[np.ndarray, "L1 t"]
    centred: Float[np.ndarray, "L1 t"]

    @property
    def summary(self) -> dict[str, Any]:
        """Accuracies with their intervals over sentences, as plain values."""
        named = {"accuracy": self.plain, "accuracy_centred": self.centred}
        return {name: bootstrap_mean(right)._asdict() for name, right in named.items()}


def identify(vectors: np.ndarray, languages: np.ndarray, splits: np.ndarray, count: int) -> Identified:
    """Whether the nearest language centroid is right on the test split, by hidden state, with and without centring.

    Centroids are means over the second split. Centring subtracts the language's mean over the first split from the
    second, and that over the third split from the test sentences: one mean for both has an error that both share, by
    which centred vectors would be recognised.

    Args:
      vectors: [L1, n, H].
      languages: index of each vector's language, int64 [n].
      splits: index in SPLITS, int64 [n].
      count: number of languages.
    """
    parts = [splits == i for i in range(len(SPLITS))]
    first, second, third = (class_means(vectors[:, part], languages[part], count) for part in parts[:3])
    expected = languages[parts[3]]
    test = vectors[:, parts[3]]
    plain, centred = nearest_centroid(test, second), nearest_centroid(test - third[:, expected], second - first)
    return Identified(*((found == expected[None, :]).astype(float) for found in (plain, centred)))


def centroid_cosines(vectors: np.ndarray, languages: np.ndarray, count: int) -> np.ndarray:
    """Cosines between the centroids of all sentences of each language, after the mean of centroids is subtracted.

    Args:
      vectors: of one hidden state, [n, H].
      languages: index of each vector's language, int64 [n].
      count: number of languages, K.

    Returns:
      float64 [K, K]. Without the subtraction, anisotropy makes all of them near 1.
    """
    centroids = class_means(vectors, languages, count)
    centroids -= centroids.mean(0)
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-30)
    return centroids @ centroids.T
