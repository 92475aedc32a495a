"""How much each token contributes to each other one, on arrays of one text: rollout and norms.

Shapes: L layers, N heads, n tokens (queries first, then keys), D width of a head, H hidden.
"""

import numpy as np

from bert_jax.analysis.rank_correlation import rank_correlation
from bert_jax.array_types import Float


def rollout(mixing: Float[np.ndarray, "L n n"]) -> Float[np.ndarray, "L n n"]:
    """How much of each input token is in each token of every layer: the product of the layers' matrices (Abnar and
    Zuidema 2020, section 3, equation 1).

    Args:
      mixing: of each layer, rows sum to 1, residual connections included (`with_residual`).
    """
    rolled = [np.asarray(mixing[0], np.float64)]
    for layer in mixing[1:]:
        rolled.append(layer @ rolled[-1])
    return np.stack(rolled)


def with_residual(attention: Float[np.ndarray, "*layers n n"]) -> Float[np.ndarray, "*layers n n"]:
    """Half of the attention and half of the identity: the residual connection in a rollout (Abnar and Zuidema 2020).

    Args:
      attention: mean over heads, rows sum to 1.
    """
    return 0.5 * attention + 0.5 * np.eye(attention.shape[-1])


def normalised_rows(contributions: Float[np.ndarray, "*layers n n"]) -> Float[np.ndarray, "*layers n n"]:
    """Rows divided by their sums, float64; a row of zeros remains."""
    contributions = np.asarray(contributions, np.float64)
    return contributions / np.maximum(contributions.sum(-1, keepdims=True), 1e-30)


def transformed_values(
    value: Float[np.ndarray, "n N D"], kernel: Float[np.ndarray, "N D H"]
) -> Float[np.ndarray, "n N H"]:
    """f(x) of each token and head: the value through the head's part of the output projection (Kobayashi et al. 2020,
    equation 4); the projection's bias belongs to no token.

    Args:
      value: as the head reads it, with the bias of the value projection.
      kernel: of the output projection.
    """
    return np.einsum("jnd,ndh->jnh", value, kernel, optimize=True)


def attended_vectors(
    attention: Float[np.ndarray, "N n n"], transformed: Float[np.ndarray, "n N H"]
) -> Float[np.ndarray, "n n H"]:
    """What the heads of a layer together send from each token to each query: the sum over heads of alpha f(x).

    Their norms are the norm-weighted attention of a layer (Kobayashi et al. 2020, section 4). With the attention and
    the values of one head, they are that head's.

    Args:
      attention: of one layer.
      transformed: of `transformed_values`.
    """
    return (attention.transpose(2, 1, 0) @ transformed).swapaxes(0, 1)


def add_residual(vectors: Float[np.ndarray, "n n H"], hidden: Float[np.ndarray, "n H"]) -> Float[np.ndarray, "n n H"]:
    """The vectors with the layer's input added on the diagonal (Kobayashi et al. 2021, section 3)."""
    tokens = np.arange(len(vectors))
    total = vectors.copy()
    total[tokens, tokens] += hidden
    return total


def normalise_vectors(
    vectors: Float[np.ndarray, "n m H"],
    sums: Float[np.ndarray, "n H"],
    scale: Float[np.ndarray, " H"],
    epsilon: float,
) -> Float[np.ndarray, "n m H"]:
    """The part of a LayerNorm's output that comes from each vector (Kobayashi et al. 2021, section 3, equation 9).

    LayerNorm is linear once its divisor is known: the parts and LayerNorm's bias sum to its output, if the vectors sum
    to its input.

    Args:
      vectors: by query and source, which is a token or something else.
      sums: the LayerNorm's input at each query, which gives the divisor.
      scale: of the LayerNorm.
      epsilon: of the LayerNorm.
    """
    deviation = np.sqrt(sums.var(-1) + epsilon)[:, None, None]
    return (vectors - vectors.mean(-1, keepdims=True)) / deviation * scale


def rank_agreement(first: Float[np.ndarray, "*a n n"], second: Float[np.ndarray, "*b n n"]) -> np.ndarray:
    """Spearman correlation of how two measures rank the other tokens of each query, mean over queries.

    The query itself is left out. A query for which a measure is constant is left out; NaN if all are.

    Args:
      first, second: contributions, of 4 tokens or more; leading axes are broadcast.

    Returns:
      correlations, of the shape of the leading axes.
    """
    n = first.shape[-1]
    others = ~np.eye(n, dtype=bool)
    shape = np.broadcast_shapes(first.shape, second.shape)
    both = (np.broadcast_to(one, shape)[..., others].reshape(*shape[:-1], n - 1) for one in (first, second))
    correlations = rank_correlation(*both)
    valid = np.isfinite(correlations)
    counts = valid.sum(-1)
    return np.where(counts > 0, np.where(valid, correlations, 0).sum(-1) / np.maximum(counts, 1), np.nan)
