"""Sizes of what one device holds and computes in one step, the input of all estimates. Needs no device.

Parameter sizes come from the model and its shardings (abstract evaluation), so they are exact.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from bert_jax.chips import Sizes
from bert_jax.config import Config, ModelConfig, OptimizerConfig
from bert_jax.errors import require
from bert_jax.model.generator import ModelSpec, Params
from bert_jax.model.layer_plan import count_last_layer_positions
from bert_jax.objectives.masking import predictions_per_row
from bert_jax.training.optimizers import describe
from bert_jax.training.optimizers.param_rules import param_rules
from bert_jax.training.param_collectives import gather_types
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.sharding import AXES, manual_specs, state_shardings


class DeviceParameterCounts(NamedTuple):
    """Numbers of parameters on one device and in total."""

    total: int
    """Parameters of the model."""
    owned: int
    """Parameters in the device's shard, stored with their moments."""
    matrices: int
    """Those of `owned` in matrices of layers (`ParamRule.input_axes`)."""
    whole: int
    """Parameters on the device while it computes gradients: gathered over fsdp, still split over tensor."""
    gathered: int
    """Those of `whole` that are split over fsdp: gathered, and reduced by a reduce-scatter."""
    gathered_bytes: int
    """Of `gathered`, in the types in which they are gathered."""


class UpdateWork(NamedTuple):
    """The optimizer's part of a step on one device."""

    moments: int
    """Float32 numbers in its state, for the parameters in the device's shard; the moving average is one more."""
    step_bytes: float
    """Bytes that it and the moving average read and write."""
    flops: float
    """FLOPs of its matrix products, counted whole on every device, as without fsdp and tensor."""


class Workload(NamedTuple):
    """One step on one device. Sizes are those of a micro-batch."""

    model: ModelConfig
    """Model with the depth of the phase."""
    sizes: Sizes
    micro_batches: int
    """Micro-batches per step."""
    rows: int
    seq_len: int
    predictions: int
    """Predicted positions per row, which pass through the vocabulary head."""
    last_layer_share: float
    """Share of the positions that the last layer computes."""
    parameters: DeviceParameterCounts
    update: UpdateWork
    inner: int
    """Width of all attention heads."""
    wide: int
    """Width of the feed-forward layer."""
    up_projections: int
    """Products from the hidden width to that of the feed-forward layer."""
    scores: int
    """Attention probabilities per layer."""
    logits: int
    bytes_per_activation: int
    bytes_per_gradient: int
    """Of an element when it crosses devices."""
    generator: "Workload | None" = None
    """Of the generator of replaced-token detection, whose parameters are counted with the discriminator's."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on one device."""
        return self.rows * self.seq_len

    @property
    def models(self) -> list["Workload"]:
        """The workloads of the model and of its generator, whose sum is that of the step."""
        return [self, *([] if self.generator is None else [self.generator])]

    @property
    def effective_num_layers(self) -> float:
        """Layers, the last one counted by the share of positions that it computes."""
        return self.model.num_layers - 1 + self.last_layer_share


def even_shard_size(size: int, devices: int) -> int:
    """Size of a dimension on one device; the full size if it is not divisible, as in the shardings."""
    return size // devices if size % devices == 0 else size


def bottleneck_input_widths(model: ModelConfig) -> list[int]:
    """Widths of the projections of a layer's input into its bottleneck."""
    if model.bottleneck_size is None:
        return []
    return [model.bottleneck_size] * (2 if model.bottleneck_attention == "shared" else 1)


def norm_widths(model: ModelConfig) -> list[int]:
    """Widths of the norms of a layer."""
    inside = [model.layer_width] * (1 + model.feed_forward_networks)
    return inside if model.bottleneck_size is None else [*bottleneck_input_widths(model), *inside, model.hidden_size]


