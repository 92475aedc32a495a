"""Parameters of a device from the shards of the mesh, and gradients back to the shards: what crosses devices, once per
step, and in which types.
"""

from typing import Any

import jax
from jax.sharding import NamedSharding

from bert_jax.config import ModelConfig
from bert_jax.model.encoder import read_type
from bert_jax.training.param_paths import GENERATOR, LAYERS, map_with_paths
from bert_jax.training.sharding import fsdp_axis, row_shards, split_over_tensor, sum_over_rows


def gather_types(params: Any, model: ModelConfig) -> Any:
    """Types in which parameters, or their shapes, are gathered over fsdp: of layers, those that they are read in, so
    that kernels cross devices in the type of their product. A generator has the types of `model`.
    """

    def of(path: str, leaf: Any) -> str:
        return read_type(path, model) if path.removeprefix(GENERATOR).startswith(LAYERS) else str(leaf.dtype)

    return map_with_paths(of, params)


def gather_parameters(params: Any, shardings: Any, dtypes: Any) -> Any:
    """Full parameters from this device's shards (inside the manual region): one all-gather per array.

    Args:
      params: shards.
      shardings: of the parameters.
      dtypes: of `gather_types`. The result has the types of the shards, so that gradients have them, too.
    """

    def gather(shard: jax.Array, sharding: NamedSharding, dtype: str) -> jax.Array:
        axis = fsdp_axis(sharding)
        if axis is None:
            return shard
        read = shard.astype(dtype)
        whole = split_over_tensor(lambda x: jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True), read, sharding)
        return whole.astype(shard.dtype)

    return jax.tree.map(gather, params, shardings, dtypes)


def reduce_gradients(gradients: Any, shardings: Any, dtype: str) -> Any:
    """Sum over all row axes; each device gets the shard that it owns: one reduction per array.

    Args:
      gradients: of this device's rows.
      shardings: of the parameters.
      dtype: in which they are summed (`OptimizerConfig.reduce_dtype`); the sums have the type of the gradients.
    """

    def reduce(gradient: jax.Array, sharding: NamedSharding) -> jax.Array:
        if row_shards(sharding.mesh) == 1:
            return gradient
        axis, addend = fsdp_axis(sharding), gradient.astype(dtype)
        if axis is None:
            return sum_over_rows(addend, sharding.mesh).astype(gradient.dtype)
        scattered = split_over_tensor(
            lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True), addend, sharding
        )
        return sum_over_rows(scattered, sharding.mesh, ("data",)).astype(gradient.dtype)

    return jax.tree.map(reduce, gradients, shardings)
