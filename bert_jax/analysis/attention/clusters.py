"""Which heads attend alike: Jensen-Shannon distances between heads, drawn on a plane (Clark et al. 2019, section 6)."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float, Int


@jax.jit
def divergence_sums(attention: Float[Array, "heads S S"], length: Int[Array, ""]) -> Float[Array, "heads heads"]:
    """Jensen-Shannon divergences between all pairs of heads, nats, summed over the queries of a text.

    Exact, where Clark's code smooths the attention by 1e-3.

    Args:
      attention: probabilities of queries by keys, padded; keys of padding have 0.
      length: tokens of the text.
    """
    is_query = jnp.arange(attention.shape[1]) < length

    def negative_entropy(p: Array) -> Array:
        terms = p * jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny))
        return jnp.where(is_query, terms.sum(-1), 0).sum(-1)

    own = negative_entropy(attention)

    def against_all(one: tuple[Array, Array]) -> Array:
        map_SS, own_one = one
        return (own + own_one) / 2 - negative_entropy((attention + map_SS[None]) / 2)

    return jnp.maximum(jax.lax.map(against_all, (attention, own)), 0)


def classical_mds(squared: Float[np.ndarray, "n n"]) -> tuple[Float[np.ndarray, "n 2"], float]:
    """Points on a plane whose distances are like the given ones (Torgerson 1952), the same on every run.

    The root of the Jensen-Shannon divergence is a distance between points of a Hilbert space (Endres and Schindelin
    2003), so divergences are squared distances, and classical scaling projects these points on the plane that keeps
    most of their variance. Clark et al. take a metric scaling of the divergences themselves, from random starts.

    Args:
      squared: squared distances.

    Returns:
      the points; each axis points to the side of the point that is farthest from 0, and
      the share of the variance that the plane has.
    """
    n = len(squared)
    centring = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-centring @ squared @ centring / 2)
    top = np.maximum(values[::-1][:2], 0)
    points = vectors[:, ::-1][:, :2] * np.sqrt(top)
    signs = np.sign(points[np.abs(points).argmax(0), np.arange(points.shape[1])])
    points = np.pad(points * np.where(signs == 0, 1, signs), ((0, 0), (0, 2 - points.shape[1])))
    total = np.maximum(values, 0).sum()
    return points, float(top.sum() / total) if total > 0 else 1.0


def distances_by_layer(distances: Float[np.ndarray, "n n"], heads: int) -> tuple[float | None, float | None]:
    """Mean distance of two heads of one layer, and of two heads of different layers; None if there are no such pairs.

    Args:
      distances: of all heads, layer by layer.
      heads: of a layer.
    """
    layer = np.arange(len(distances)) // heads
    same, other = layer[:, None] == layer, ~np.eye(len(distances), dtype=bool)
    return tuple(float(distances[pairs].mean()) if pairs.any() else None for pairs in (same & other, ~same))
