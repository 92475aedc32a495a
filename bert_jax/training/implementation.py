"""How a run computes on its devices: settings that are chosen for them, and those that they do not have.

None of these changes what is computed, except for rounding.
"""

import dataclasses
import re
from typing import Literal

from bert_jax.chips import CHIPS, chip_of
from bert_jax.config import Config, ModelConfig
from bert_jax.errors import UserError, require

Platform = Literal["cpu", "gpu", "tpu", "unknown"]

NEEDS: dict[str, Platform] = {"cudnn": "gpu", "pallas_gpu": "gpu", "pallas_tpu": "tpu"}
"""Platform of the implementations of attention that not every platform has."""
OLD_TPUS = ("TPU v2", "TPU v3")
"""Device kinds for which the compiler of kernels has no products of bfloat16 matrices."""
PREFERRED: dict[Platform, tuple[str, ...]] = {
    "cpu": ("deferred", "reference"),
    "gpu": ("pallas_gpu", "xla", "reference"),
    "tpu": ("pallas_tpu", "xla", "reference"),
    "unknown": ("xla", "reference"),
}
"""What `model.attention auto` tries, in this order. For CPUs it was measured, in `encode` and in training; that
`pallas_gpu` comes first on GPUs, on an H200, where only `cudnn` without dropout was up to 3 % faster
(docs/log/model.md, 2026-11-26). For TPUs it is assumed: the implementations that write no scores to memory first."""
MOST_UNROLLED: dict[Platform, int] = {"cpu": 12, "gpu": 24, "tpu": 24}
"""Layers of the deepest model whose scan over depth is unrolled: in a loop, slices of stacked parameters and residuals
are copied in every iteration. Steps take 6 to 13 % less time on a CPU, 12 to 16 % less with `pallas_gpu` on an H200
(docs/log/model.md, 2026-11-26). Deeper models compile too long; on GPUs they were not measured. On TPUs it is an
estimate of the compiler: 24 layers of bert_large take 74 instead of 258 ms outside of products and attention on a v5e,
with other changes, and 2.8 times as long to compile (docs/log/model.md, 2026-11-27)."""


def choose_implementation(config: Config, device_kind: str) -> Config:
    """The config with a choice for the devices in place of `model.attention auto` and `model.scan_unroll None`.

    Args:
      config: of a run. Other values of these settings are kept.
      device_kind: of the devices, as jax has it; "" if they are not known.
    """
    if config.model.attention == "auto":
        config = _choose_attention(config, device_kind)
    if config.model.scan_unroll is None:
        model = config.model
        unrolled = model.num_layers <= MOST_UNROLLED.get(_platform(device_kind), 1)
        model = dataclasses.replace(model, scan_unroll=model.num_layers if unrolled else 1)
        config = dataclasses.replace(config, model=model)
    return config


def _choose_attention(config: Config, device_kind: str) -> Config:
    """The config with the first implementation that can serve it."""
    for name in PREFERRED[_platform(device_kind)]:
        try:
            chosen = dataclasses.replace(config, model=dataclasses.replace(config.model, attention=name))
            _check_attention(chosen.model, config.mesh.tensor, device_kind)
        except UserError:
            continue
        return chosen
    raise AssertionError("reference attention can serve every config")


def check_devices(model: ModelConfig, tensor: int, device_kind: str) -> None:
    """Check that devices have the model's attention and dense_dtype; whether both serve it, the config has checked.

    Args:
      model: with `attention`, which is not `auto`.
      tensor: size of the mesh's axis; -1: not known.
      device_kind: of the devices, as jax has it; "" if they are not known.

    Raises:
      UserError: they do not have one of them.
    """
    chip = chip_of(device_kind)
    require(
        model.dense_dtype != "float8" or chip is None or chip.float8_share > 0,
        f"model.dense_dtype '{model.dense_dtype}' needs products of 8-bit floats, which a {device_kind} does not have "
        f"({', '.join(name for name, one in CHIPS.items() if one.float8_share)} have): set model.dense_dtype compute",
    )
    _check_attention(model, tensor, device_kind)


def _check_attention(model: ModelConfig, tensor: int, device_kind: str) -> None:
    name, platform = model.attention, _platform(device_kind)
    needed = NEEDS.get(name, platform)
    require(
        platform in (needed, "unknown"),
        f"model.attention '{name}' needs a {needed.upper()}, the device is a {device_kind}: set model.attention auto, "
        "or reference",
    )
    require(
        not (name == "pallas_tpu" and device_kind.startswith(OLD_TPUS)),
        f"model.attention 'pallas_tpu' needs a TPU v4 or newer, the device is a {device_kind}: set model.attention "
        "auto, or reference",
    )
    require(
        not name.startswith("pallas") or tensor == 1,
        f"mesh.tensor {tensor} splits attention heads, which model.attention '{name}' does not support: set "
        "mesh.tensor 1, or model.attention reference",
    )


def check_kernel_memory(message: str, model: ModelConfig) -> None:
    """Raise UserError if a program did not compile because a kernel needs more than the memory inside a TPU's core.

    Args:
      message: the compiler's.
      model: config of the program.
    """
    require(
        re.search(r"\b[vs]mem\b", message) is None,
        f"the kernels of model.attention '{model.attention}' need more memory inside a TPU's core than it has, with "
        "these shapes: set model.attention reference",
    )


def _platform(device_kind: str) -> Platform:
    if not device_kind:
        return "unknown"
    kind = device_kind.lower()
    return "cpu" if kind.startswith("cpu") else "tpu" if kind.startswith("tpu") else "gpu"
