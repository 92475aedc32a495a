"""Published rates of BERT-large pretraining, with which the roofline (planning/roofline.py) is compared and calibrated.

The programs are not bert_jax: TensorFlow and PyTorch, mostly of 2020. An efficiency fitted to them is that of the chip
and of these programs together. Until bert_jax is measured on a chip, it is the best available estimate: what such a
program reached, not what the chip could reach.

The prediction is that of bert_jax for the published setting: LAMB, dropout, attention probabilities in memory,
replicated parameters, rows of full length. Float16 counts as bfloat16, which has the same rate and size.
`scripts/benchmarks/calibrate_roofline.py --published` prints the table and fits the efficiencies in chips.py.

Left out: rates of 512 tokens in NVIDIA's later README, whose rows are shorter (bins of 64 tokens); DGX-2H, whose V100
have a higher clock; MLPerf, whose programs remove padding and use 8-bit floats and hand-written kernels; PaddlePaddle's
694 rows/s of 128 tokens on one A100, which is 1.54 times the prediction and outside of `roofline.ERROR`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bert_jax.chips import CHIPS, Chip, Efficiency, Sizes
from bert_jax.config import Config, DataConfig, OptimizerConfig, Phase
from bert_jax.model import families
from bert_jax.planning.roofline import predict

A100_80GB = CHIPS["a100"]
A100_40GB = dataclasses.replace(A100_80GB, memory_bandwidth=1555e9)
V100 = dataclasses.replace(
    A100_80GB, peak_flops=125e12, vector_ops=15.7e12 / 2, memory_bandwidth=900e9, link_bandwidth=300e9 / 2,
    network_bandwidth=4 * 100e9 / 8 / 8,
)  # fmt: skip
"""As in the DGX-1, with four network cards for eight GPUs: https://www.nvidia.com/en-us/data-center/v100 (not read
there: all but peak_flops are recalled). It is not one of `CHIPS`, because it has no bfloat16 products, and bert_jax has
no float16: `plan` would predict a rate that bert_jax cannot reach on it."""

OWN_RUNS = {"h200": "took 1% longer than predicted in two settings on one H200, 1 to 41% longer with layers in a loop"}
"""What bert_jax's own measurements say of the predictions for a chip, by its name (docs/log/model.md, 2026-11-26)."""

NVIDIA = "NVIDIA DeepLearningExamples"
SOURCES = {
    "TensorFlow 20.06": f"{NVIDIA}, TensorFlow/LanguageModeling/BERT/README.md at 002bcd8",
    "PyTorch 20.06": f"{NVIDIA}, PyTorch/LanguageModeling/BERT/README.md of July 2020",
    "PyTorch 21.11": f"{NVIDIA}, PyTorch/LanguageModeling/BERT/README.md, container 21.11",
    "LAMB paper": "You et al., arXiv 1904.00962v1, table 1",
}


class PublishedPhase(NamedTuple):
    """Steps of one row length."""

    seq_len: int
    batch_size: int
    per_device_rows: int
    """Rows of a micro-batch on each device."""
    steps: float = 1.0


class PublishedRun(NamedTuple):
    """One published rate."""

    source: str
    """Key of `SOURCES`."""
    hardware: str
    chip: Chip
    devices: int
    """jax devices: two per chip of v3."""
    slices: int
    work: tuple[PublishedPhase, ...]
    rows_per_second: float
    """Published, over all devices; of a run with several row lengths, its rows divided by its time."""


