"""The train step on synthetic rows, which most benchmarks time, and the rates of the device that it is compared with.

Needs jax, flax, optax, numpy and tyro. The number of cores is that at the first use of a device.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.bench import harness
from bert_jax.chips import chip_of
from bert_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families
from bert_jax.model.flops import pretraining_flops
from bert_jax.objectives import masking
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training.implementation import check_devices, choose_implementation
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.sharding import check_rows, make_mesh, put_rows

# (layers, width): Turc et al. 2019, table 1; Devlin et al. 2019, section 3.
PRESETS = {
    "bert_tiny": (2, 128),
    "bert_mini": (4, 256),
    "bert_small": (4, 512),
    "bert_medium": (8, 512),
    "bert_base": (12, 768),
    "bert_large": (24, 1024),
}
# bert-base-uncased: [PAD], [UNK], [CLS], [SEP], [MASK].
PAD, UNK, CLS, SEP, MASK = 0, 100, 101, 102, 103
VOCABULARY = Vocabulary(30522, MASK, (PAD, UNK, CLS, SEP, MASK))
FIRST_WORD = 1000
"""First id of bert-base-uncased's vocabulary after special and unused ids."""


CONTENTS = {"full": (1, 1), "padded": (1, 2), "packed": (2, 2)}
"""Contents of a row: the number of its examples, and the number that would fill it; the rest is padding."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program on one set of shapes."""

    preset: str
    seq_len: int
    batch: int
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    dtype: str = "float32"
    attention: str = "reference"
    optimizer: str = "adamw"
    accumulation: int = 1
    scan_unroll: int | None = None
    """None: as in a run on this device."""
    remat: str = "none"
    dense_dtype: str = "compute"
    rows: str = "full"
    """Key of CONTENTS."""
    pair: str = "nsp"
    variant: str | None = None
    """One of PEERS, or "floor"; None is bert_jax."""

    @property
    def dropout(self) -> str:
        """One rate, or hidden/attention."""
        same = self.hidden_dropout == self.attention_dropout
        return f"{self.hidden_dropout:g}" + ("" if same else f"/{self.attention_dropout:g}")

    @property
    def shapes(self) -> tuple:
        """Settings that must be equal for a comparison with the peer."""
        return self.preset, self.seq_len, self.batch, self.hidden_dropout, self.attention_dropout, self.dtype

    @property
    def examples(self) -> tuple[int, int]:
        """Examples of a step, and tokens of each."""
        count, parts = CONTENTS[self.rows]
        return self.batch * count, self.seq_len // parts


PEERS = ("stock", "gathered")
"""Variants of the peer library."""


def with_variants(cases: Sequence[Case], variants: Sequence[str]) -> list[Case]:
    """Add the variants after the first case of each set of shapes."""
    added = {case.shapes: [Case(*case.shapes, pair="none", variant=variant) for variant in variants] for case in cases}
    return [one for case in cases for one in (case, *added.pop(case.shapes, []))]


def model_config(case: Case) -> ModelConfig:
    """Model config of a case; UserError for contradicting settings."""
    base = families.bert(*PRESETS[case.preset])
    same = ("hidden_dropout", "attention_dropout", "attention", "remat", "dense_dtype", "scan_unroll")
    return dataclasses.replace(
        base,
        compute_dtype=case.dtype,
        max_positions=max(base.max_positions, case.seq_len),
        **{name: getattr(case, name) for name in same},
    )


