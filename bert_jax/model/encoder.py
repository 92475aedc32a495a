"""The encoder: embeddings, a block, a stack of blocks, a pooler."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Bool, Float, Int, Key
from bert_jax.config import ModelConfig
from bert_jax.config.sections import FUSED_ATTENTION
from bert_jax.model.activations import Edits, LayerTap
from bert_jax.model.attention import apply_rotary_embedding, attend
from bert_jax.model.int8 import round_rows
from bert_jax.model.layer_plan import (
    LayerPlan,
    NormPlacement,
    count_last_layer_positions,
    layer_plans,
    parameter_groups,
)
from bert_jax.model.layers import (
    ACTIVATIONS,
    Adapter,
    Dense,
    DropoutKey,
    LayerNorm,
    Selection,
    dropout,
    gather_positions,
    outer_dense_dtype,
    truncated_normal,
)
from bert_jax.model.stack import run_stack

EMBEDDING_SITE, ATTENTION_SITE, ATTENTION_OUT_SITE, FEED_FORWARD_SITE = range(4)


class EncoderInputs(NamedTuple):
    """Inputs of the encoder; the names are those of a batch."""

    input_ids: Int[Array, "B S"]
    token_type_ids: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    """Index of the packed example that a token belongs to, from 1; 0 is padding."""
    position_ids: Int[Array, "B S"]
    cls_positions: Int[Array, "B K"]
    """Position of the [CLS] of each packed example."""


class EncoderOutput(NamedTuple):
    """Outputs of the encoder; `hidden_states` and `readouts` are None unless requested."""

    hidden: Float[Array, "B n H"]
    """Of all positions (n = S), or of those that were requested."""
    pooled: Float[Array, "B K H"] | None
    """tanh of a projection of each example's [CLS]; None without a pooler, or if it was not requested."""
    hidden_states: Float[Array, "L1 B S H"] | None
    """Output of the embeddings and of every layer: L + 1 entries."""
    activations: dict[str, Float[Array, "L ..."]]
    """By site, of all layers: those that were requested."""
    readouts: Float[Array, "L1 B n H"] | None = None
    """What `read_state` returns for every hidden state."""


