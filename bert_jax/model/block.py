"""One layer of the encoder: self-attention, feed-forward networks, and a bottleneck around them."""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Float, Int, Key
from bert_jax.config import ModelConfig
from bert_jax.config.sections import FUSED_ATTENTION, GPU_NORM_WIDTHS
from bert_jax.model.activations import PROJECTION_SITES, LayerTap
from bert_jax.model.attention import apply_rotary_embedding, attend, attend_in_place, uses_kernels
from bert_jax.model.dropout import DropoutKey, Selection, dropout
from bert_jax.model.embeddings import EncoderInputs
from bert_jax.model.layer_plan import LayerPlan, NormPlacement
from bert_jax.model.layers import ACTIVATIONS, Adapter, Dense, gather_positions, outer_dense_dtype, truncated_normal
from bert_jax.model.norms import make_norm

EMBEDDING_SITE, ATTENTION_SITE, ATTENTION_OUT_SITE, FEED_FORWARD_SITE, BOTTLENECK_SITE = range(5)


class Bottleneck(nnx.Module):
    """Projections of a layer's input to the width inside the layer, and of its result back (Sun et al. 2020, 3.1)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        init, dense = truncated_normal(config.initializer_range), _dense_settings(config)
        entry, attention, output = jax.random.split(key, 3)
        outside, inside = (config.hidden_size,), (config.layer_width,)
        is_shared = config.bottleneck_attention == "shared"
        self.input = Dense(outside, inside, init, entry, *dense)
        self.input_norm = make_norm(config, config.layer_width)
        self.attention = Dense(outside, inside, init, attention, *dense) if is_shared else None
        self.attention_norm = make_norm(config, config.layer_width) if is_shared else None
        self.output = Dense(inside, outside, init, output, *dense)
        self.output_norm = make_norm(config, config.hidden_size)
        self.config = config

    def enter(self, hidden: Float[Array, "B S H"]) -> Float[Array, "B S C"]:
        """What the layer's residual connections begin with."""
        return self.input_norm(self.input(hidden))

    def attention_inputs(
        self, hidden: Float[Array, "B S H"], narrow: Float[Array, "B S C"]
    ) -> tuple[Float[Array, "B S E"], Float[Array, "B S G"]]:
        """What query and key are computed from, and what value is computed from."""
        if self.attention is not None:
            return self.attention_norm(self.attention(hidden)), hidden
        return (narrow, narrow) if self.config.bottleneck_attention == "bottleneck" else (hidden, hidden)

    def leave(
        self,
        narrow: Float[Array, "B Q C"],
        hidden: Float[Array, "B Q H"],
        dropout_key: DropoutKey | None,
        selection: Selection | None,
    ) -> Float[Array, "B Q H"]:
        """The layer's result, with the residual connection to its input."""
        key = dropout_key and dropout_key.fold_in(BOTTLENECK_SITE)
        return self.output_norm(dropout(self.output(narrow), self.config.hidden_dropout, key, selection) + hidden)


