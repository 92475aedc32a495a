"""Value zeroing: how much a layer's output changes if the value vector of one token is zero (Mohebbi et al. 2023)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.array_types import Array, Float
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config
from bert_jax.interventions.rows import TextBatch
from bert_jax.model import bert
from bert_jax.model.activations import Edit, LayerTap
from bert_jax.model.layer_plan import layer_plans, parameter_groups
from bert_jax.model.stack import run_stack

ROUNDING = 1e-12
"""Smaller distances are rounding, and count as 0: so do all keys that a local layer does not attend to."""


def value_zeroing_distances(model: LoadedModel, batch: TextBatch) -> Float[np.ndarray, "L B S S"]:
    """Entry [l, b, i, j]: cosine distance between a layer's output at i with and without the value vector of token j.

    All heads lose the value, the attention stays as it is, and the layer's input is that of the unchanged model
    (Mohebbi et al. 2023, section 3). The output is that of the whole layer, before the final norm of models that have
    one.

    Args:
      model: from `inference.load`.
      batch: from `rows.batches`; costs S forward passes.

    Returns:
      distances, float32; rows of padding have no meaning, columns of padding are 0.
    """
    config = analysis_config(model.config)
    return np.asarray(_value_zeroing(config, model.heads, model.params, batch[:3]))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _value_zeroing(config, heads, params, batch):
    model, inputs = bert.model_from_params(config, heads, params), whole_rows(*map(jnp.asarray, batch))
    graph, stacked = nnx.split(model.encoder.layers)
    length = inputs.input_ids.shape[1]

    def apply_layer(hidden_BSH, parameters, layer, plan, edits):
        block = nnx.merge(graph, parameters)
        output_BSH = block(hidden_BSH, plan, inputs, None, LayerTap())

        def change(token):
            factor_1S11 = (jnp.arange(length) != token).astype(jnp.float32)[None, :, None, None]
            tap = LayerTap(edits={"attention.value": Edit(factor=factor_1S11)})
            return _cosine_distance(output_BSH, block(hidden_BSH, plan, inputs, None, tap))

        distances_TBS = jax.lax.map(change, jnp.arange(length))
        return output_BSH, jnp.moveaxis(distances_TBS, 0, -1)

    with jax.default_matmul_precision("highest"):
        embedded = model.encoder.embeddings(inputs, None, None)
        plans, groups = layer_plans(config), parameter_groups(config)
        _, distances_LBST = run_stack(apply_layer, embedded, stacked, plans, groups, None, config.scan_unroll)
    return distances_LBST


def _cosine_distance(a: Float[Array, "B S H"], b: Float[Array, "B S H"]) -> Float[Array, "B S"]:
    """1 - cos, as half of the squared distance of the unit vectors, which keeps the digits of small distances."""
    a, b = (x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-30) for x in (a, b))
    distance = jnp.square(a - b).sum(-1) / 2
    return jnp.where(distance < ROUNDING, 0, distance)