class Embeddings(nnx.Module):
    """Sum of word, position and token-type embeddings, normalised (Devlin et al. 2019, figure 2).

    Tables narrower than the layers are projected to the hidden size after dropout (google-research/albert modeling.py).
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        init = truncated_normal(config.initializer_range)
        word, position, token_type, projection = jax.random.split(key, 4)
        width = config.embedding_width
        self.word = nnx.Param(init(word, (config.vocab_size, width)))
        shape = (config.position_offset + config.max_positions, width)
        self.position = nnx.Param(init(position, shape)) if config.positions == "learned" else None
        types = config.type_vocab_size
        self.token_type = nnx.Param(init(token_type, (types, width))) if types else None
        self.norm = LayerNorm(width, config.norm_epsilon, config.biases)
        inputs, outputs = (width,), (config.hidden_size,)
        factorised = config.embedding_size is not None
        dense = (config.biases, outer_dense_dtype(config.dense_dtype))
        self.projection = Dense(inputs, outputs, init, projection, *dense) if factorised else None
        self.rounds = config.dense_dtype == "int8"
        self.position_offset = config.position_offset
        self.dropout = config.hidden_dropout
        self.dtype = jnp.dtype(config.compute_dtype)

    def __call__(
        self, inputs: EncoderInputs, inputs_embeds: Float[Array, "B S E"] | None, dropout_key: DropoutKey | None
    ) -> Float[Array, "B S H"]:
        """Embed a batch; `inputs_embeds` replaces the word embeddings."""
        # Ids are checked on the host (data/row_reader.py); "clip" prevents a NaN fill in XLA.
        if inputs_embeds is None:
            inputs_embeds = self._round(jnp.take(self.word[...], inputs.input_ids, axis=0, mode="clip"))
        total = inputs_embeds.astype(jnp.float32)
        if self.position is not None:
            rows = inputs.position_ids + self.position_offset
            total += self._round(jnp.take(self.position[...], rows, axis=0, mode="clip"))
        if self.token_type is not None:
            # A product with one-hot rows, because the gradient of a gather would scatter-add B x S rows onto two.
            types = jax.nn.one_hot(inputs.token_type_ids, self.token_type.shape[0], dtype=jnp.float32)
            total += types @ self._round(self.token_type[...])
        embedded = dropout(self.norm(total).astype(self.dtype), self.dropout, dropout_key)
        return embedded if self.projection is None else self.projection(embedded)

    def decoder_table(self) -> Float[Array, "V E"]:
        """The word embeddings as the tied decoder of the MLM head multiplies them: rounded as in the lookup."""
        return self._round(self.word[...])

    def _round(self, rows: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return round_rows(rows) if self.rounds else rows


class Block(nnx.Module):
    """Self-attention and feed-forward, each with a residual connection (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        init = truncated_normal(config.initializer_range)
        qkv, attention_out, up, down, gate = jax.random.split(key, 5)
        heads, dense = (config.num_heads, config.size_per_head), (config.biases, config.dense_dtype)
        hidden, intermediate = (config.hidden_size,), (config.intermediate_size,)
        # Query, key and value are one kernel; LAMB and the converters treat its axis of 3 as three tensors.
        self.qkv = Dense(hidden, (3, *heads), init, qkv, *dense)
        self.attention_out = Dense(heads, hidden, init, attention_out, *dense)
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_epsilon, config.biases)
        self.gate = Dense(hidden, intermediate, init, gate, *dense) if config.feed_forward == "gated" else None
        self.up = Dense(hidden, intermediate, init, up, *dense)
        self.down = Dense(intermediate, hidden, init, down, *dense)
        self.feed_forward_norm = LayerNorm(config.hidden_size, config.norm_epsilon, config.biases)
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
        rate = self.config.hidden_dropout
        attention_input = self.attention_norm(hidden) if plan.norm_placement is NormPlacement.PRE else hidden
        attended = tap("attention.output", self._attend(attention_input, plan, inputs, dropout_key, tap, positions))
        selection = None
        if positions is not None:
            selection, hidden = Selection(1, positions, hidden.shape[1]), gather_positions(hidden, positions)
        attended = dropout(attended, rate, dropout_key and dropout_key.fold_in(ATTENTION_OUT_SITE), selection)
        hidden = hidden + (attended if self.attention_adapter is None else self.attention_adapter(attended))
        if plan.norm_placement is NormPlacement.POST:
            hidden = self.attention_norm(hidden)

        feed_forward_input = hidden if plan.norm_placement is NormPlacement.POST else self.feed_forward_norm(hidden)
        output = tap("feed_forward.output", self._feed_forward(feed_forward_input, tap))
        output = dropout(output, rate, dropout_key and dropout_key.fold_in(FEED_FORWARD_SITE), selection)
        hidden = hidden + (output if self.feed_forward_adapter is None else self.feed_forward_adapter(output))
        if plan.norm_placement is NormPlacement.POST:
            hidden = self.feed_forward_norm(hidden)
        return tap("hidden", hidden)

    def _feed_forward(self, hidden: Float[Array, "B Q H"], tap: LayerTap) -> Float[Array, "B Q H"]:
        activate, up_BQF = ACTIVATIONS[self.config.activation], self.up(hidden)
        activated_BQF = activate(up_BQF) if self.gate is None else activate(self.gate(hidden)) * up_BQF
        return self.down(tap("feed_forward.activations", activated_BQF))

    def _attend(
        self,
        hidden: Float[Array, "B S H"],
        plan: LayerPlan,
        inputs: EncoderInputs,
        dropout_key: DropoutKey | None,
        tap: LayerTap,
        positions: Int[Array, "B Q"] | None,
    ) -> Float[Array, "B Q H"]:
        # Fused attention needs whole rows, so it computes all queries; its outputs are gathered.
        query_positions = None if self.config.attention in FUSED_ATTENTION else positions
        query_ids = inputs.position_ids
        if query_positions is not None:
            queries, query_ids = (gather_positions(x, query_positions) for x in (hidden, query_ids))
            query, key, value = self.qkv.separate_products((queries, hidden, hidden))
        elif self.config.attention == "deferred":  # the implementation for CPUs
            query, key, value = self.qkv.separate_products((hidden,) * 3)
        else:
            query, key, value = jnp.moveaxis(self.qkv(hidden), 2, 0)
        if plan.rotary_base is not None:
            query = apply_rotary_embedding(query, query_ids, plan.rotary_base)
            key = apply_rotary_embedding(key, inputs.position_ids, plan.rotary_base)
        query, key = tap("attention.query", query), tap("attention.key", key)
        value = tap("attention.value", value)
        after = 0 if self.config.direction == "causal" else plan.window
        context_BQND = attend(
            self.config.attention,
            query,
            key,
            value,
            inputs.segment_ids,
            query_positions=query_positions,
            before=plan.window,
            after=after,
            dropout_rate=self.config.attention_dropout,
            dropout_key=dropout_key and dropout_key.fold_in(ATTENTION_SITE),
            tap=tap,
        )
        if positions is not None and query_positions is None:
            context_BQND = gather_positions(context_BQND, positions)
        return self.attention_out(tap("attention.context", context_BQND))