def _nvidia(
    source: str, hardware: str, chip: Chip, rows: dict[int, int], rates: Sequence[tuple[int, int, int, float]]
) -> Iterator[PublishedRun]:
    """Runs of a README: rows of a micro-batch by row length; GPUs, row length, batch and rows/s of each."""
    for gpus, seq_len, batch, rate in rates:
        work = PublishedPhase(seq_len, batch, rows[seq_len])
        yield PublishedRun(source, hardware, chip, gpus, max(1, gpus // 8), (work,), rate)


def _lamb(chips: int, batches: tuple[int, int], steps: float, hours: float) -> PublishedRun:
    """A run of the LAMB paper. Nine tenths of its steps have 128 tokens, as in BERT; no micro-batches, and bfloat16 in
    memory, are assumed: 16 rows of 512 tokens on a core are what its memory holds."""
    shards, shares = 2 * chips, (0.9, 0.1)
    if batches[0] != batches[1]:
        shares = 7037 / 8599, 1562 / 8599  # nine tenths of the epochs (configs/bert_large_76min.py)
    work = tuple(
        PublishedPhase(seq_len, batch, batch // shards, share * steps)
        for seq_len, batch, share in zip((128, 512), batches, shares, strict=True)
    )
    rate = sum(one.batch_size * one.steps for one in work) / (3600 * hours)
    return PublishedRun("LAMB paper", "TPU v3", CHIPS["v3"], shards, 1, work, rate)


RUNS: dict[str, tuple[PublishedRun, ...]] = {
    "GPU": (
        *_nvidia(
            "TensorFlow 20.06", "A100 40 GB", A100_40GB, {128: 64, 512: 16},
            [(1, 128, 65_536, 356.845), (8, 128, 65_536, 2871.89), (256, 128, 65_536, 77_479.87),
             (1, 512, 32_768, 70.856), (8, 512, 32_768, 572.112), (256, 512, 65_536, 16_705)],
        ),
        *_nvidia(
            "PyTorch 20.06", "A100 40 GB", A100_40GB, {128: 64, 512: 16},
            [(1, 128, 65_536, 415), (8, 128, 65_536, 3231), (1, 512, 32_768, 78), (8, 512, 32_768, 620)],
        ),
        *_nvidia(
            "PyTorch 21.11", "A100 80 GB", A100_80GB, {128: 256},
            [(1, 128, 8192, 580), (8, 128, 65_536, 4591), (256, 128, 65_536, 138_294)],
        ),
        *_nvidia(
            "TensorFlow 20.06", "V100 32 GB", V100, {128: 64, 512: 8},
            [(1, 128, 65_536, 168.63), (8, 128, 65_536, 1443.05), (1, 512, 32_768, 31.23), (8, 512, 32_768, 255.64)],
        ),
        *_nvidia(
            "PyTorch 20.06", "V100 32 GB", V100, {128: 16, 512: 4},
            [(1, 128, 65_536, 158), (8, 128, 65_536, 1203), (1, 512, 32_768, 33), (8, 512, 32_768, 262)],
        ),
        *_nvidia("PyTorch 21.11", "V100 32 GB", V100, {128: 64}, [(1, 128, 4096, 224), (8, 128, 32_768, 1746)]),
    ),
    "TPU": (
        _lamb(16, (512, 512), 1e6, 82.8),
        _lamb(32, (1024, 1024), 500e3, 43.2),
        _lamb(64, (2048, 2048), 250e3, 21.4),
        _lamb(128, (4096, 4096), 125e3, 693.6 / 60),
        _lamb(256, (8192, 8192), 62.5e3, 390.5 / 60),
        _lamb(512, (16_384, 16_384), 31_250, 200.0 / 60),
        _lamb(1024, (32_768, 32_768), 15_625, 101.2 / 60),
        _lamb(1024, (65_536, 32_768), 8599, 76.19 / 60),
    ),
}  # fmt: skip
"""By the family of chips whose efficiency they calibrate."""


def predicted_rows_per_second(run: PublishedRun, efficiency: Efficiency) -> float:
    """Rows/s that the roofline predicts for bert_jax in the setting of a published run.

    Args:
      run: the setting.
      efficiency: of its chip.
    """
    chip = dataclasses.replace(run.chip, efficiency=efficiency)
    sizes = Sizes(data=run.devices, slices=run.slices)
    seconds = 0.0
    for one in run.work:
        accumulation = one.batch_size // (run.devices * one.per_device_rows)
        seconds += one.steps * predict(_config(one), 0, sizes, accumulation, chip).step_seconds
    return sum(one.batch_size * one.steps for one in run.work) / seconds


@functools.cache
def _config(work: PublishedPhase) -> Config:
    """BERT-large with LAMB and one example per row, of which 20 or 80 tokens are predicted."""
    model = dataclasses.replace(families.bert(num_layers=24, hidden_size=1024), compute_dtype="bfloat16")
    predictions = {128: 20, 512: 80}[work.seq_len]
    phase = Phase(seq_len=work.seq_len, batch_size=work.batch_size, max_predictions=predictions)
    optimizer, data = OptimizerConfig(name="lamb"), DataConfig(examples_per_row=1)
    return Config(name="published", model=model, optimizer=optimizer, data=data, phases=(phase,))
