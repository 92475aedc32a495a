"""Attention, in several implementations that are chosen by name.

They take query, key and value already projected and (where rotary) rotated; none depends on layers, weights or
sharding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.config.sections import KERNEL_ROW_LENGTHS
from bert_jax.errors import UserError
from bert_jax.model.layers import DropoutKey, dropout


class AttentionResult(NamedTuple):
    """Context vectors and, if requested, the probabilities before dropout."""

    context: Float[Array, "B S N D"]
    probabilities: Float[Array, "B N S S"] | None


def make_attention_mask(
    segment_ids: Int[Array, "B S"], before: int | None, after: int | None
) -> Bool[Array, "B 1 S S"]:
    """True where a query may attend to a key.

    A token attends to itself and to the tokens of its own packed example at most `before` positions before it
    and `after` positions after it. No token attends to padding (segment 0). Padding attends to all real tokens at
    any distance, so that every query has a key; `transformers` fills its padded positions the same way.

    Args:
      segment_ids: which packed example a token belongs to, from 1; 0 is padding.
      before: tokens; None sets no limit.
      after: likewise; 0 makes attention causal.
    """
    query, key = segment_ids[:, None, :, None], segment_ids[:, None, None, :]
    position = jnp.arange(segment_ids.shape[1])
    distance_ST = position[None, :] - position[:, None]
    allowed = query == key
    if before is not None:
        allowed &= (distance_ST >= -before)[None, None]
    if after is not None:
        allowed &= (distance_ST <= after)[None, None]
    return (key > 0) & (allowed | (query == 0))


def attend(
    implementation: str,
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    segment_ids: Int[Array, "B S"],
    *,
    before: int | None = None,
    after: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey | None = None,
    keep_probabilities: bool = False,
) -> AttentionResult:
    """Softmax attention by an implementation of `ModelConfig.attention`; only `reference` has probabilities.

    Args:
      implementation: not `auto`. Without a dropout key, that is in evaluation, the kernels are replaced by `xla`.
      query, key, value: after projection and rotation.
      segment_ids, before, after: which pairs attend, see `make_attention_mask`. The context of padding has no meaning.
      dropout_rate, dropout_key: of dropout on the probabilities.
      keep_probabilities: whether to return them.

    Raises:
      UserError: `keep_probabilities` with another implementation.
    """
    if implementation in KERNEL_ROW_LENGTHS and dropout_key is not None and not keep_probabilities:
        return AttentionResult(
            _kernel_attention(implementation)(
                query,
                key,
                value,
                segment_ids,
                before=before,
                after=after,
                dropout_rate=dropout_rate,
                dropout_key=dropout_key,
            ),
            None,
        )
    assert implementation != "auto", "call training.implementation.choose_implementation before"
    mask = make_attention_mask(segment_ids, before, after)
    if implementation == "reference":
        probabilities_BNST = reference_probabilities(query, key, mask)
        dropped_BNST = dropout(probabilities_BNST, dropout_rate, dropout_key).astype(value.dtype)
        context_BSND = jnp.einsum("bnst,btnd->bsnd", dropped_BNST, value)
        return AttentionResult(context_BSND, probabilities_BNST if keep_probabilities else None)
    if keep_probabilities:
        raise UserError(
            f"model.attention '{implementation}' has no attention probabilities: "
            "set model.attention reference to read them"
        )
    # Attention dropout needs probabilities; ModelConfig refuses it.
    assert dropout_rate == 0.0 or dropout_key is None
    if implementation == "deferred":
        return AttentionResult(_deferred_softmax(query, key, value, mask), None)
    library = {"xla": "xla", "cudnn": "cudnn"} | dict.fromkeys(KERNEL_ROW_LENGTHS, "xla")
    fused = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=library[implementation])
    return AttentionResult(fused, None)


def _kernel_attention(implementation: str) -> Callable[..., Float[Array, "B S N D"]]:
    """The function of an implementation by kernels, imported at its first use: Pallas takes 0.2 s to import."""
    if implementation == "pallas_gpu":
        from bert_jax.model.gpu_attention import kernel_attention
    else:
        from bert_jax.model.tpu_attention import kernel_attention
    return kernel_attention


def reference_probabilities(
    query: Float[Array, "B S N D"], key: Float[Array, "B S N D"], mask: Bool[Array, "B 1 S S"]
) -> Float[Array, "B N S S"]:
    """The softmax of attention in plain jnp (Vaswani et al. 2017, section 3.2), in float32."""
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", query, key, preferred_element_type=jnp.float32)
    scores_BNST *= query.shape[-1] ** -0.5
    # A finite floor: a query with all keys masked gets the mean of all values instead of NaN.
    scores_BNST = jnp.where(mask, scores_BNST, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores_BNST, axis=-1)


def _deferred_softmax(
    query: Float[Array, "B S N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    mask: Bool[Array, "B 1 S S"],
) -> Float[Array, "B S N D"]:
    """Attention with fewer passes over [B, N, S, S]: it scales the queries instead of the scores.

    The division by the sums of the softmax is deferred to the contexts. On two CPU cores a whole encoder took 8 %
    (S = 128) and 16 % (S = 256) less CPU time than with "xla" (docs/LOG.md).
    """
    scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    scores_BNST = jnp.einsum("bsnd,btnd->bnst", scaled, key, preferred_element_type=jnp.float32)
    # Finite as in `reference`; added, so that one mask serves all heads.
    scores_BNST += jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    weights_BNST = jnp.exp(scores_BNST - scores_BNST.max(-1, keepdims=True))
    sums_BNS1 = weights_BNST.sum(-1, keepdims=True)
    weighted_BNSD = jnp.einsum(
        "bnst,btnd->bnsd", weights_BNST.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(weighted_BNSD / sums_BNS1, 1, 2).astype(value.dtype)


def apply_rotary_embedding(
    x: Float[Array, "B S N D"], position_ids: Int[Array, "B S"], base: float
) -> Float[Array, "B S N D"]:
    """Rotary position embedding (Su et al. 2021, section 3.4) that pairs element i with element i + D / 2."""
    half = x.shape[-1] // 2
    wavelengths = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = position_ids[:, :, None, None].astype(jnp.float32) * wavelengths[None, None, None, :]
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