def _adapter(config: ModelConfig, key: Key[Array, ""], site: int) -> Adapter | None:
    size = config.adapter_size
    return (
        None
        if size is None
        else Adapter(config.hidden_size, size, jax.random.fold_in(key, site), outer_dense_dtype(config.dense_dtype))
    )


REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Encoder(nnx.Module):
    """Embeddings, layers stacked on a leading axis, pooler.

    To take, copy, drop or grow layers, index the leading axis of ``params["layers"]``.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""], *, pooler: bool):
        embeddings, layers, pooler_key = jax.random.split(key, 3)
        self.embeddings = Embeddings(config, embeddings)
        groups = len(set(parameter_groups(config)))
        self.layers = nnx.vmap(lambda key: Block(config, key))(jax.random.split(layers, groups))
        width = (config.hidden_size,)
        final_norm = config.norm_placement == "pre"
        self.final_norm = LayerNorm(config.hidden_size, config.norm_epsilon, config.biases) if final_norm else None
        init = truncated_normal(config.initializer_range)
        dense = (config.biases, outer_dense_dtype(config.dense_dtype))
        self.pooler = Dense(width, width, init, pooler_key, *dense) if pooler else None
        self.config = config

    def __call__(
        self,
        inputs: EncoderInputs,
        *,
        dropout_key: DropoutKey | None = None,
        inputs_embeds: Float[Array, "B S E"] | None = None,
        hidden_states: bool = False,
        activations: Sequence[str] = (),
        edits: Edits | None = None,
        read_state: Callable[[Float[Array, "B S H"]], Float[Array, "B n H"]] | None = None,
        positions: Int[Array, "B n"] | None = None,
        pool: bool = True,
        applied: Bool[Array, " L"] | None = None,
    ) -> EncoderOutput:
        """Encode a batch.

        Args:
          inputs: a batch; `input_ids` are ignored when `inputs_embeds` is given.
          dropout_key: source of dropout's random bits; None disables dropout.
          inputs_embeds: replaces the word embeddings.
          hidden_states: whether to return all L + 1 hidden states.
          activations: sites (`model.activations.SITES`) whose activations are returned for all layers.
          edits: changes of activations by site; differentiable.
          read_state: what to return of every hidden state as `readouts`, e.g. its [CLS] vectors; the states themselves
            are then not stacked.
          positions: where the output has hidden vectors; None: everywhere. The last layer then computes these and the
            [CLS] that a pooler reads, if they are at most half of the row (`count_last_layer_positions`). Not together
            with `hidden_states`, `activations` or `read_state`, which read the last layer everywhere, and only with
            edits that broadcast over positions.
          pool: whether to apply the pooler, if there is one.
          applied: layers that are computed, the others return their input; not with `positions` or `activations`.

        Raises:
          UserError: scores or probabilities of attention, with an implementation that has none.
        """

        def keep(hidden: Array) -> tuple[Array | None, Array | None]:
            return hidden if hidden_states else None, None if read_state is None else read_state(hidden)

        embedded = self.embeddings(inputs, inputs_embeds, dropout_key and dropout_key.fold_in(EMBEDDING_SITE))
        assert positions is None or not (hidden_states or activations or read_state)
        assert applied is None or (positions is None and not activations)
        pool, read = pool and self.pooler is not None, positions
        if positions is not None and pool:
            read = jnp.concatenate([positions, inputs.cls_positions], axis=1)
        hidden, kept, recorded = self._run_layers(
            embedded, inputs, dropout_key, (edits, applied), keep, activations, read
        )
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
            kept = jax.tree.map(lambda states, last: states.at[-1].set(last), kept, keep(hidden))
        num_positions = hidden.shape[1] if positions is None else positions.shape[1]
        pooled = None
        if pool:
            cls_BKH = gather_positions(hidden, inputs.cls_positions) if read is None else hidden[:, num_positions:]
            pooled = self.pool(cls_BKH)
        states, readouts = jax.tree.map(
            lambda first, others: jnp.concatenate([first[None], others]), keep(embedded), kept
        )
        return EncoderOutput(hidden[:, :num_positions], pooled, states, recorded, readouts)

    def pool(self, cls: Float[Array, "B K H"]) -> Float[Array, "B K H"]:
        """tanh of a projection of [CLS] vectors; only with a pooler."""
        return jnp.tanh(self.pooler(cls))

    def _run_layers(self, hidden, inputs, dropout_key, by_layer, keep, sites, read):
        """Apply all layers, the last one at the positions `read`, if they are few. `by_layer` are (edits, applied).

        Returns (hidden at `read`, keep(hidden) of the layers [L ...], their activations at the sites [L ...]).
        """
        graph, stacked = nnx.split(self.layers)
        plans, groups = layer_plans(self.config), parameter_groups(self.config)

        def apply_layer(hidden, parameters, layer, plan, of_layer, positions=None):
            block = nnx.merge(graph, parameters)
            layer_key = dropout_key and dropout_key.fold_in(layer + 1)
            layer_edits, is_applied = of_layer
            tap = LayerTap(sites, layer_edits)

            def run(hidden):
                return block(hidden, plan, inputs, layer_key, tap, positions)

            hidden = run(hidden) if is_applied is None else jax.lax.cond(is_applied, run, lambda x: x, hidden)
            return hidden, (keep(hidden), tap.recorded)

        if self.config.remat != "none":
            policy = REMAT_POLICIES[self.config.remat]
            apply_layer = jax.checkpoint(apply_layer, policy=policy, static_argnums=(3,))
        length = hidden.shape[1]
        is_split = read is not None and count_last_layer_positions(len(plans), read.shape[1], length) < length
        whole = len(plans) - is_split
        hidden, (kept, recorded) = run_stack(
            apply_layer, hidden, stacked, plans[:whole], groups[:whole], by_layer, self.config.scan_unroll
        )
        if is_split:
            parameters = jax.tree.map(lambda x: x[groups[-1]], stacked)
            of_layer = jax.tree.map(lambda x: x[-1], by_layer)
            hidden, _ = apply_layer(hidden, parameters, jnp.int32(whole), plans[-1], of_layer, read)
        elif read is not None:
            hidden = gather_positions(hidden, read)
        return hidden, kept, recorded
