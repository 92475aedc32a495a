"""Copies of arrays on 8 fake CPU devices, and runs on them, of which some have flipped bits; prints JSON."""

import dataclasses
import io
import json
import os
import random
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # of LLVM, not of HLO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, MeshConfig, OptimizerConfig, Phase
from bert_jax.data.batches import HostBatch
from bert_jax.errors import UserError
from bert_jax.model import families
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training import loop
from bert_jax.training.micro_batch import choose_accumulations
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.replicas import find_corrupted, make_comparison
from bert_jax.training.run_directory.checkpoint import Checkpoints, checkpoint_directory
from bert_jax.training.sharding import make_mesh, put_rows
from tests.multi_device.worker import rows_of_step
from tests.runs import arrays, committed, flip_bit, numbers, share_programs

MESHES = [(8, 1, 1), (2, 4, 1), (4, 1, 2), (2, 2, 2), (1, 8, 1)]
AXES = "data", "fsdp", "tensor"
SHAPES = {
    # name: (shape, type, axes of the dimensions)
    "kernel": ((3, 16, 8), "float32", (None, "fsdp", "tensor")),
    "bias": ((3, 5), "bfloat16", ()),
    "codes": ((7, 16), "int8", (None, "tensor")),
    "mask": ((9,), "bool", ()),
    "count": ((), "int32", ()),
}


def put_arrays(mesh) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    made = {name: jnp.asarray(rng.normal(size=shape) * 9, kind) for name, (shape, kind, _) in SHAPES.items()}
    return {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*SHAPES[name][2]))) for name, x in made.items()}


def flips(data: int, fsdp: int, tensor: int) -> dict[str, list]:
    """The arrays that are compared on a mesh; and for bits of each array, one at a time, who is named."""
    mesh = make_mesh(MeshConfig(data, fsdp, tensor))
    plain, rng, found = put_arrays(mesh), random.Random(0), []
    comparison = make_comparison(plain)
    assert comparison is not None

    def named(tree) -> tuple:
        leaves = jax.tree.leaves(tree)
        return find_corrupted(np.asarray(comparison.sums([leaves[i] for i in comparison.leaves])), comparison.axes)

    assert named(plain) == ([], True)
    for name, leaf in plain.items():
        for _ in range(4):
            place = tuple(map(rng.randrange, mesh.devices.shape))
            size = int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
            bit = 0 if leaf.dtype == bool else rng.randrange(8 * leaf.dtype.itemsize)
            places, majority = named(flip_bit(plain, name, mesh.devices[place], bit, rng.randrange(size)))
            split = {axis for axis in SHAPES[name][2] if axis and mesh.shape[axis] > 1}
            replicas = int(np.prod([mesh.shape[axis] for axis in AXES if axis not in split]))
            case = {"array": name, "replicas": replicas, "place": place, "named": places, "majority": majority}
            found.append(case)
    return {"compared": [sorted(plain)[i] for i in comparison.leaves], "cases": found}


def subtle() -> dict[str, bool]:
    """Whether changes of more than one element of a copy are found: two signs, and two elements that change places."""
    mesh = make_mesh(MeshConfig(8, 1, 1))
    array = put_arrays(mesh)["kernel"]
    comparison = make_comparison([array])
    signs = [array]
    for element in (3, 4):
        signs = flip_bit(signs, "0", mesh.devices[5, 0, 0], 31, element)
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[5][0, 0, :2] = parts[5][0, 0, 1::-1]
    parts = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    swapped = [jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)]
    return {
        name: find_corrupted(np.asarray(comparison.sums(tree)), comparison.axes)[0] == [(5, 0, 0)]
        for name, tree in {"signs": signs, "swapped": swapped}.items()
    }


VOCAB = 512
CONFIG = Config(
    name="replicas",
    model=dataclasses.replace(
        families.bert(num_layers=1, hidden_size=64, vocab_size=VOCAB), intermediate_size=64, max_positions=32
    ),
    phases=(Phase(steps=12, seq_len=32, batch_size=32, accumulation=1, warmup_steps=0),),
    optimizer=OptimizerConfig(name="lamb"),
    checkpoint=CheckpointConfig(every=4, keep=9),
    log=LogConfig(every=1, tensorboard=False),
    evaluation=EvaluationConfig(every=0),
)


class SyntheticPretraining(Pretraining):
    """Rows that are a function of the step, and no held-out rows."""

    def batches(self, cursor):
        while cursor.step < self.config.total_steps:
            rows = rows_of_step(cursor.step)
            cursor = dataclasses.replace(cursor, step=cursor.step + 1, rows=cursor.rows + len(rows["row"]))
            yield HostBatch(rows, len(rows["row"]), cursor)

    def evaluate(self, score, rows):
        return {}