class FeedForward(nnx.Module):
    """A feed-forward network before the last one of its layer, with residual connection and norm."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        self.gate, self.up, self.down, self.norm = _feed_forward_parts(config, *jax.random.split(key, 3))
        self.activation = config.activation

    def __call__(self, hidden: Float[Array, "B Q C"], plan: LayerPlan) -> Float[Array, "B Q C"]:
        """Apply the network."""
        if plan.norm_placement is NormPlacement.POST:
            return self.norm(hidden + self.down(_activated(self, self.activation, hidden)))
        return hidden + self.down(_activated(self, self.activation, self.norm(hidden)))


class Block(nnx.Module):
    """Self-attention and feed-forward, each with a residual connection (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        init = truncated_normal(config.initializer_range)
        qkv, attention_out, up, down, gate = jax.random.split(key, 5)
        heads, dense = (config.num_heads, config.size_per_head), _dense_settings(config)
        outside, inside = (config.hidden_size,), (config.layer_width,)
        has_bottleneck, kind = config.bottleneck_size is not None, config.bottleneck_attention
        self.bottleneck = Bottleneck(config, jax.random.fold_in(key, 7)) if has_bottleneck else None
        # Query, key and value are one kernel; LAMB and the converters treat its axis of 3 as three tensors. Those with
        # different inputs are two kernels.
        is_split = has_bottleneck and kind == "shared"
        inputs = outside if kind == "input" else inside
        self.qkv = None if is_split else Dense(inputs, (3, *heads), init, qkv, *dense)
        self.query_key = Dense(inside, (2, *heads), init, qkv, *dense) if is_split else None
        self.value = Dense(outside, heads, init, jax.random.fold_in(key, 8), *dense) if is_split else None
        self.attention_out = Dense(heads, inside, init, attention_out, *dense)
        self.attention_norm = make_norm(config, config.layer_width)
        earlier = range(config.feed_forward_networks - 1)
        networks = {str(i): FeedForward(config, jax.random.fold_in(key, 9 + i)) for i in earlier}
        self.networks = nnx.Dict(networks) if networks else None
        self.gate, self.up, self.down, self.feed_forward_norm = _feed_forward_parts(config, gate, up, down)
        self.attention_adapter = _adapter(config, key, 5)
        self.feed_forward_adapter = _adapter(config, key, 6)
        self.config = config

    def __call__(
        self,
        hidden: Float[Array, "B S H"],
        plan: LayerPlan,
        inputs: EncoderInputs,
        dropout_key: DropoutKey | None,
        tap: LayerTap,
        positions: Int[Array, "B Q"] | None = None,
    ) -> Float[Array, "B Q H"]:
        """Apply one layer according to its plan; `tap` sees its activations.

        With `positions`, only the outputs at these positions are computed; without, Q = S.
        """
        selection = None if positions is None else Selection(1, positions, hidden.shape[1])
        if self.bottleneck is None:
            attention_input = self.attention_norm(hidden) if plan.norm_placement is NormPlacement.PRE else hidden
            sources = attention_input, attention_input
            return tap("hidden", self._sub_layers(hidden, sources, plan, inputs, dropout_key, tap, selection))
        narrow = self.bottleneck.enter(hidden)
        sources = self.bottleneck.attention_inputs(hidden, narrow)
        narrow = self._sub_layers(narrow, sources, plan, inputs, dropout_key, tap, selection)
        if positions is not None:
            hidden = gather_positions(hidden, positions)
        return tap("hidden", self.bottleneck.leave(narrow, hidden, dropout_key, selection))

    def _sub_layers(
        self,
        hidden: Float[Array, "B S C"],
        sources: tuple[Float[Array, "B S E"], Float[Array, "B S G"]],
        plan: LayerPlan,
        inputs: EncoderInputs,
        dropout_key: DropoutKey | None,
        tap: LayerTap,
        selection: Selection | None,
    ) -> Float[Array, "B Q C"]:
        """Attention and feed-forward networks in the width of the layer; `sources` as of `attention_inputs`."""
        positions = None if selection is None else selection.positions
        context = self._attend(*sources, plan, inputs, dropout_key, tap, positions)
        if positions is not None:
            hidden = gather_positions(hidden, positions)
        hidden = self._add_output(ATTENTION_OUT_SITE, context, hidden, plan, dropout_key, tap, selection)
        for network in () if self.networks is None else self.networks.values():
            hidden = network(hidden, plan)

        feed_forward_input = hidden if plan.norm_placement is NormPlacement.POST else self.feed_forward_norm(hidden)
        activated = tap("feed_forward.activations", _activated(self, self.config.activation, feed_forward_input))
        return self._add_output(FEED_FORWARD_SITE, activated, hidden, plan, dropout_key, tap, selection)

    def _add_output(
        self,
        site: int,
        x: Float[Array, "B Q ..."],
        hidden: Float[Array, "B Q C"],
        plan: LayerPlan,
        dropout_key: DropoutKey | None,
        tap: LayerTap,
        selection: Selection | None,
    ) -> Float[Array, "B Q C"]:
        """The end of a sub-layer: its dense layer, which reads x, dropout, the sum with `hidden`, and a norm after it.

        All but the dense layer is one kernel with the attention `pallas_gpu`, in training, where nothing reads what is
        between.
        """
        name, dense, adapter, norm = {
            ATTENTION_OUT_SITE: ("attention.output", self.attention_out, self.attention_adapter, self.attention_norm),
            FEED_FORWARD_SITE: ("feed_forward.output", self.down, self.feed_forward_adapter, self.feed_forward_norm),
        }[site]
        rate, key = self.config.hidden_dropout, dropout_key and dropout_key.fold_in(site)
        rate = rate if self.bottleneck is None else 0.0
        is_normalised = plan.norm_placement is NormPlacement.POST
        reads_between = adapter is not None or selection is not None or tap.touches((name,))
        if has_norm_kernel(self.config) and key is not None and is_normalised and not reads_between:
            from bert_jax.model.gpu_norm import dropout_add_norm  # Pallas takes 0.2 s to import

            biases = [None if one.bias is None else one.bias[...] for one in (dense, norm)]
            settings = {"epsilon": norm.epsilon, "dropout_rate": rate, "dropout_key": key}
            return dropout_add_norm(dense.without_bias(x), biases[0], hidden, norm.scale[...], biases[1], **settings)
        output = dropout(tap(name, dense(x)), rate, key, selection)
        hidden = hidden + (output if adapter is None else adapter(output))
        return norm(hidden) if is_normalised else hidden

    def _attend(
        self,
        query_key_source: Float[Array, "B S E"],
        value_source: Float[Array, "B S G"],
        plan: LayerPlan,
        inputs: EncoderInputs,
        dropout_key: DropoutKey | None,
        tap: LayerTap,
        positions: Int[Array, "B Q"] | None,
    ) -> Float[Array, "B Q N D"]:
        """Context vectors."""
        settings = {
            "before": plan.window,
            "after": 0 if self.config.direction == "causal" else plan.window,
            "dropout_rate": self.config.attention_dropout,
            "dropout_key": dropout_key and dropout_key.fold_in(ATTENTION_SITE),
        }
        # Fused attention needs whole rows, so it computes all queries; its outputs are gathered.
        query_positions = None if self.config.attention in FUSED_ATTENTION else positions
        if (
            self.qkv is not None
            and plan.rotary_base is None
            and uses_kernels(self.config.attention, dropout_key, tap)
            and not tap.touches(PROJECTION_SITES)
        ):
            projected, projection_bias = self.qkv.side_by_side(query_key_source)
            settings |= {"num_heads": self.config.num_heads, "projection_bias": projection_bias}
            context_BQND = attend_in_place(self.config.attention, projected, inputs.segment_ids, **settings)
        else:
            query, key, value = self._rotated(query_key_source, value_source, plan, inputs, query_positions)
            query, key = tap("attention.query", query), tap("attention.key", key)
            value = tap("attention.value", value)
            settings |= {"query_positions": query_positions, "tap": tap}
            context_BQND = attend(self.config.attention, query, key, value, inputs.segment_ids, **settings)
        if positions is not None and query_positions is None:
            context_BQND = gather_positions(context_BQND, positions)
        return tap("attention.context", context_BQND)

    def _rotated(
        self,
        query_key_source: Float[Array, "B S E"],
        value_source: Float[Array, "B S G"],
        plan: LayerPlan,
        inputs: EncoderInputs,
        positions: Int[Array, "B Q"] | None,
    ) -> tuple[Float[Array, "B Q N D"], Float[Array, "B S N D"], Float[Array, "B S N D"]]:
        """Query, key and value, with rotary embedding where the plan has it; queries at the positions, or all."""
        queries, query_ids = query_key_source, inputs.position_ids
        if positions is not None:
            queries, query_ids = (gather_positions(x, positions) for x in (queries, query_ids))
        query, key, value = self._project(queries, query_key_source, value_source)
        if plan.rotary_base is not None:
            query = apply_rotary_embedding(query, query_ids, plan.rotary_base)
            key = apply_rotary_embedding(key, inputs.position_ids, plan.rotary_base)
        return query, key, value

    def _project(
        self, queries: Float[Array, "B Q E"], keys: Float[Array, "B S E"], values: Float[Array, "B S G"]
    ) -> tuple[Float[Array, "B Q N D"], Float[Array, "B S N D"], Float[Array, "B S N D"]]:
        """Query, key and value from what each is computed from."""
        if self.qkv is None:
            query, key = self.query_key.separate_products((queries, keys))
            return query, key, self.value(values)
        if queries is not keys or self.config.attention == "deferred":  # deferred: the implementation for CPUs
            query, key, value = self.qkv.separate_products((queries, keys, values))
        else:
            query, key, value = jnp.moveaxis(self.qkv(keys), 2, 0)
        return query, key, value


def has_norm_kernel(config: ModelConfig) -> bool:
    """Whether a kernel can serve the norms of layers: LayerNorms of the widths that it is made for."""
    return config.has_gpu_kernels and config.norm == "layer" and config.layer_width in GPU_NORM_WIDTHS


def _dense_settings(config: ModelConfig) -> tuple[str, str, bool]:
    """`biases`, `dtype` and `merges_axes` of the dense layers of a block. `deferred` is the implementation for CPUs."""
    return config.biases, config.dense_dtype, config.attention == "deferred"


def _feed_forward_parts(config: ModelConfig, gate: Array, up: Array, down: Array) -> tuple:
    """Dense layers `gate` (None if not gated), `up` and `down`, and the norm; the arguments are the keys."""
    init, dense = truncated_normal(config.initializer_range), _dense_settings(config)
    width, intermediate = (config.layer_width,), (config.intermediate_size,)
    return (
        Dense(width, intermediate, init, gate, *dense) if config.feed_forward == "gated" else None,
        Dense(width, intermediate, init, up, *dense),
        Dense(intermediate, width, init, down, *dense),
        make_norm(config, config.layer_width),
    )


def _activated(network: "Block | FeedForward", activation: str, hidden: Float[Array, "B Q C"]):
    """What `down` of a feed-forward network reads, [B, Q, F]."""
    activate, up_BQF = ACTIVATIONS[activation], network.up(hidden)
    return activate(up_BQF) if network.gate is None else activate(network.gate(hidden)) * up_BQF


def _adapter(config: ModelConfig, key: Key[Array, ""], site: int) -> Adapter | None:
    size = config.adapter_size
    if size is None:
        return None
    return Adapter(config.layer_width, size, jax.random.fold_in(key, site), outer_dense_dtype(config.dense_dtype))