def config_of(case: Case) -> Config:
    """Config of a run with the model and the shapes of a case; UserError for contradicting settings."""
    return Config(
        name=case.preset,
        model=model_config(case),
        objective=ObjectiveConfig(pair=case.pair),
        data=DataConfig(examples_per_row=max(2, case.seq_len // 24) if case.rows == "packed" else 1),
        optimizer=OptimizerConfig(name=case.optimizer),
        phases=(Phase(seq_len=case.seq_len, batch_size=case.batch, accumulation=case.accumulation),),
    )


def predictions(seq_len: int) -> int:
    """Masked positions in a full row."""
    return int(masking.prediction_counts_by_length(ObjectiveConfig().mask_rate, seq_len)[-1])


def step_flops(case: Case) -> float:
    """FLOPs that the model needs for one step, with the MLM head on the masked positions only."""
    count, length = case.examples
    return pretraining_flops(model_config(case), count, length, predictions(length))


def synthetic_rows(
    batch: int, seq_len: int, contents: str = "full", slots: int = 1, seed: int = 0
) -> dict[str, np.ndarray]:
    """Rows of examples [CLS] A [SEP] B [SEP], whose word ids follow Zipf's law.

    Args:
      batch: number of rows.
      seq_len: tokens of a row.
      contents: key of `CONTENTS`.
      slots: for examples of a row; at least as many as it has.
      seed: of the ids.
    """
    count, parts = CONTENTS[contents]
    examples = _synthetic_examples(batch * count, seq_len // parts, seed)
    index = np.tile(np.arange(count, dtype=np.int32), (batch, 1))

    def row_of_tokens(x: np.ndarray) -> np.ndarray:
        return np.pad(x.reshape(batch, -1), ((0, 0), (0, seq_len - count * (seq_len // parts))))

    def row_of_slots(x: np.ndarray, empty: int) -> np.ndarray:
        return np.pad(x.reshape(batch, count), ((0, 0), (0, slots - count)), constant_values=empty)

    segments = np.repeat(index + 1, seq_len // parts, axis=1)
    row = np.arange(batch, dtype=np.int32)
    return {name: row_of_tokens(x) for name, x in (examples | {"segment_ids": segments}).items()} | {
        "cls_positions": row_of_slots(index * (seq_len // parts), 0),
        "example_id": row_of_slots(np.arange(batch * count, dtype=np.int32), -1),
        "pair_labels": row_of_slots(np.random.default_rng(1).integers(0, 2, batch * count, np.int32), -1),
        "row": row,
        "mask_epoch": np.zeros(batch, np.int32),
    }


def _synthetic_examples(count: int, length: int, seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    ranks = np.exp(draw.uniform(0, math.log(VOCABULARY.size - FIRST_WORD), (count, length)))
    ids = FIRST_WORD - 1 + ranks.astype(np.int32)
    middle = length // 2
    ids[:, 0], ids[:, middle], ids[:, -1] = CLS, SEP, SEP
    types = np.zeros((count, length), np.int32)
    types[:, middle + 1 :] = 1
    positions = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    return {"input_ids": ids, "token_type_ids": types, "position_ids": positions}


class TrainStep:
    """The compiled train step of a config on one batch, ready to be timed.

    Raises:
      UserError: contradicting settings.
    """

    def __init__(self, config: Config, devices: int = 1, contents: str = "full"):
        """Compile the step; `contents` of rows are a key of `CONTENTS`."""
        kind = jax.devices()[0].device_kind
        config = choose_implementation(config, kind)
        check_devices(config.model, config.mesh.tensor, kind)
        self.task = Pretraining(config, VOCABULARY._replace(size=config.model.vocab_size))
        self.phase = phase = config.phases[0]
        self.mesh = make_mesh(config.mesh, jax.devices()[:devices])
        self.accumulation = phase.accumulation or phase.fewest_micro_batches
        check_rows(phase.batch_size, self.accumulation, self.mesh, "batch")
        slots = config.data.max_examples_per_row(phase.seq_len)
        rows = synthetic_rows(phase.batch_size, phase.seq_len, contents, slots)
        rows = put_rows(rows, self.mesh, phase.batch_size)
        # A tiny learning rate, as in a long warmup: the loss stays that of random weights.
        self.inputs = rows, put_step_inputs(1e-8, 1, 0, self.mesh)
        programs = Programs(self.task, self.mesh)
        self.compiled = programs.train_step(0, self.accumulation)
        memory = self.memory_analysis()
        # Donated inputs are also outputs: count them once.
        self.memory_bytes = memory and int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
        self.state = programs.init_state()
        self.metrics: dict[str, jax.Array] = {}

    def __call__(self, *inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        """New state and metrics."""
        state, self.metrics = self.compiled(*inputs)
        return state, self.metrics

    def memory_analysis(self) -> Any:
        """Of the compiled step."""
        return self.compiled.memory_analysis()

    def wait(self) -> None:
        """Wait until the newest step is done."""
        jax.block_until_ready(self.metrics)

    def time_steps(self, steps: int) -> float:
        """Seconds of `steps` steps, until the device has finished."""
        with harness.measure_seconds() as timing:
            for _ in range(steps):
                self.state, _ = self(self.state, *self.inputs)
            jax.block_until_ready((self.state, self.metrics))
        return timing["seconds"]

    def loss(self) -> float:
        """Loss of the last step."""
        return float(self.metrics["mlm_loss"])


FLOAT8 = "float8_e4m3fn"


class Ceiling:
    """Measured rate of square matrix products on one device, sampled repeatedly during a run.

    Float32 products have jax's default precision, as in the model: TF32 on recent GPUs, bf16 passes on TPU. Products of
    8-bit floats, on chips that have them (chips.py), are bfloat16.
    """

    def __init__(self, device: Any):
        """Of a device of jax. Chooses the largest size whose product takes at most 0.1 s, or the smallest size."""
        self.multiply = jax.jit(jnp.matmul, static_argnames="preferred_element_type")
        self.sizes: dict[str, int] = {}
        """Rows of the matrices by type."""
        self.samples: dict[str, list[float]] = {"float32": [], "bfloat16": []}
        """FLOP/s by type."""
        platform, chip = device.platform, chip_of(device.device_kind)
        if chip is not None and chip.float8_share:
            self.samples[FLOAT8] = []
        for dtype in self.samples:
            for self.sizes[dtype] in (512, 1024, 2048) if platform == "cpu" else (1024, 2048, 4096, 8192):
                # The next size has eight times the work.
                if self._seconds(dtype, calls=1) > 0.1 / 8:
                    break

    def add_samples(self, repeats: int = 3) -> None:
        """Measure `repeats` more rates of each type; takes about a second."""
        for dtype, rates in self.samples.items():
            calls = max(1, min(50, int(0.05 / self._seconds(dtype, calls=1))))
            rates += [2.0 * self.sizes[dtype] ** 3 / self._seconds(dtype, calls) for _ in range(repeats)]

    def _seconds(self, dtype: str, calls: int) -> float:
        # Random numbers: with zeros a GPU would draw less power and clock higher than in a model.
        numbers = np.random.default_rng(0).standard_normal(2**20 - 3, np.float32)
        square = jnp.asarray(np.resize(numbers, (self.sizes[dtype],) * 2), dtype)
        result = jnp.bfloat16 if dtype == FLOAT8 else None
        return queued(lambda: self.multiply(square, square, preferred_element_type=result), calls)["seconds"]


def queued(call: Callable[[], Any], calls: int) -> harness.Timing:
    """Seconds per call over several queued calls, until the device has finished; after one untimed call."""
    jax.block_until_ready(call())
    with harness.measure_seconds(calls) as timing:
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
    return timing
