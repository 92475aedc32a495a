"""One of several processes of a run; writes what it read or computed to OUT/PROCESS.npz.

Usage: worker.py PROCESS PROCESSES PORT OUT CORPUS...: see launch.py and JOBS. multiprocessing imports this file in
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
    ACCUMULATION,
    CHUNK_TOKENS,
    DEVICES,
    LOSSES,
    PREFETCH,
    READER_PROCESSES,
    STEPS,
    STREAMS,
    WINDOW_CHUNKS,
)

epoch_plan.CHUNK_TOKENS, epoch_plan.WINDOW_CHUNKS = CHUNK_TOKENS, WINDOW_CHUNKS
PREPARED = ("input_ids", "target_positions", "target_labels", "target_weights")
FEW = 4
"""Steps whose records are collected."""


def open_task(config, parts):
    from bert_jax.data.mixture_spec import CorpusWeight
    from bert_jax.training import pretraining

    return pretraining.open_task(config, [CorpusWeight(Path(part)) for part in parts])


def read_stream(task) -> dict[str, np.ndarray]:
    """Rows of all steps, before and after masking."""
    import jax

    from bert_jax.data.cursor import Cursor

    prepare = jax.jit(lambda rows: task.prepare(rows, evaluating=False))
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


def records_of_few(task) -> list[int]:
    """Records that this process reads for the first steps."""
    from bert_jax.data.corpus import Corpus
    from bert_jax.data.cursor import Cursor

    read, original = set(), Corpus.records

    def spy(self, indices):
        read.update(map(int, indices))
        return original(self, indices)

    Corpus.records = spy
    for step in range(FEW):
        task.train.batch(task.train.cursor_at(Cursor(), step))
    Corpus.records = original
    return sorted(read)


def stream(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """All cases; with two processes also a case in which each of them reads everything."""
    from bert_jax.data.batches import TrainingStream

    found = {}
    for name, config in STREAMS.items():
        readers = READER_PROCESSES[processes] if name == "mixture" else 0
        data = dataclasses.replace(config.data, prefetch=PREFETCH[processes], reader_processes=readers)
        task = open_task(dataclasses.replace(config, data=data), corpora[:2] if name == "mixture" else corpora[:1])
        assert (task.train.process_index, task.train.process_count) == (process, processes)
        if name == "doc_sentences":
            found[f"{name}/records"] = np.array(records_of_few(task))
            if processes == 2:
                everything = TrainingStream(
                    [task.train.corpora[0].corpus], [1.0], task.config, task.train.special_ids, 0, 1
                )
                wrong = dataclasses.replace(task, train=everything)
                found |= {f"unshared/{key}": value for key, value in read_stream(wrong).items()}
        found[f"{name}/windows"] = np.array([rows.epoch_plan(48).windows for rows in task.train.corpora])
        found |= {f"{name}/{key}": value for key, value in read_stream(task).items()}
    return found


def losses(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """20 steps, held-out metrics before and after them, and this process's held-out rows."""
    phases = (dataclasses.replace(LOSSES.phases[0], accumulation=ACCUMULATION[processes]),)
    task = open_task(dataclasses.replace(LOSSES, phases=phases), corpora[:1])
    assert (task.train.process_index, task.train.process_count) == (process, processes)
    found = train(task, ACCUMULATION[processes])
    settings, seq_len = task.config.evaluation, task.config.phases[-1].seq_len
    for i, (_, rows) in enumerate(task.validation.batches(seq_len, settings.rows, settings.batch_size)):
        found |= {f"held_out/{i}/{key}": value for key, value in rows.items()}
    return found


def train(task, accumulation: int) -> dict[str, np.ndarray]:
    """The loop without its log and its checkpoints."""
    import jax

    from bert_jax.data.cursor import Cursor
    from bert_jax.training.micro_batch import check_run
    from bert_jax.training.optimizers.schedules import learning_rate_at
    from bert_jax.training.param_paths import name_leaves
    from bert_jax.training.programs import Programs, put_step_inputs
    from bert_jax.training.sharding import make_mesh, put_rows

    programs = Programs(task, make_mesh(task.config.mesh))
    mesh = programs.mesh
    check_run(programs, jax.process_count())
    state, step = programs.init_state(), programs.train_step(0, accumulation)
    found = {f"before/{name}": np.array(value) for name, value in programs.evaluate(state.params, 0).items()}
    found["losses"] = []
    for rows, size, following in task.batches(Cursor()):
        batch = put_rows(rows, mesh, size)
        inputs = put_step_inputs(learning_rate_at(task.config, following.step - 1), 1, mesh)
        state, metrics = step(state, batch, inputs)
        found["losses"].append(float(metrics["loss"]))
        if following.step == 1:
            shards = batch["input_ids"].addressable_shards
            found["devices"] = np.array(len(shards))
            found["shard"] = np.concatenate([np.asarray(shard.data) for shard in shards])
            found["shard_rows"] = np.concatenate([np.arange(size)[shard.index[0]] for shard in shards])
            found |= {f"first/{name}": array for name, array in rows.items()}
            # After one update the first moment is a tenth of the clipped gradient.
            moments = name_leaves(jax.device_get(state.optimizer.mu))
            found |= {f"moment/{name}": np.asarray(value) for name, value in moments.items()}
    return found | {f"after/{name}": np.array(value) for name, value in programs.evaluate(state.params, 0).items()}


def refusals(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """What each process says of a corpus with one bad shard, and of a mesh that leaves processes without rows."""
    from bert_jax.config import MeshConfig
    from bert_jax.data.mixture_spec import CorpusWeight
    from bert_jax.errors import UserError
    from bert_jax.training import pretraining

    intact, _, damaged = (Path(corpus) for corpus in corpora)
    workdir = damaged.parent / "run"
    meshes = {"shard": (damaged, MeshConfig()), "mesh": (intact, MeshConfig(data=1, fsdp=1, tensor=processes))}
    found = {}
    for name, (corpus, mesh) in meshes.items():
        try:
            pretraining.pretrain(dataclasses.replace(LOSSES, mesh=mesh), [CorpusWeight(corpus)], workdir)
        except UserError as error:
            found[name] = np.array(str(error))
    return found | {"workdir": np.array(workdir.exists())}


def lateness(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """A broadcast and an all-gather in time, and the error of a barrier that the third process reaches late."""
    from bert_jax.distributed import agreement
    from bert_jax.errors import PeerError

    agreement.set_timeout(60)
    found = {"broadcast": np.array(agreement.broadcast_from_first("a word", lambda: f"from {process}"))}
    found["gathered"] = np.array(agreement.all_gather("numbers", process))
    agreement.set_timeout(5)
    if process == 2:
        time.sleep(7)  # the others wait for 5 s
    try:
        agreement.barrier("a barrier")
    except PeerError as error:
        found["error"] = np.array(str(error))
    return found


JOBS = {1: (stream, losses), 2: (stream, losses, refusals), 4: (stream, losses, lateness)}
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
