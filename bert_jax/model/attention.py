"""Attention, in several implementations that are chosen by name.

They take query, key and value already projected and (where rotary) rotated; none depends on layers, weights or
sharding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Bool, Float, Int
from bert_jax.config.sections import FUSED_ATTENTION, KERNEL_ROW_LENGTHS
from bert_jax.errors import UserError
from bert_jax.model.activations import REFERENCE_SITES, LayerTap
from bert_jax.model.dropout import DropoutKey, Selection, dropout
from bert_jax.model.layers import gather_positions


def make_attention_mask(
    segment_ids: Int[Array, "B S"],
    before: int | None,
    after: int | None,
    query_positions: Int[Array, "B Q"] | None = None,
) -> Bool[Array, "B 1 Q S"]:
    """True where a query may attend to a key.

    A token attends to itself and to the tokens of its own packed example at most `before` positions before it
    and `after` positions after it. No token attends to padding (segment 0). Padding attends to all real tokens at
    any distance, so that every query has a key; `transformers` fills its padded positions the same way.

    Args:
      segment_ids: which packed example a token belongs to, from 1; 0 is padding.
      before: tokens; None sets no limit.
      after: likewise; 0 makes attention causal.
      query_positions: of the queries; None: all, Q = S.
    """
    position = jnp.arange(segment_ids.shape[1])[None]
    if query_positions is None:
        query_positions, query_segments = position, segment_ids
    else:
        query_segments = gather_positions(segment_ids, query_positions)
    query, key = query_segments[:, None, :, None], segment_ids[:, None, None, :]
    distance = (position[:, None, :] - query_positions[:, :, None])[:, None]
    allowed = query == key
    if before is not None:
        allowed &= distance >= -before
    if after is not None:
        allowed &= distance <= after
    return (key > 0) & (allowed | (query == 0))


def attend(
    implementation: str,
    query: Float[Array, "B Q N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    segment_ids: Int[Array, "B S"],
    *,
    query_positions: Int[Array, "B Q"] | None = None,
    before: int | None = None,
    after: int | None = None,
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey | None = None,
    tap: LayerTap | None = None,
) -> Float[Array, "B Q N D"]:
    """Context vectors of softmax attention, by an implementation of `ModelConfig.attention`.

    Args:
      implementation: not `auto`. Without a dropout key, that is in evaluation, the kernels are replaced by `xla`.
      query, key, value: after projection and rotation.
      query_positions: of the queries; None: all, Q = S. Not for kernels and `cudnn`.
      segment_ids, before, after: which pairs attend, see `make_attention_mask`. The context of padding has no meaning.
      dropout_rate, dropout_key: of dropout on the probabilities.
      tap: records and edits scores and probabilities, which only `reference` computes.

    Raises:
      UserError: the tap needs scores or probabilities, with another implementation.
    """
    tap = tap or LayerTap()
    assert query_positions is None or implementation not in FUSED_ATTENTION
    if uses_kernels(implementation, dropout_key, tap):
        projected = jnp.stack((query, key, value), axis=2).reshape(*key.shape[:2], -1)
        settings = {"before": before, "after": after, "dropout_rate": dropout_rate, "dropout_key": dropout_key}
        return attend_in_place(implementation, projected, segment_ids, num_heads=key.shape[2], **settings)
    assert implementation != "auto", "call training.implementation.choose_implementation before"
    mask = make_attention_mask(segment_ids, before, after, query_positions)
    selection = None if query_positions is None else Selection(2, query_positions, key.shape[1])
    if implementation == "reference":
        probabilities_BNQS = _reference_probabilities(query, key, mask, tap)
        dropped_BNQS = dropout(probabilities_BNQS, dropout_rate, dropout_key, selection).astype(value.dtype)
        return jnp.einsum("bnqs,bsnd->bqnd", dropped_BNQS, value)
    if tap.touches(REFERENCE_SITES):
        raise UserError(
            f"model.attention '{implementation}' has no attention probabilities: "
            "set model.attention reference to read them"
        )
    if implementation == "deferred":
        return _deferred_softmax(query, key, value, mask, dropout_rate, dropout_key, selection)
    # Attention dropout needs probabilities; ModelConfig refuses it.
    assert dropout_rate == 0.0 or dropout_key is None
    library = "cudnn" if implementation == "cudnn" else "xla"
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=library)


def uses_kernels(implementation: str, dropout_key: DropoutKey | None, tap: LayerTap) -> bool:
    """Whether `attend` calls kernels: not in evaluation, and not if scores or probabilities are recorded or edited."""
    return implementation in KERNEL_ROW_LENGTHS and dropout_key is not None and not tap.touches(REFERENCE_SITES)


def attend_in_place(
    implementation: str,
    projected: Float[Array, "B S W"],
    segment_ids: Int[Array, "B S"],
    projection_bias: Float[Array, " W"] | None = None,
    **settings: Any,
) -> Float[Array, "B S N D"]:
    """`attend` by kernels, which read query, key and value where one projection wrote them, and write its gradient.

    Args:
      implementation: a kernel.
      projected: queries of all heads, keys of all heads, values of all heads; not rotated.
      segment_ids: as of `attend`.
      projection_bias: added to `projected`; the kernels add up its gradient.
      settings: `num_heads`, and `before`, `after`, `dropout_rate` and `dropout_key` as of `attend`.
    """
    return _kernel_attention(implementation)(projected, segment_ids, bias=projection_bias, **settings)


def _kernel_attention(implementation: str) -> Callable[..., Float[Array, "B S N D"]]:
    """The function of an implementation by kernels, imported at its first use: Pallas takes 0.2 s to import."""
    if implementation == "pallas_gpu":
        from bert_jax.model.gpu_attention import kernel_attention
    else:
        from bert_jax.model.tpu_attention import kernel_attention
    return kernel_attention


def _reference_probabilities(
    query: Float[Array, "B Q N D"], key: Float[Array, "B S N D"], mask: Bool[Array, "B 1 Q S"], tap: LayerTap
) -> Float[Array, "B N Q S"]:
    """The softmax of attention in plain jnp (Vaswani et al. 2017, section 3.2), in float32."""
    scores_BNQS = jnp.einsum("bqnd,bsnd->bnqs", query, key, preferred_element_type=jnp.float32)
    scores_BNQS = tap("attention.scores", scores_BNQS * query.shape[-1] ** -0.5)
    # A finite floor: a query with all keys masked gets the mean of all values instead of NaN.
    scores_BNQS = jnp.where(mask, scores_BNQS, jnp.finfo(jnp.float32).min)
    return tap("attention.probabilities", jax.nn.softmax(scores_BNQS, axis=-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _deferred_softmax(
    query: Float[Array, "B Q N D"],
    key: Float[Array, "B S N D"],
    value: Float[Array, "B S N D"],
    mask: Bool[Array, "B 1 Q S"],
    dropout_rate: float,
    dropout_key: DropoutKey | None,
    selection: Selection | None,
) -> Float[Array, "B Q N D"]:
    """Attention with fewer passes over [B, N, Q, S]: it scales the queries instead of the scores.

    The division by the sums of the softmax is deferred to the contexts. The backward pass is written out: it reads each
    operand with heads first, as the forward pass does, and sums gradients of probabilities over contexts instead of
    scores (Dao et al. 2022, appendix B.2). XLA for CPUs transposes operands of products with heads last, once for each
    product (docs/log/model.md, 2026-11-27).
    """
    return _deferred_forward(query, key, value, mask, dropout_rate, dropout_key, selection)[0]


def _deferred_forward(query, key, value, mask, dropout_rate, dropout_key, selection):
    scale = jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    query_BNQD, key_BNSD, value_BNSD = (jnp.moveaxis(x, 2, 1) for x in (query * scale, key, value))
    scores_BNQS = _product("bnqd,bnsd->bnqs", query_BNQD, key_BNSD)
    # Finite as in `reference`; added, so that one mask serves all heads.
    scores_BNQS += jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
    weights_BNQS = jnp.exp(scores_BNQS - scores_BNQS.max(-1, keepdims=True))
    sums_BNQ1 = weights_BNQS.sum(-1, keepdims=True)
    dropped_BNQS = dropout(weights_BNQS, dropout_rate, dropout_key, selection).astype(value.dtype)
    context_BNQD = _product("bnqs,bnsd->bnqd", dropped_BNQS, value_BNSD) / sums_BNQ1
    operands = query_BNQD, key_BNSD, value_BNSD, dropout_key, selection
    return jnp.moveaxis(context_BNQD, 1, 2).astype(value.dtype), (operands, weights_BNQS, sums_BNQ1, context_BNQD)


def _deferred_backward(dropout_rate, residuals, gradient):
    (query_BNQD, key_BNSD, value_BNSD, *key_and_selection), weights_BNQS, sums_BNQ1, context_BNQD = residuals
    dtype = gradient.dtype
    context_gradient_BNQD = jnp.moveaxis(gradient, 2, 1).astype(jnp.float32) / sums_BNQ1
    projection_BNQ1 = (context_gradient_BNQD * context_BNQD).sum(-1, keepdims=True)
    context_gradient_BNQD = context_gradient_BNQD.astype(dtype)
    dropped_BNQS = dropout(weights_BNQS, dropout_rate, *key_and_selection).astype(dtype)
    value_gradient = _product("bnqs,bnqd->bnsd", dropped_BNQS, context_gradient_BNQD)
    weight_gradient_BNQS = _product("bnqd,bnsd->bnqs", context_gradient_BNQD, value_BNSD)
    weight_gradient_BNQS = dropout(weight_gradient_BNQS, dropout_rate, *key_and_selection)
    score_gradient_BNQS = (weights_BNQS * (weight_gradient_BNQS - projection_BNQ1)).astype(dtype)
    query_gradient = _product("bnqs,bnsd->bnqd", score_gradient_BNQS, key_BNSD) * query_BNQD.shape[-1] ** -0.5
    key_gradient = _product("bnqs,bnqd->bnsd", score_gradient_BNQS, query_BNQD)
    gradients = (jnp.moveaxis(x, 1, 2).astype(dtype) for x in (query_gradient, key_gradient, value_gradient))
    return *gradients, None, None, None


def _product(axes: str, first: Float[Array, "B N ..."], second: Float[Array, "B N ..."]) -> Float[Array, "B N ..."]:
    return jnp.einsum(axes, first, second, preferred_element_type=jnp.float32)


_deferred_softmax.defvjp(_deferred_forward, _deferred_backward)


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
