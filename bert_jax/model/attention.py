"""One attention signature, several implementations, chosen by name.

Shapes: B rows, S positions, N heads, D head size. All take query, key and value already projected and
(where rotary) rotated, and a boolean mask; none knows about layers, weights or sharding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.errors import UserError
from bert_jax.model.layers import Noise, dropout
from bert_jax.shapes import Array, Bool, Float, Int


class AttentionResult(NamedTuple):
    """Context vectors and, where asked for, the probabilities before dropout."""

    context: Float[Array, "B S N D"]
    probabilities: Float[Array, "B N S S"] | None


Attention = Callable[..., AttentionResult]


def visible(segment_ids: Int[Array, "B S"], before: int | None, after: int | None) -> Bool[Array, "B 1 S S"]:
    """Which key each query may look at.

    A token sees itself and the tokens of its own packed example that stand at most `before` places before it
    and `after` places after it. Padding (segment 0) is seen by nobody, but itself looks at all real tokens,
    near or far, so that no query is left without a key; `transformers` fills its padded positions the same way.

    Args:
      segment_ids: which packed example a token belongs to, from 1; 0 is padding.
      before: None: as far as the example goes.
      after: the same; 0 makes attention causal.
    """
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    place = jnp.arange(segment_ids.shape[1])
    ahead_ST = place[None, :] - place[:, None]
    allowed = query == key
    if before is not None:
        allowed &= (ahead_ST >= -before)[None, None]
    if after is not None:
        allowed &= (ahead_ST <= after)[None, None]
    return (key > 0) & (allowed | (query == 0))


def reference(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    mask: Bool[Array, "B 1 S S"],
    *,
    dropout_rate: float = 0.0,
    noise: Noise | None = None,
    keep_probabilities: bool = False,
) -> AttentionResult:
    """Softmax attention in plain jnp (Vaswani et al. 2017, section 3.2); softmax in float32."""
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", query, key, preferred_element_type=jnp.float32)
    scores_BNST *= query.shape[-1] ** -0.5
    # A finite floor: a query whose every key is masked gets the mean of all values instead of NaN.
    scores_BNST = jnp.where(mask, scores_BNST, jnp.finfo(jnp.float32).min)
    probabilities_BNST = jax.nn.softmax(scores_BNST, axis=-1)
    mixed_BNST = dropout(probabilities_BNST, dropout_rate, noise).astype(value.dtype)
    context_BSND = jnp.einsum("bnst,btnd->bsnd", mixed_BNST, value)
    return AttentionResult(context_BSND, probabilities_BNST if keep_probabilities else None)


def _fused(implementation: str) -> Attention:
    def attention(
        query: Float[Array, "B S N D"],
        key: Float[Array, "B S N D"],
        value: Float[Array, "B S N D"],
        mask: Bool[Array, "B 1 S S"],
        *,
        dropout_rate: float = 0.0,
        noise: Noise | None = None,
        keep_probabilities: bool = False,
    ) -> AttentionResult:
        if keep_probabilities:
            raise UserError(
                f"model.attention '{implementation}' never holds attention probabilities: "
                "set model.attention reference to read them"
            )
        # Attention dropout with a fused kernel is refused when the config is made (ModelConfig).
        assert dropout_rate == 0.0 or noise is None
        context_BSND = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=implementation)
        return AttentionResult(context_BSND, None)

    return attention


def late(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    mask: Bool[Array, "B 1 S S"],
    *,
    dropout_rate: float = 0.0,
    noise: Noise | None = None,
    keep_probabilities: bool = False,
) -> AttentionResult:
    """`reference` with fewer walks over [B, N, S, S]: queries are scaled, and contexts divided by the softmax's sums.

    On two CPU cores a whole encoder took 8 % (S = 128) and 16 % (S = 256) less CPU time than with "xla" (docs/LOG.md).
    """
    if keep_probabilities:
        raise UserError(
            "model.attention 'late' never holds attention probabilities: set model.attention reference to read them"
        )
    # Attention dropout needs probabilities; it is refused when the config is made (ModelConfig).
    assert dropout_rate == 0.0 or noise is None
    scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", scaled, key, preferred_element_type=jnp.float32)
    # Finite as in `reference`; added, so that the mask is made once for all heads.
    scores_BNST += jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    weights_BNST = jnp.exp(scores_BNST - scores_BNST.max(-1, keepdims=True))
    sums_BNS1 = weights_BNST.sum(-1, keepdims=True)
    mixed_BNSD = jnp.einsum(
        "bnst,btnd->bnsd", weights_BNST.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return AttentionResult(jnp.moveaxis(mixed_BNSD / sums_BNS1, 1, 2).astype(value.dtype), None)


ATTENTIONS: dict[str, Attention] = {
    "reference": reference,
    "late": late,
    "xla": _fused("xla"),
    "cudnn": _fused("cudnn"),
}


def rotate(x: Float[Array, "B S N D"], position_ids: Int[Array, "B S"], base: float) -> Float[Array, "B S N D"]:
    """Rotary position encoding (Su et al. 2021, section 3.4), halves rotated against each other."""
    half = x.shape[-1] // 2
    wavelengths = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = position_ids[:, :, None, None].astype(jnp.float32) * wavelengths[None, None, None, :]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
