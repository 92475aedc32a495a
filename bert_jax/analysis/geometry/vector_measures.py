"""Measures of the geometry of vectors, on arrays. Leading axes, such as that of the hidden states, are independent.

Shapes: n vectors of width H; K classes.
"""

import numpy as np

from bert_jax.array_types import Float, Int


def mean_cosine(vectors: Float[np.ndarray, "*layers n H"]) -> Float[np.ndarray, "*layers"]:
    """Mean cosine over all pairs of different vectors.

    Of occurrences of one word this is its self-similarity, of random words the anisotropy baseline (Ethayarajh 2019,
    section 3.3, SelfSim and 3.4). 1 if all directions are equal.

    Args:
      vectors: at least two.
    """
    unit = _unit(vectors)
    n = vectors.shape[-2]
    return np.asarray((np.square(unit.sum(-2)).sum(-1) - n) / (n * (n - 1)))


def intra_sentence_similarity(words: Float[np.ndarray, "*layers n H"]) -> Float[np.ndarray, "*layers"]:
    """Mean cosine of a sentence's words with their mean (Ethayarajh 2019, section 3.3, IntraSim).

    Args:
      words: of one sentence.
    """
    mean = _unit(words.mean(-2, keepdims=True, dtype=np.float64))
    return np.asarray((_unit(words) * mean).sum(-1).mean(-1))


def explainable_variance(vectors: Float[np.ndarray, "*layers n H"]) -> Float[np.ndarray, "*layers"]:
    """The largest squared singular value over the sum of all (Ethayarajh 2019, section 3.3, MEV).

    The matrix is not centred, as in the paper's equation (the published code centres it): vectors that are all equal
    have 1, and n orthogonal ones of equal length 1 / n.

    Args:
      vectors: at least one that is not zero.
    """
    vectors = np.asarray(vectors, np.float64)
    # The squared singular values are the eigenvalues of the n x n matrix of products.
    eigenvalues = np.linalg.eigvalsh(vectors @ np.swapaxes(vectors, -1, -2))
    return np.asarray(eigenvalues[..., -1] / eigenvalues.sum(-1))


def class_means(
    vectors: Float[np.ndarray, "*layers n H"], classes: Int[np.ndarray, " n"], count: int
) -> Float[np.ndarray, "*layers K H"]:
    """The mean vector of each class, in float64; every class from 0 to count - 1 must occur."""
    means = [vectors[..., classes == one, :].mean(-2, dtype=np.float64) for one in range(count)]
    return np.stack(means, axis=-2)


def nearest_centroid(
    vectors: Float[np.ndarray, "*layers n H"], centroids: Float[np.ndarray, "*layers K H"]
) -> Int[np.ndarray, "*layers n"]:
    """The centroid with the largest cosine, of equal ones the first."""
    return (_unit(vectors) @ np.swapaxes(_unit(centroids), -1, -2)).argmax(-1)


def _unit(vectors: Float[np.ndarray, "*layers n H"]) -> Float[np.ndarray, "*layers n H"]:
    """Divided by their lengths, float64; zeros remain."""
    vectors = np.asarray(vectors, np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30)
