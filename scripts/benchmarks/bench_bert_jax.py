"""bert_jax's side of `scripts/benchmarks/bench.py`: ceilings of the machine, and the train step on synthetic rows.

Needs jax, flax, optax and numpy. Import it after the CPU affinity of the process is set.
"""

import dataclasses
import math
import os
import time
from typing import Any

import flax
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import optax

from bert_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.errors import UserError
from bert_jax.model import families
from bert_jax.model.flops import pretraining_flops
from bert_jax.objectives import masking
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import check_rows, make_mesh, put_rows
from bert_jax.training.step import put_step_inputs

# bert-base-uncased: [PAD], [UNK], [CLS], [SEP], [MASK].
PAD, UNK, CLS, SEP, MASK = 0, 100, 101, 102, 103
VOCABULARY = Vocabulary(30522, MASK, (PAD, UNK, CLS, SEP, MASK))
FIRST_WORD = 1000
"""First id of bert-base-uncased's vocabulary after special and unused ids."""


def model_config(case: Any) -> ModelConfig:
    """Model config of a case.

    Raises:
      UserError: contradicting settings.
    """
    base = families.bert(*case.size)
    return dataclasses.replace(
        base,
        hidden_dropout=case.hidden_dropout,
        attention_dropout=case.attention_dropout,
        attention=case.attention,
        compute_dtype=case.dtype,
        remat=case.remat,
        scan_unroll=case.scan_unroll,
        max_positions=max(base.max_positions, case.seq_len),
    )


def predictions(seq_len: int) -> int:
    """Masked positions in a full row."""
    return int(masking.prediction_counts(ObjectiveConfig().mask_rate, seq_len)[-1])


def step_flops(case: Any) -> float:
    """FLOPs that the model needs for one step, with the MLM head on the masked positions only."""
    return pretraining_flops(model_config(case), case.batch, case.seq_len, predictions(case.seq_len))


def synthetic_rows(batch: int, seq_len: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Full rows [CLS] A [SEP] B [SEP] of one pair each; word ids follow Zipf's law."""
    draw = np.random.default_rng(seed)
    ranks = np.exp(draw.uniform(0, math.log(VOCABULARY.size - FIRST_WORD), (batch, seq_len)))
    ids = FIRST_WORD - 1 + ranks.astype(np.int32)
    middle = seq_len // 2
    ids[:, 0], ids[:, middle], ids[:, -1] = CLS, SEP, SEP
    types = np.zeros((batch, seq_len), np.int32)
    types[:, middle + 1 :] = 1
    row = np.arange(batch, dtype=np.int32)
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "segment_ids": np.ones((batch, seq_len), np.int32),
        "position_ids": np.broadcast_to(np.arange(seq_len, dtype=np.int32), (batch, seq_len)).copy(),
        "cls_positions": np.zeros((batch, 1), np.int32),
        "example_id": row[:, None].copy(),
        "pair_labels": draw.integers(0, 2, (batch, 1), np.int32),
        "row": row,
        "mask_epoch": np.zeros(batch, np.int32),
    }


