"""The encoder: embeddings, a stack of blocks, a pooler."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Bool, Float, Int, Key
from bert_jax.config import ModelConfig
from bert_jax.model.activations import Edits, LayerTap
from bert_jax.model.block import EMBEDDING_SITE, Block
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.embeddings import Embeddings, EncoderInputs
from bert_jax.model.layer_plan import count_last_layer_positions, layer_plans, parameter_groups
from bert_jax.model.layers import SAVED, Dense, gather_positions, outer_dense_dtype
from bert_jax.model.norms import make_norm
from bert_jax.model.stack import run_stack


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


REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(SAVED),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Encoder(nnx.Module):
    """Embeddings, layers stacked on a leading axis, pooler.

    To take, copy, drop or grow layers, index the leading axis of ``params["layers"]``.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""], *, pooler_init: Callable[..., Array] | None):
        """`pooler_init` initialises the pooler's kernel; None: no pooler."""
        embeddings, layers, pooler_key = jax.random.split(key, 3)
        self.embeddings = Embeddings(config, embeddings)
        groups = len(set(parameter_groups(config)))
        self.layers = nnx.vmap(lambda key: Block(config, key))(jax.random.split(layers, groups))
        width = (config.hidden_size,)
        final_norm = config.norm_placement == "pre"
        self.final_norm = make_norm(config, config.hidden_size) if final_norm else None
        dense = (config.biases, outer_dense_dtype(config.dense_dtype))
        self.pooler = Dense(width, width, pooler_init, pooler_key, *dense) if pooler_init else None
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
        length, apply_last = hidden.shape[1], None
        if read is not None and count_last_layer_positions(len(plans), read.shape[1], length) < length:
            apply_last = functools.partial(apply_layer, positions=read)
        types = _gradient_types(stacked, self.config)
        hidden, (kept, recorded) = run_stack(
            apply_layer, hidden, stacked, plans, groups, by_layer, self.config.scan_unroll, apply_last, types
        )
        if read is not None and apply_last is None:
            hidden = gather_positions(hidden, read)
        return hidden, kept, recorded


def read_type(path: str, config: ModelConfig) -> str:
    """The type that a parameter of the layers is read in: a kernel is cast to that of its product, unless the product
    has operands of 8 bits.

    Args:
      path: of the parameter, as in ``encoder/layers/qkv/kernel``.
      config: of the encoder.
    """
    return config.compute_dtype if config.dense_dtype == "compute" and "kernel" in path.split("/") else "float32"


def _gradient_types(stacked: Any, config: ModelConfig) -> list[str]:
    """Of each parameter of the layers, the smallest type that represents the gradient of one layer exactly.

    It is the type that the parameter is read in, but for shared parameters, whose gradients are sums of several.
    """
    if len(set(parameter_groups(config))) < config.num_layers:
        return [str(x.dtype) for x in jax.tree.leaves(stacked)]
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(stacked))
    return [read_type(jax.tree_util.keystr(path, simple=True, separator="/"), config) for path in paths]
