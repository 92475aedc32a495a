"""A small fine-tuning task on random examples, and one step of it."""

import dataclasses
from typing import Any

import jax
import numpy as np

from bert_jax.config import Config, FinetuneConfig, MeshConfig, ModelConfig, Phase, TaskHead
from bert_jax.data.batch import SpecialIds
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.example_rows import ExampleRows
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import heads_of
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.sharding import make_mesh, put_rows

HEAD = TaskHead("classification", ("no", "yes"), "pooled")
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=32,
    initializer_range=0.2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
ROWS, EXAMPLES = 8, 20


def examples(count: int = 50) -> EncodedExamples:
    """Of 2 to 12 random tokens, with random labels."""
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(rng.integers(2, 13, size=count))])
    tokens = rng.integers(5, 32, size=starts[-1]).astype(np.int32)
    return EncodedExamples(tokens, np.zeros_like(tokens), starts, rng.integers(0, 2, count).astype(np.int32), 0)


def make_task(
    head: TaskHead = HEAD, model: ModelConfig = MODEL, mesh: MeshConfig | None = None, **phase: Any
) -> FineTuning:
    """Batches of `EXAMPLES` examples in `ROWS` rows of 32 tokens, some of them padding."""
    config = Config(
        name="tiny",
        model=model,
        phases=(Phase(steps=10, seq_len=32, batch_size=ROWS, warmup_steps=0, accumulation=1, **phase),),
        mesh=mesh or MeshConfig(),
        finetune=FinetuneConfig("classification", head, "bert", EXAMPLES, 32),
    )
    rows = ExampleRows(examples(), 32, 4, SpecialIds(0, 2, 3), seed=1)
    return FineTuning(config, heads_of(config), EXAMPLES, rows, (ROWS,))


def first_batch(task: FineTuning) -> dict[str, np.ndarray]:
    """The rows of the first step: packed, with unused slots and a row of padding."""
    rows = task.train.training_rows(0, EXAMPLES, (ROWS,))
    used = (rows["example_id"] >= 0).sum(1)
    assert used.sum() == EXAMPLES and used.max() > 1 and used.min() == 0
    return rows


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Host copies by path."""
    return {name: np.asarray(leaf) for name, leaf in name_leaves(jax.device_get(tree)).items()}


def make_programs(task: FineTuning, devices: int = 1) -> Programs:
    """The programs of a task on the first devices."""
    return Programs(task, make_mesh(task.config.mesh, jax.devices()[:devices]))


def take_step(programs: Programs, state: Any, rate: float = 0.01, rows: Any = None) -> tuple[Any, dict[str, float]]:
    """A step on `rows`, by default those of the first batch; `state` must not be used again."""
    batch = put_rows(first_batch(programs.task) if rows is None else rows, programs.mesh, ROWS)
    state, metrics = programs.train_step(0, 1)(
        state, batch, put_step_inputs(rate, 1, programs.task.config.seed, programs.mesh)
    )
    return state, {name: float(value) for name, value in metrics.items()}


def with_cls_norm(kind: str, **changes: Any) -> TaskHead:
    """The head with a normalisation of [CLS]."""
    return dataclasses.replace(HEAD, cls_norm=kind, **changes)
