"""LEACE: the smallest linear change of vectors after which no linear probe finds a concept (Belrose et al. 2023).

arXiv:2306.03819, theorem 4.3. Shapes: n vectors, H hidden, D dimensions in which the vectors vary, C labels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Float, Int

CORRELATION_TOLERANCE = 1e-6
"""Singular values of the cross-covariance below this share of the largest count as 0, as does a largest one below it
squared: the coordinates have variance 1."""


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

    def variance_removed(self, vectors: Float[np.ndarray, "n H"]) -> float:
        """Share of the variance of vectors, summed over dimensions, that is removed; 0 if they are constant."""
        vectors = np.asarray(vectors, np.float64)
        removed = self.offsets(vectors).var(0).sum()
        return float(removed and removed / vectors.var(0).sum())


class Whitening(NamedTuple):
    """Vectors in coordinates that are uncorrelated and have variance 1; float64."""

    mean: np.ndarray
    """[H]."""
    coordinates: np.ndarray
    """[n, D]."""
    to_coordinates: np.ndarray
    """[D, H]: coordinates = to_coordinates (x - mean)."""
    to_vectors: np.ndarray
    """[H, D]: the pseudo-inverse of to_coordinates."""

    def eraser(self, directions: Float[np.ndarray, "D r"]) -> Eraser:
        """The eraser of the subspace that orthonormal directions span in the coordinates."""
        projection = (self.to_vectors @ directions) @ (directions.T @ self.to_coordinates)
        return Eraser(self.mean, projection, directions.shape[1])


def whiten(vectors: Float[np.ndarray, "n H"]) -> Whitening:
    """The whitening of vectors along their principal directions.

    Directions whose deviation is within float64 rounding of 0, relative to the largest, are left out, as in
    `numpy.linalg.matrix_rank`. The singular values are those of the vectors: of the covariance they would be squared,
    and small ones lost.
    """
    vectors = np.asarray(vectors, np.float64)
    mean = vectors.mean(0)
    centred = vectors - mean
    _, singular, directions = np.linalg.svd(np.linalg.qr(centred, mode="r"))
    kept = singular > singular[0] * max(centred.shape) * np.finfo(np.float64).eps
    deviations, directions = singular[kept] / np.sqrt(len(vectors)), directions[: len(singular)][kept]
    to_coordinates = directions / deviations[:, None]
    coordinates = centred @ to_coordinates.T
    return Whitening(mean, coordinates - coordinates.mean(0), to_coordinates, directions.T * deviations)


def fit_leace(whitening: Whitening, labels: Int[np.ndarray, " n"], classes: int) -> Eraser:
    """The eraser of a concept: afterwards, the covariance of vectors and labels is 0.

    It erases the span of the cross-covariance of whitened vectors and one-hot labels. Its rank is at most C - 1.

    Args:
      whitening: of the examples' vectors.
      labels: of the examples, from 0 to classes - 1.
      classes: C.
    """
    sums = np.zeros((classes, whitening.coordinates.shape[1]))
    np.add.at(sums, labels, whitening.coordinates)
    _, singular, directions = np.linalg.svd(sums / len(labels), full_matrices=False)
    least = CORRELATION_TOLERANCE * singular.max(initial=CORRELATION_TOLERANCE)  # none of constant vectors
    return whitening.eraser(directions[singular > least].T)


def random_eraser(whitening: Whitening, rank: int, seed: Sequence[int]) -> Eraser:
    """An eraser of a subspace that is uniform among those of its rank in the coordinates, a baseline of `fit_leace`.

    Its expected share of the variance of the vectors is rank / D.

    Args:
      whitening: of the examples' vectors.
      rank: of the subspace, at most D.
      seed: of the subspace.
    """
    random = np.random.default_rng(seed).normal(size=(whitening.coordinates.shape[1], rank))
    return whitening.eraser(np.linalg.qr(random)[0])


def control_eraser(whitening: Whitening, labels: Int[np.ndarray, " n"], classes: int, seed: Sequence[int]) -> Eraser:
    """The eraser of shuffled labels, a baseline of `fit_leace`; other arguments as there.

    It has the rank of LEACE, and what it erases is fitted to chance instead of to a concept.

    Args:
      whitening: of the examples' vectors.
      labels: of the examples.
      classes: C.
      seed: of the shuffle.
    """
    return fit_leace(whitening, np.random.default_rng(seed).permutation(labels), classes)