@functools.lru_cache(maxsize=16)
def workload(config: Config, phase: int, sizes: Sizes, accumulation: int) -> Workload:
    """Workload of each device in a step of a phase at its full batch size.

    Args:
      config: of the run.
      phase: index.
      sizes: of the mesh.
      accumulation: micro-batches per step.

    Raises:
      UserError: rows or heads are not divisible by the mesh.
    """
    settings, model, tensor = config.phases[phase], config.model_of(phase), sizes.tensor
    micro_batches = sizes.row_shards * accumulation
    rows, remainder = divmod(settings.batch_size, micro_batches)
    require(
        rows > 0 and remainder == 0,
        f"phases.{phase}.batch_size {settings.batch_size} is not divisible by {sizes.row_shards} row shards "
        f"(mesh data x fsdp) x accumulation {accumulation}: use a multiple of {micro_batches}",
    )
    require(model.num_heads % tensor == 0, f"mesh.tensor {tensor} does not divide model.num_heads {model.num_heads}")
    slots, is_pair = config.data.max_examples_per_row(settings.seq_len), config.objective.pair != "none"
    if model.direction == "causal":
        predictions = settings.seq_len - 1
    else:
        rate, max_predictions = config.objective_of(phase).mask_rate, settings.max_predictions
        predictions = predictions_per_row(rate, settings.seq_len, slots, max_predictions)
    spec = model_spec(config, phase)
    counts = count_parameters(spec, sizes), update_work(spec, sizes, config.optimizer)

    def of_model(model: ModelConfig, counts: tuple, predictions: int, read: int) -> Workload:
        heads = even_shard_size(model.num_heads, tensor)
        return Workload(
            model,
            sizes,
            accumulation,
            rows,
            settings.seq_len,
            predictions,
            count_last_layer_positions(model.num_layers, read, settings.seq_len) / settings.seq_len,
            *counts,
            inner=heads * model.size_per_head,
            wide=even_shard_size(model.intermediate_size, tensor),
            up_projections=2 if model.feed_forward == "gated" else 1,
            scores=rows * heads * settings.seq_len**2,
            logits=rows * predictions * even_shard_size(model.vocab_size, tensor),
            bytes_per_activation=jnp.dtype(model.compute_dtype).itemsize,
            bytes_per_gradient=jnp.dtype(config.optimizer.reduce_dtype).itemsize,
        )

    if spec.generator is None:
        return of_model(model, counts, predictions, predictions + slots * is_pair)
    nothing = DeviceParameterCounts(0, 0, 0, 0, 0, 0), UpdateWork(0, 0.0, 0.0)
    generator = of_model(spec.generator, nothing, predictions, predictions)
    return of_model(model, counts, 0, settings.seq_len)._replace(generator=generator)


@functools.lru_cache(maxsize=256)
def count_parameters(spec: ModelSpec, sizes: Sizes) -> DeviceParameterCounts:
    """Count the parameters of a run on a mesh.

    Args:
      spec: model, heads and generator (`model_spec`).
      sizes: of the mesh.
    """
    mesh = AbstractMesh((sizes.data, sizes.fsdp, sizes.tensor), AXES, axis_types=(AxisType.Auto,) * 3)
    shapes = _shapes(spec)
    shardings = state_shardings(mesh, shapes)
    total = owned = matrices = whole = gathered = gathered_bytes = 0
    trees = shapes, param_rules(shapes), shardings, manual_specs(shardings), gather_types(shapes, spec.model)
    for leaf, rule, sharding, spec, dtype in zip(*map(jax.tree.leaves, trees), strict=True):
        own = math.prod(sharding.shard_shape(leaf.shape))
        over_fsdp = "fsdp" in spec
        total += leaf.size
        owned += own
        matrices += own if rule.input_axes else 0
        whole += own * (sizes.fsdp if over_fsdp else 1)
        gathered += own * sizes.fsdp if over_fsdp else 0
        gathered_bytes += own * sizes.fsdp * jnp.dtype(dtype).itemsize if over_fsdp else 0
    return DeviceParameterCounts(total, owned, matrices, whole, gathered, gathered_bytes)


@functools.lru_cache(maxsize=64)
def update_work(spec: ModelSpec, sizes: Sizes, optimizer: OptimizerConfig) -> UpdateWork:
    """The work of an optimizer's update; other arguments as for `count_parameters`."""
    description, counts, shapes = describe(optimizer.name), count_parameters(spec, sizes), _shapes(spec)
    matrix_cost = description.matrix_cost or description.cost
    moments, step_bytes = (
        other * (counts.owned - counts.matrices) + of_matrix * counts.matrices
        for other, of_matrix in zip(description.cost, matrix_cost, strict=True)
    )
    if optimizer.ema_decay is not None:
        moments, step_bytes = moments + counts.owned, step_bytes + 8.0 * counts.owned
    flops = jax.tree.map(lambda rule, leaf: description.matrix_flops(rule, leaf.shape), param_rules(shapes), shapes)
    return UpdateWork(int(moments), step_bytes, sum(jax.tree.leaves(flops)))


@functools.lru_cache(maxsize=64)
def _shapes(spec: ModelSpec) -> Params:
    return spec.shapes()
