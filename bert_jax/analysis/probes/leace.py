"""LEACE: the smallest linear change of vectors after which no linear probe finds a concept (Belrose et al. 2023).

arXiv:2306.03819, theorem 4.3. Shapes: n vectors, H hidden, C labels.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Float, Int

TOLERANCE = 1e-6
"""Eigenvalues and singular values below this share of the largest count as 0."""


class Eraser(NamedTuple):
    """x is replaced by x - projection (x - mean)."""

    mean: np.ndarray
    """float64 [H]."""
    projection: np.ndarray
    """float64 [H, H], oblique, of rank `rank`."""
    rank: int

    def offsets(self, vectors: Float[np.ndarray, "*n H"]) -> Float[np.ndarray, "*n H"]:
        """What is added to vectors, in their type."""
        centred = np.asarray(vectors, np.float64) - self.mean
        return -(centred @ self.projection.T).astype(vectors.dtype)

    def __call__(self, vectors: Float[np.ndarray, "*n H"]) -> Float[np.ndarray, "*n H"]:
        """The vectors without the concept."""
        return vectors + self.offsets(vectors)


def fit_leace(vectors: Float[np.ndarray, "n H"], labels: Int[np.ndarray, " n"], classes: int) -> Eraser:
    """The eraser of a concept: afterwards, the covariance of vectors and labels is 0.

    With the whitening W = covariance^(-1/2), the projection is W^+ U U^T W, where the columns of U span W times the
    cross-covariance of vectors and one-hot labels. Its rank is at most C - 1.

    Args:
      vectors: of the examples.
      labels: from 0 to classes - 1.
      classes: C.
    """
    mean, whiten, unwhiten, centred = _whitening(vectors)
    sums = np.zeros((classes, len(mean)))
    np.add.at(sums, labels, centred)
    cross = whiten @ sums.T / len(vectors)
    left, singular, _ = np.linalg.svd(cross, full_matrices=False)
    left = left[:, singular > TOLERANCE * max(float(singular[0]), TOLERANCE)]
    return Eraser(mean, unwhiten @ left @ left.T @ whiten, left.shape[1])


def random_eraser(vectors: Float[np.ndarray, "n H"], rank: int, seed: int) -> Eraser:
    """An eraser of a random subspace of the whitened vectors, the baseline of `fit_leace`; arguments as there.

    Args:
      vectors: of the examples.
      rank: of the projection.
      seed: of the subspace.
    """
    mean, whiten, unwhiten, _ = _whitening(vectors)
    random = whiten @ np.random.default_rng(seed).normal(size=(len(mean), rank))
    left = np.linalg.svd(random, full_matrices=False)[0][:, :rank]
    return Eraser(mean, unwhiten @ left @ left.T @ whiten, rank)


def _whitening(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, covariance^(-1/2) and its pseudo-inverse, and the centred vectors."""
    vectors = np.asarray(vectors, np.float64)
    mean = vectors.mean(0)
    centred = vectors - mean
    values, directions = np.linalg.eigh(centred.T @ centred / len(vectors))
    kept = values > TOLERANCE * values[-1]
    values, directions = values[kept], directions[:, kept]
    whiten = (directions / np.sqrt(values)) @ directions.T
    return mean, whiten, (directions * np.sqrt(values)) @ directions.T, centred
