"""One of several processes of a run; writes what it read or computed to OUT/PROCESS.npz.

Usage: worker.py PROCESS PROCESSES PORT OUT CORPUS...: see conftest.py and JOBS. multiprocessing imports this file in
reader processes too; module constants are therefore changed on import.
"""

import collections
import contextlib
import dataclasses
import gc
import io
import json
import sys
import time
from pathlib import Path

import numpy as np

from bert_jax.data import epoch_plan
from tests.multi_process.configs import (
    CHUNK_TOKENS,
    DEVICES,
    PREFETCH,
    READER_PROCESSES,
    RUNS,
    STEPS,
    STREAMS,
    WINDOW_CHUNKS,
)

epoch_plan.CHUNK_TOKENS, epoch_plan.WINDOW_CHUNKS = CHUNK_TOKENS, WINDOW_CHUNKS
PREPARED = ("input_ids", "target_positions", "target_labels", "target_weights")


def open_task(config, parts):
    from bert_jax.data.mixture import CorpusWeight
    from bert_jax.training import pretraining

    return pretraining.open_task(config, [CorpusWeight(Path(part)) for part in parts])


def read_stream(task) -> dict[str, np.ndarray]:
    """Rows of all steps, before and after masking."""
    import jax

    from bert_jax.data.cursor import Cursor

    prepare = jax.jit(lambda rows: task.prepare(rows, jax.numpy.uint32(task.config.seed)))
    found = {}
    with contextlib.closing(task.batches(Cursor())) as batches:
        for step, (rows, size, following) in enumerate(batches):
            masked = jax.device_get(prepare(rows))
            found |= {f"{step}/{name}": array for name, array in rows.items()}
            found |= {f"{step}/masked/{name}": masked[name] for name in PREPARED}
            found[f"{step}/size"] = np.array(size)
            found[f"{step}/following"] = np.array(str(following))
    assert step == STEPS - 1, step
    return found


