"""Normalisation of the [CLS] vectors that a task head reads (`TaskHead.cls_norm`).

Zhou, Du and Ren (2019, arXiv 1911.03918) propose to normalise [CLS] in fine-tuning; the formulas here are our own:

- ``centre``: x - mean. ``standardise``: (x - mean) / (std + 1e-5). Mean and standard deviation of every feature over
  the training set, computed before fine-tuning (finetune/cls_statistics.py) and never trained.
- ``batch``: scale (x - mean) / sqrt(variance + 1e-5) + bias (Ioffe and Szegedy 2015), with trained scale and bias. In
  training, mean and biased variance are those of the global batch's examples; in evaluation, running averages with a
  momentum of 0.9.
- ``layer``: LayerNorm over the features, with trained scale and bias.

Shapes: B rows, K packed examples per row, H features.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Bool, Float

EPSILON, MOMENTUM = 1e-5, 0.9
SumOverDevices = Callable[[Array], Array]
"""Sum of an array over the devices that hold the other rows of the batch."""
Statistics = dict[str, Float[Array, " H"]]
"""New values of running statistics, by the name of their parameter."""


class ClsNorm(nnx.Module):
    """One of the normalisations above, but ``layer``, which is a `LayerNorm`."""

    def __init__(self, kind: str, size: int):
        zeros, ones = jnp.zeros((size,), jnp.float32), jnp.ones((size,), jnp.float32)
        self.mean = nnx.Param(zeros)
        self.std = nnx.Param(ones) if kind == "standardise" else None
        self.variance = nnx.Param(ones) if kind == "batch" else None
        self.scale = nnx.Param(ones) if kind == "batch" else None
        self.bias = nnx.Param(zeros) if kind == "batch" else None

    def __call__(
        self, cls: Float[Array, "B K H"], has_example: Bool[Array, "B K"], sum_over_devices: SumOverDevices | None
    ) -> tuple[Float[Array, "B K H"], Statistics]:
        """Normalise; the result has the type of `cls`.

        Args:
          cls: [CLS] vectors.
          has_example: the slots that count in the statistics of a batch; the others are normalised too.
          sum_over_devices: None: use the running statistics of batch normalisation, and return none.
        """
        x, mean = cls.astype(jnp.float32), jax.lax.stop_gradient(self.mean[...])
        statistics = {}
        if self.variance is None:
            normalised = x - mean[None, None]
            if self.std is not None:
                normalised /= jax.lax.stop_gradient(self.std[...])[None, None] + EPSILON
        else:
            variance = jax.lax.stop_gradient(self.variance[...])
            if sum_over_devices is not None:
                batch_mean, batch_variance = _batch_statistics(x, has_example, sum_over_devices)
                statistics = {"mean": _average(mean, batch_mean), "variance": _average(variance, batch_variance)}
                mean, variance = batch_mean, batch_variance
            factor = self.scale[...] * jax.lax.rsqrt(variance + EPSILON)
            normalised = (x - mean[None, None]) * factor[None, None] + self.bias[...][None, None]
        return normalised.astype(cls.dtype), statistics


def _batch_statistics(
    x: Float[Array, "B K H"], has_example: Bool[Array, "B K"], sum_over_devices: SumOverDevices
) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    """Mean and biased variance over the examples of all devices; gradients flow through both."""
    weights = has_example.astype(jnp.float32)[:, :, None]
    count = jnp.maximum(sum_over_devices(weights.sum()), 1.0)
    mean = sum_over_devices((weights * x).sum((0, 1))) / count
    return mean, sum_over_devices((weights * jnp.square(x - mean[None, None])).sum((0, 1))) / count


def _average(running: Float[Array, " H"], new: Float[Array, " H"]) -> Float[Array, " H"]:
    return MOMENTUM * running + (1 - MOMENTUM) * jax.lax.stop_gradient(new)
