"""Where heads attend: relative positions, special tokens, punctuation, and how broadly (Clark et al. 2019, section 3);
which heads attend alike (section 6).

Functions on the attention of one text; the suite averages over texts, each text counting once.
Shapes: n tokens; *heads any leading axes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.attention.maps import TokenKinds
from bert_jax.analysis.bootstrap import BootstrapMean, percentiles
from bert_jax.array_types import Array, Float, Int

SHARES = ("self", "previous", "next", "cls", "sep", "punctuation", "sep_to_sep", "other_to_sep")
"""Statistics that are shares of attention."""
ENTROPIES = ("entropy_nats", "cls_entropy_nats")
DISTANCES = ("head_distance_in_layer", "head_distance_between_layers")
DISTANCE_RESAMPLES = 1_000


def attention_statistics(
    attention: Float[np.ndarray, "*heads n n"], kinds: TokenKinds
) -> dict[str, Float[np.ndarray, "*heads"]]:
    """Means over the queries of a text.

    ``self``, ``previous``, ``next``: share on the token itself, on the one before it and on the one after it. As in
    Clark's code, the mean is over all queries, of which the first has no previous one.
    ``cls``, ``sep``, ``punctuation``: share on these keys; ``sep_to_sep`` and ``other_to_sep`` are ``sep`` of the
    queries that are [SEP] and of all others.
    ``entropy_nats``, ``cls_entropy_nats``: entropy of a query's attention, mean over all queries, and that of [CLS]. It
    is exact, where Clark's code smooths the attention by 1e-4.

    Args:
      attention: probabilities of queries by keys.
      kinds: of the tokens.
    """
    n = attention.shape[-1]
    diagonals = {
        name: np.trace(attention, offset, -2, -1) / n for name, offset in zip(SHARES[:3], (0, -1, 1), strict=True)
    }
    columns = attention.mean(-2)
    of_sep, of_others = (attention[..., rows, :].mean(-2)[..., kinds.sep].sum(-1) for rows in (kinds.sep, ~kinds.sep))
    entropies = entropy(attention)
    found = diagonals | {
        "cls": columns[..., kinds.cls].sum(-1),
        "sep": columns[..., kinds.sep].sum(-1),
        "punctuation": columns[..., kinds.punctuation].sum(-1),
        "sep_to_sep": of_sep,
        "other_to_sep": of_others,
        "entropy_nats": entropies.mean(-1),
        "cls_entropy_nats": entropies[..., 0],
    }
    return {name: np.asarray(values) for name, values in found.items()}


def entropy(probabilities: Float[np.ndarray, "*rows n"]) -> Float[np.ndarray, "*rows"]:
    """Entropy of distributions in nats; 0 log 0 is 0."""
    terms = probabilities * np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    return np.asarray(-terms.sum(-1))


def uniform_attention(n: int) -> Float[np.ndarray, "n n"]:
    """The attention of a head that attends to all tokens equally, float32."""
    return np.full((n, n), 1 / n, np.float32)


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


def distances_by_layer(distances: Float[np.ndarray, "*R n n"], heads: int) -> list[Any]:
    """Mean distance of two heads of one layer, and of two heads of different layers; None if there are no such pairs.

    Args:
      distances: of all heads, layer by layer.
      heads: of a layer.
    """
    layer = np.arange(distances.shape[-1]) // heads
    same, other = layer[:, None] == layer, ~np.eye(len(layer), dtype=bool)
    return [distances[..., pairs].mean(-1) if pairs.any() else None for pairs in (same & other, ~same)]


def distances_with_intervals(
    divergences: Float[np.ndarray, "texts n n"], queries: Int[np.ndarray, " texts"], heads: int, *, seed: int = 0
) -> list[dict[str, float] | None]:
    """`distances_by_layer` of the roots of mean divergences, with intervals of the bootstrap over texts.

    Args:
      divergences: of `divergence_sums`, of each text.
      queries: of each text.
      heads: of a layer.
      seed: of the bootstrap.
    """

    def distances(drawn: np.ndarray) -> list[Any]:
        mean = np.tensordot(drawn, divergences, 1) / (drawn @ queries)[..., None, None]
        return distances_by_layer(np.sqrt(mean), heads)

    count = len(queries)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), DISTANCE_RESAMPLES)
    resampled = zip(*map(distances, np.array_split(drawn.astype(float), DISTANCE_RESAMPLES // 20)), strict=True)
    return [
        None if value is None else BootstrapMean(value, *percentiles(np.concatenate(of)))._asdict()
        for value, of in zip(distances(np.ones(count)), resampled, strict=True)
    ]
