"""What tests of training runs share: compiled programs, runs that are interrupted or spoiled, and their comparison."""

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import provenance
from bert_jax.config import Config
from bert_jax.objectives.losses import WeightedSum
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.sharding import make_mesh
from bert_jax.training.shared_programs import SharedPrograms


class HookedPrograms(SharedPrograms):
    """Shared programs with hooks around the steps."""

    def __init__(self, task: Any, mesh: Any, made: dict, before_step: Callable | None, after_step: Callable | None):
        super().__init__(task, mesh, made)
        self._before, self._after = before_step, after_step

    def train_step(self, phase, accumulation):
        program = super().train_step(phase, accumulation)
        return program if self._before is self._after is None else HookedStep(program, self._before, self._after)


class HookedStep:
    """A compiled step with functions that are called before and after it."""

    def __init__(self, program: Any, before: Callable | None, after: Callable | None):
        self.program, self.before, self.after = program, before, after
        self.memory_analysis = program.memory_analysis

    @jax.transfer_guard("allow")
    def __call__(self, state, batch, inputs):
        count = int(jax.device_get(state.step)) + 1
        if self.before is not None:
            self.before(count, inputs)
        state, metrics = self.program(state, batch, inputs)
        return (state if self.after is None else self.after(count, state)), metrics


def share_programs() -> Callable[..., Callable]:
    """A function that returns a `make_programs` for `pretrain`; the programs of all runs are shared.

    Its arguments are `before_step(count, inputs)`, called before each step with its number, counted from 1;
    `after_step(count, state)`, which returns the state to go on with; and `change_task(task)`, which returns the task
    to train.
    """
    made: dict = {}

    def make(before_step=None, after_step=None, change_task=lambda task: task) -> Callable[[Any, Any], Programs]:
        return lambda task, mesh: HookedPrograms(change_task(task), mesh, made, before_step, after_step)

    return make


class Killed(BaseException):
    """A run that ends at once: nothing catches it."""


def kill_after(step: int) -> Callable[[int, Any], Any]:
    """An `after_step` that ends the run after this step, before a checkpoint of it."""

    def kill(count: int, state: Any) -> Any:
        if count == step:
            raise Killed
        return state

    return kill


FACTORS = {-7: float("nan"), -8: float("inf"), -9: 3.0}
"""By a row's `mask_epoch`: what the loss of its micro-batch is multiplied with. One program has all of them: runs that
are compared must not differ in how they were compiled."""


@dataclasses.dataclass(frozen=True)
class SpoiledPretraining(Pretraining):
    """Multiplies the loss of every micro-batch that holds one of the stream's rows [first, last) by `factor`."""

    first: int = 0
    last: int = 0
    factor: float = 3.0

    def batches(self, cursor):
        code = next(code for code, known in FACTORS.items() if repr(known) == repr(self.factor))
        cursor = self.train.normalize_cursor(cursor)
        with contextlib.closing(super().batches(cursor)) as batches:
            for batch in batches:
                rows, place = dict(batch.rows), cursor.rows + batch.rows["row"]
                is_bad = (place >= self.first) & (place < self.last)
                rows["mask_epoch"] = np.where(is_bad, code, rows["mask_epoch"]).astype(np.int32)
                cursor = batch.next_cursor
                yield batch._replace(rows=rows)

    def sums(self, params, batch, dropout_key):
        found, times = super().sums(params, batch, dropout_key), 1.0
        for code, factor in FACTORS.items():
            times = jnp.where((batch["mask_epoch"] == code).any(), factor, times)
        return found | {"mlm_loss": WeightedSum(found["mlm_loss"].sum * times, found["mlm_loss"].weight)}


def spoil(first: int, last: int, factor: float) -> Callable[[Pretraining], SpoiledPretraining]:
    """A `change_task` to `SpoiledPretraining`; with no rows, the run is an ordinary one with the same programs."""
    fields = [field.name for field in dataclasses.fields(Pretraining)]
    return lambda task: SpoiledPretraining(*(getattr(task, name) for name in fields), first, last, factor)


def assert_close(found: list[dict], expected: list[dict]) -> None:
    """Losses of two runs are equal to rounding, as of programs that were compiled otherwise."""
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in ("loss", "mlm_loss", "pair_loss", "tokens_seen"):
            if name in b:
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=f"{name} at {b['step']}")


def numbers(workdir: Any, split: str | None = None) -> list[dict]:
    """The lines of metrics.jsonl, of one split or of all, without `timing`."""
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if split in (None, line["split"])]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def read_results(workdir: Any) -> dict:
    """The content of results.json without `provenance`, which says when, by which code and on what it was made."""
    values = json.loads((workdir / "results.json").read_text())
    assert values.pop("provenance")["code"] == provenance.code()
    return values


def committed(workdir: Any) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    paths = checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir))
    return [int(path.name) for path in paths]


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by path, as numpy arrays."""
    return {name: np.asarray(leaf) for name, leaf in name_leaves(tree).items()}


def final_state(workdir: Any, config: Config) -> tuple[Any, dict]:
    """Every array of a run's newest checkpoint, and its metadata."""
    size = config.model.vocab_size
    task = Pretraining(config, Vocabulary(size, 4, (0, 1, 2, 3, 4), bytes(size)))
    programs = Programs(task, make_mesh(config.mesh, jax.devices()[:1]))
    with checkpoint.Checkpoints(checkpoint.checkpoint_directory(workdir), keep=9) as checkpoints:
        return checkpoints.restore_newest(lambda metadata: programs.abstract_state(metadata["phase"]))


def assert_same_arrays(found: Any, expected: Any) -> None:
    """Equal bits, leaf by leaf."""
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_same_run(workdir: Any, expected: Any, config: Config) -> None:
    """Equal final states, metadata and lines of metrics."""
    (state, metadata), (wanted, wanted_metadata) = (final_state(one, config) for one in (workdir, expected))
    assert metadata == wanted_metadata and metadata["cursor"]["step"] == config.total_steps
    assert_same_arrays(state, wanted)
    assert numbers(workdir) == numbers(expected) != []


def flip_bit(state: Any, path: str, device: Any, bit: int, element: int = 0) -> Any:
    """A tree of arrays with one bit of an array changed in the copy of one device of this process."""

    def flipped(name: str, leaf: Any) -> Any:
        if name != path:
            return leaf
        parts = []
        for shard in leaf.addressable_shards:
            part = np.array(jax.device_get(shard.data))
            if shard.device == device:
                words = part.reshape(-1).view(f"uint{8 * part.itemsize}")
                words[element] ^= words.dtype.type(1 << bit)
            parts.append(jax.device_put(part, shard.device, may_alias=False))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return map_with_paths(flipped, state)