def equal_replicas(data: int, fsdp: int, tensor: int) -> list[bool]:
    """Whether the replicas are equal after each of a few steps."""
    config = dataclasses.replace(CONFIG, mesh=MeshConfig(data, fsdp, tensor))
    mesh = make_mesh(config.mesh)
    programs = Programs(SyntheticPretraining(config, Vocabulary(VOCAB, 4, (0, 1, 2, 3, 4))), mesh)
    comparison = make_comparison(programs.abstract_state(0))
    state, step, inputs, equal = programs.init_state(), programs.train_step(0, 1), put_step_inputs(3e-3, 1, 0, mesh), []
    for count in range(4):
        state, _ = step(state, put_rows(rows_of_step(count), mesh, 32), inputs)
        leaves = jax.tree.leaves(state)
        sums = np.asarray(comparison.sums([leaves[i] for i in comparison.leaves]))
        equal.append(not find_corrupted(sums, comparison.axes)[0])
    return equal


WORD = "params/encoder/embeddings/word"


class Runs:
    """Runs on four devices."""

    def __init__(self, directory: Path):
        self.directory, self.make_programs = directory, share_programs()
        self.mesh = make_mesh(MeshConfig(data=4, fsdp=1), jax.devices()[:4])

    def run(self, name: str, change=None, every: int = 3, checkpoint=CONFIG.checkpoint, **recovery) -> dict:
        """Train; `change` has the state after each step and returns the one to go on with."""
        recovery = dataclasses.replace(CONFIG.recovery, replica_check_every=every, stable_steps=2, **recovery)
        config = dataclasses.replace(CONFIG, mesh=MeshConfig(data=4), recovery=recovery, checkpoint=checkpoint)
        task = SyntheticPretraining(config, Vocabulary(VOCAB, 4, (0, 1, 2, 3, 4)))
        programs = self.make_programs(None, change)(task, self.mesh)
        workdir, said, error = self.directory / name, io.StringIO(), ""
        events: list[tuple] = []
        workdir.mkdir()
        with redirect_stderr(said):
            try:
                counts = choose_accumulations(programs, 1)
                loop.train(programs, counts, workdir, {}, on_event=lambda *event: events.append(event))
            except UserError as caught:
                error = str(caught)
        ledger = workdir / "ledger.jsonl"
        entries = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
        warnings = [line for line in said.getvalue().splitlines() if line.startswith("warning: ")]
        return {
            "rollbacks": [entry for entry in entries if entry["event"] == "rollback"],
            "events": events,
            "warnings": warnings,
            "error": error,
            "checkpoints": committed(workdir),
            "metrics": numbers(workdir),
            "state": self._final_state(workdir, programs),
        }

    def _final_state(self, workdir: Path, programs: Programs) -> str:
        with Checkpoints(checkpoint_directory(workdir), keep=9) as checkpoints:
            restored = checkpoints.restore_newest(lambda metadata: programs.abstract_state(0))
        if restored is None:
            return ""
        return str({name: x.tobytes().hex() for name, x in arrays(restored[0]).items()})


def at(step: int, bit: int, times: int = 1):
    """A change of the state: a bit of the third device's copy flips after a step, the first times that it is done."""
    left = [times]

    def change(count, state):
        if count != step or not left[0]:
            return state
        left[0] -= 1
        return flip_bit(state, WORD, jax.devices()[2], bit)

    return change


def whole_runs() -> dict[str, dict]:
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(Path(directory))
        copies = dataclasses.replace(CONFIG.checkpoint, local_directory=f"{directory}/copies", local_every=3)
        return {
            "undisturbed": runs.run("undisturbed"),
            "without": runs.run("without", at(5, 20), every=0),
            "flip": runs.run("flip", at(5, 20)),  # found by the comparison of step 6
            "before a save": runs.run("save", at(8, 20), every=1000),
            "before a local copy": runs.run("copy", at(5, 20), every=1000, checkpoint=copies),
            "divergence": runs.run("divergence", at(5, 30), every=1000, max_skipped=1),
            "again and again": runs.run("again", at(5, 20, times=9), max_rollbacks=2),
        }


def main() -> None:
    found = {
        "flips": {str(mesh): flips(*mesh) for mesh in MESHES},
        "subtle": subtle(),
        "equal": {str(mesh): equal_replicas(*mesh) for mesh in MESHES if mesh[1] > 1},
        "runs": whole_runs(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