class BertJaxStep:
    """The compiled train step of one case, ready to be timed."""

    def __init__(self, case: Any, devices: int):
        self.config = config = Config(
            name=case.preset,
            model=model_config(case),
            objective=ObjectiveConfig(pair=case.pair),
            data=DataConfig(examples_per_row=1),
            optimizer=OptimizerConfig(name=case.optimizer),
            phases=(Phase(seq_len=case.seq_len, batch_size=case.batch, accumulation=case.accumulation),),
        )
        task = Pretraining(config, VOCABULARY)
        mesh = make_mesh(config.mesh, jax.devices()[:devices])
        check_rows(case.batch, case.accumulation, mesh, "batch")
        self.rows = put_rows(synthetic_rows(case.batch, case.seq_len), mesh, case.batch)
        self.inputs = put_step_inputs(
            1e-8, 1, mesh
        )  # tiny learning rate, as in a long warmup: the loss stays that of random weights
        programs = Programs(task, mesh)
        start = time.perf_counter()
        self.step = programs.train_step(0, case.accumulation)
        self.compile_seconds = time.perf_counter() - start
        memory = self.step.memory_analysis()
        # Donated inputs are also outputs: count them once.
        self.memory_bytes = memory and int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        self.state = programs.init_state()
        self.metrics: dict[str, jax.Array] = {}

    def run(self, steps: int) -> float:
        """Seconds of `steps` steps, until the device has finished."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, self.metrics = self.step(self.state, self.rows, self.inputs)
        jax.block_until_ready((self.state, self.metrics))
        return time.perf_counter() - start

    def loss(self) -> float:
        """Loss of the last step."""
        return float(self.metrics["mlm_loss"])


class Ceiling:
    """Measured rates of square matrix products and copies on one device, sampled repeatedly during a run.

    Float32 products have jax's default precision, as in the model: TF32 on recent GPUs, bf16 passes on TPU.
    """

    def __init__(self, platform: str):
        """Choose the largest size whose product takes at most 0.1 s, or the smallest size."""
        sizes = (512, 1024, 2048) if platform == "cpu" else (1024, 2048, 4096, 8192)
        self.samples: dict[str, list[float]] = {}
        """FLOP/s by type, and bytes/s under "copy"."""
        self.sizes: dict[str, int] = {}
        self.multiply = jax.jit(jnp.matmul)
        self.copy = jax.jit(lambda x: x + 1)
        self.numbers = np.random.default_rng(0).standard_normal(2**20 - 3, np.float32)
        self.copy_elements = 2**24 if platform == "cpu" else 2**28
        for dtype in ("float32", "bfloat16"):
            for size in sizes:
                seconds = self._time_product(dtype, size, repeats=1)
                self.sizes[dtype] = size
                # The next size has eight times the work.
                if seconds > 0.1 / 8:
                    break

    def sample(self, repeats: int = 3) -> None:
        """Measure all rates again; takes about a second."""
        for dtype, size in self.sizes.items():
            for _ in range(repeats):
                seconds = self._time_product(dtype, size)
                self.samples.setdefault(dtype, []).append(2.0 * size**3 / seconds)
        x = jnp.zeros((self.copy_elements,), jnp.float32)
        self.copy(x).block_until_ready()
        for _ in range(repeats):
            seconds = _seconds(lambda: self.copy(x), 4)
            self.samples.setdefault("copy", []).append(2.0 * x.nbytes / seconds)

    def flops(self, dtype: str) -> float:
        """Median FLOP/s so far."""
        return float(np.median(self.samples[dtype]))

    def _time_product(self, dtype: str, size: int, repeats: int | None = None) -> float:
        # Random numbers: with zeros a GPU would draw less power and clock higher than in a model.
        a, b = (jnp.asarray(np.resize(self.numbers, (size, size)), dtype) for _ in range(2))
        seconds = _seconds(lambda: self.multiply(a, b), 1)
        calls = repeats or max(1, min(50, int(0.05 / seconds)))
        return _seconds(lambda: self.multiply(a, b), calls)


def _seconds(call: Any, calls: int) -> float:
    """Seconds per call over several queued calls, after one untimed call."""
    call().block_until_ready()
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    result.block_until_ready()
    return (time.perf_counter() - start) / calls


def describe_device(count: int) -> dict[str, Any]:
    """Versions, cores, and the device that jax computes on.

    Raises:
      UserError: fewer devices than requested.
    """
    device = jax.devices()[0]
    if jax.device_count() < count:
        raise UserError(f"--devices {count}: jax sees {jax.device_count()} of kind {device.device_kind}")
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": count,
        "cores": os.cpu_count(),
        "threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {package.__name__: package.__version__ for package in (jax, jaxlib, flax, optax, np)},
    }
