"""What one device holds and computes in one update: the sizes that every estimate starts from. Needs no device.

Sizes of parameters are read off the model and the sharding table themselves (abstractly), so they are exact.
"""

import functools
import math
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from bert_jax.chips import Sizes
from bert_jax.config import Config, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.objectives.masking import predictions_per_row
from bert_jax.training.sharding import manual_specs, state_shardings


class Parameters(NamedTuple):
    """Numbers of parameters."""

    total: int
    """Of the model."""
    owned: int
    """That a device keeps, with their moments."""
    whole: int
    """That a device holds while it computes gradients: gathered over fsdp, still split over tensor."""
    gathered: int
    """Of `whole`, those that are split over fsdp: what is gathered and what is reduced by scattering."""


class Workload(NamedTuple):
    """One update on one device."""

    model: ModelConfig
    """As deep as in the phase."""
    sizes: Sizes
    seq_len: int
    micro_batches: int
    """Computed one after the other."""
    rows: int
    """Of each micro-batch, on this device."""
    predictions: int
    """Positions per row that pass through the head over the vocabulary."""
    parameters: Parameters

    @property
    def tokens(self) -> int:
        """Of each micro-batch, on this device."""
        return self.rows * self.seq_len

    @property
    def heads(self) -> int:
        """Attention heads on this device."""
        return self.model.num_heads // self.sizes.tensor

    @property
    def scores(self) -> int:
        """Attention probabilities per layer of each micro-batch, on this device."""
        return self.rows * self.heads * self.seq_len**2

    @property
    def logits(self) -> int:
        """Of each micro-batch, on this device."""
        return self.rows * self.predictions * split(self.model.vocab_size, self.sizes.tensor)

    @property
    def activation_bytes(self) -> int:
        """Bytes per activation."""
        return 2 if self.model.compute_dtype == "bfloat16" else 4


def split(size: int, devices: int) -> int:
    """A dimension's part on one device; whole if it cannot be divided, as in the sharding table."""
    return size // devices if size % devices == 0 else size


def workload(config: Config, phase: int, sizes: Sizes, accumulation: int) -> Workload:
    """What each device has to do in an update of a phase, at its full batch size.

    Args:
      config: of the run.
      phase: index.
      sizes: of the mesh.
      accumulation: micro-batches per update.

    Raises:
      UserError: rows or heads cannot be divided so.
    """
    settings, model = config.phases[phase], config.model_of(phase)
    rows, left = divmod(settings.batch_size, sizes.row_shards * accumulation)
    if left or not rows:
        raise UserError(
            f"phases.{phase}.batch_size {settings.batch_size} is not divisible by {sizes.row_shards} row shards "
            f"(mesh data x fsdp) x accumulation {accumulation}"
        )
    if model.num_heads % sizes.tensor:
        raise UserError(f"model.num_heads {model.num_heads} is not divisible by mesh.tensor {sizes.tensor}")
    if sizes.data % sizes.slices:
        raise UserError(f"mesh.data {sizes.data} does not span {sizes.slices} slices evenly")
    if model.direction == "causal":
        predictions = settings.seq_len - 1
    else:
        slots = config.data.slots(settings.seq_len)
        rate, most = config.objective.mask_rate, settings.max_predictions
        predictions = predictions_per_row(rate, settings.seq_len, slots, most)
    parameters = count_parameters(model, config.objective.pair != "none", sizes)
    return Workload(model, sizes, settings.seq_len, accumulation, rows, predictions, parameters)


def count_parameters(model: ModelConfig, pair: bool, sizes: Sizes) -> Parameters:
    """How a model's parameters lie on a mesh.

    Args:
      model: shapes.
      pair: whether it has a head for sentence pairs.
      sizes: of the mesh.
    """
    axes = (sizes.data, sizes.fsdp, sizes.tensor)
    mesh = AbstractMesh(axes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    shapes = _shapes(model, pair)
    shardings = state_shardings(mesh, shapes)
    total = owned = whole = gathered = 0
    for leaf, sharding, spec in zip(*map(jax.tree.leaves, (shapes, shardings, manual_specs(shardings))), strict=True):
        own = math.prod(sharding.shard_shape(leaf.shape))
        over_fsdp = "fsdp" in spec
        total += leaf.size
        owned += own
        whole += own * (sizes.fsdp if over_fsdp else 1)
        gathered += own * sizes.fsdp if over_fsdp else 0
    return Parameters(total, owned, whole, gathered)


@functools.lru_cache(maxsize=64)
def _shapes(model: ModelConfig, pair: bool) -> bert.Params:
    return bert.shapes(model, Heads(pair=pair))
