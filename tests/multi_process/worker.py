"""One of several processes of a run; writes what it read or computed to OUT/PROCESS.npz.

Usage: worker.py PROCESS PROCESSES PORT OUT CORPUS...: see conftest.py and JOBS. multiprocessing imports this file in
reader processes too; module constants are therefore changed on import.
"""

import contextlib
import dataclasses
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


JOBS = {1: (stream,), 4: (stream, refusals, lateness)}
"""By number of processes."""


def main(process: int, processes: int, port: int, out: Path, corpora: list[str]) -> None:
    import jax

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