def stream(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """All cases."""
    found = {}
    for name, config in STREAMS.items():
        readers = READER_PROCESSES[processes] if name == "mixture" else 0
        data = dataclasses.replace(config.data, prefetch=PREFETCH[processes], reader_processes=readers)
        task = open_task(dataclasses.replace(config, data=data), corpora[:2] if name == "mixture" else corpora[:1])
        assert (task.train.process_index, task.train.process_count) == (process, processes)
        found[f"{name}/windows"] = np.array([rows.epoch_planner(48).windows for rows in task.train.corpora])
        found |= {f"{name}/{key}": value for key, value in read_stream(task).items()}
    return found


def refusals(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """What each process says of a corpus with one bad shard, and of a mesh that leaves processes without rows."""
    from bert_jax.config import MeshConfig
    from bert_jax.data.mixture import CorpusWeight
    from bert_jax.errors import UserError
    from bert_jax.training import pretraining

    intact, _, damaged = (Path(corpus) for corpus in corpora)
    workdir = damaged.parent / "run"
    meshes = {"shard": (damaged, MeshConfig()), "mesh": (intact, MeshConfig(data=2, fsdp=1, tensor=4))}
    run = dataclasses.replace(RUNS, model=dataclasses.replace(RUNS.model, num_heads=4))
    found = {}
    for name, (corpus, mesh) in meshes.items():
        try:
            pretraining.pretrain(dataclasses.replace(run, mesh=mesh), [CorpusWeight(corpus)], workdir)
        except UserError as error:
            found[name] = np.array(str(error))
    return found | {"workdir": np.array(workdir.exists())}


def lateness(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """A broadcast and an all-gather in time, and the error of a barrier that the third process reaches late."""
    from bert_jax.distributed import agreement
    from bert_jax.errors import PeerError

    agreement.set_timeout(60)
    found = {"broadcast": np.array(agreement.compute_and_broadcast("a word", lambda: f"from {process}"))}
    found["gathered"] = np.array(agreement.all_gather("numbers", process))
    agreement.set_timeout(5)
    if process == 2:
        time.sleep(7)  # the others wait for 5 s
    try:
        agreement.barrier("a barrier")
    except PeerError as error:
        found["error"] = np.array(str(error))
    return found


class CountedCalls:
    """A client of jax's key-value store that counts the calls by name."""

    def __init__(self, client):
        self.client, self.counts = client, collections.Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(self.client, name)


def calls(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """Numbers of calls to the key-value store for each collective, and sizes of the arrays that are gathered."""
    import jax
    from jax._src import distributed
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    from bert_jax.distributed import agreement
    from bert_jax.errors import UserError
    from bert_jax.training.sharding import put_equal

    plain, found = distributed.global_state.client, {}
    for name, collective in {
        "all_gather": lambda: agreement.all_gather("numbers", process),
        "broadcast": lambda: agreement.compute_and_broadcast("a word", lambda: f"from {process}"),
        "gather_to_first": lambda: agreement.gather_to_first("more numbers", process),
    }.items():
        for _ in range(3):
            distributed.global_state.client = CountedCalls(plain)
            found[f"{name}/value"] = np.array(collective())
            found[f"{name}/calls"] = np.array(json.dumps(distributed.global_state.client.counts))
    distributed.global_state.client = plain
    agreement.barrier("all have read")
    found["kept"] = np.array([key for key, _ in plain.key_value_dir_get("bert_jax/numbers")])

    gathered, gather = [], multihost_utils.process_allgather

    def counted(array, *arguments, **options):
        gathered.append(np.size(array))
        return gather(array, *arguments, **options)

    multihost_utils.process_allgather = counted
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shardings = [NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())]
    tree = [np.arange(16.0, dtype=np.float32), np.array([3.0], np.float32)]
    for name, put in {"device_put": jax.device_put, "put_equal": lambda *trees: put_equal(*trees, "a file")}.items():
        gathered.clear()
        found[f"{name}/shards"] = np.concatenate([shard.data for shard in put(tree, shardings)[0].addressable_shards])
        found[f"{name}/gathered"] = np.array(gathered)
    try:
        put_equal([tree[0] + (process == 3), tree[1]], shardings, "a file")
    except UserError as error:
        found["error"] = np.array(str(error))
    return found


def checkpoints(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """Files that each process hashes when a checkpoint is saved and verified, and what it restores after damage."""
    import jax
    from etils import epath
    from jax.sharding import NamedSharding, PartitionSpec

    from bert_jax.distributed import agreement
    from bert_jax.training.run_directory import checkpoint, commit

    directory, hashed, sha256 = epath.Path(corpora[0]).parent / "checkpoints", [], commit._sha256

    def recorded(path):
        hashed.append(path.relative_to(directory).as_posix())
        return sha256(path)

    commit._sha256 = recorded
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))

    def state_of(step: int):
        table = np.arange(4096.0, dtype=np.float32).reshape(64, 64) * step
        return {
            name: jax.make_array_from_callback(table.shape, sharding, lambda index: table[index])
            for name, sharding in (("rows", by_rows), ("all", everywhere))
        }

    found, log = {}, io.StringIO()
    with checkpoint.Checkpoints(directory, keep=3) as saves, contextlib.redirect_stderr(log):
        for step in (1, 2):
            hashed.clear()
            saves.save(step, state_of(step), {"step": step})
            saves.wait()
        found["written"] = np.array(hashed)
        agreement.barrier("all have saved")
        assert saves.metadata(2)["step"] == 2
        damaged = max((directory / "00000002/state/ocdbt.process_2/d").iterdir(), key=lambda path: path.stat().length)
        agreement.barrier("all have looked")
        if process == 0:
            content = bytearray(damaged.read_bytes())
            content[-1] ^= 1
            damaged.write_bytes(bytes(content))
        agreement.barrier("a file is damaged")
        hashed.clear()
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(1))
        state, metadata = saves.restore_newest(lambda metadata: abstract)
    found |= {"verified": np.array(hashed), "log": np.array(log.getvalue()), "step": np.array(metadata["step"])}
    found |= {"damaged": np.array(str(damaged)), "directory": np.array(str(directory))}
    found["restored"] = np.concatenate([np.ravel(shard.data) for shard in state["rows"].addressable_shards])
    return found


JOBS = {1: (stream,), 4: (stream, refusals, calls, checkpoints, lateness)}
"""By number of processes."""


def main(process: int, processes: int, port: int, out: Path, corpora: list[str]) -> None:
    import jax

    gc.set_threshold(50_000, 20, 100)  # see tests/conftest.py
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES[processes])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)
    jax.config.update("jax_disable_most_optimizations", True)  # less than half the time to compile
    assert jax.process_count() == processes and len(jax.local_devices()) == DEVICES[processes]
    found = {}
    for job in JOBS[processes]:
        for name, array in job(process, processes, corpora).items():
            found[f"{job.__name__}/{name}"] = array
    np.savez(out / f"{process}.npz", **found)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5:])
