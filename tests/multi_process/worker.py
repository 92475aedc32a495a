"""One of several processes that are one run; writes what it read, or what it computed, to OUT/PROCESS.npz.

Usage: worker.py JOB PROCESS PROCESSES PORT OUT CORPUS...: see launch.py. Reader processes run this file too, as
multiprocessing starts them: that is why what is changed here is changed on import.
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
    DEVICES,
    LOSSES,
    PREFETCH,
    READER_PROCESSES,
    STREAMS,
    STRETCH_TOKENS,
    UPDATES,
    WINDOW_STRETCHES,
)

epoch_plan.STRETCH_TOKENS, epoch_plan.WINDOW_STRETCHES = STRETCH_TOKENS, WINDOW_STRETCHES
PREPARED = ("input_ids", "target_positions", "target_labels", "target_weights")
FEW = 4
"""Updates whose records are noted."""


def open_task(config, parts):
    from bert_jax.data.mixture_spec import Part
    from bert_jax.training import pretraining

    return pretraining.open_task(config, [Part(Path(part)) for part in parts])


def read_stream(task) -> dict[str, np.ndarray]:
    """Rows of all updates, and what masking makes of them."""
    import jax

    from bert_jax.data.cursor import Cursor

    prepare = jax.jit(lambda rows: task.prepare(rows, evaluating=False))
    found = {}
    with contextlib.closing(task.batches(Cursor())) as batches:
        for update, (rows, size, following) in enumerate(batches):
            masked = jax.device_get(prepare(rows))
            found |= {f"{update}/{name}": array for name, array in rows.items()}
            found |= {f"{update}/masked/{name}": masked[name] for name in PREPARED}
            found[f"{update}/size"] = np.array(size)
            found[f"{update}/following"] = np.array(str(following))
    assert update == UPDATES - 1, update
    return found


def records_of_few(task) -> list[int]:
    """Records that this process reads for the first updates."""
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
    """All cases, and with several processes one in which each of them reads everything."""
    from bert_jax.data.batches import Stream

    found = {}
    for name, config in STREAMS.items():
        readers = READER_PROCESSES[processes] if name == "mixture" else 0
        data = dataclasses.replace(config.data, prefetch=PREFETCH[processes], reader_processes=readers)
        task = open_task(dataclasses.replace(config, data=data), corpora if name == "mixture" else corpora[:1])
        assert task.train.place == (process, processes)
        if name == "doc_sentences":
            found[f"{name}/records"] = np.array(records_of_few(task))
            if processes == 2:
                everything = Stream([task.train.corpora[0].corpus], [1.0], task.config, task.train.marks, 0, 1)
                wrong = dataclasses.replace(task, train=everything)
                found |= {f"unshared/{key}": value for key, value in read_stream(wrong).items()}
        found[f"{name}/windows"] = np.array([rows.plan(48).windows for rows in task.train.corpora])
        found |= {f"{name}/{key}": value for key, value in read_stream(task).items()}
    return found


def losses(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """20 updates, held-out metrics before and after them, and this process's held-out rows."""
    phases = (dataclasses.replace(LOSSES.phases[0], accumulation=ACCUMULATION[processes]),)
    task = open_task(dataclasses.replace(LOSSES, phases=phases), corpora[:1])
    assert task.train.place == (process, processes)
    found = train(task, ACCUMULATION[processes])
    settings, seq_len = task.config.evaluation, task.config.phases[-1].seq_len
    for i, (_, rows) in enumerate(task.validation.batches(seq_len, settings.rows, settings.batch_size)):
        found |= {f"held_out/{i}/{key}": value for key, value in rows.items()}
    return found


def train(task, accumulation: int) -> dict[str, np.ndarray]:
    """The loop without its log and its checkpoints."""
    import jax

    from bert_jax.data.cursor import Cursor
    from bert_jax.training.compiled_steps import make_evaluator
    from bert_jax.training.loop import checked_mesh
    from bert_jax.training.optimizers.schedules import learning_rate_at
    from bert_jax.training.param_paths import name_leaves
    from bert_jax.training.sharding import put_rows
    from bert_jax.training.state import init_state
    from bert_jax.training.step import make_train_step, put_step_inputs

    mesh = checked_mesh(task)
    state, step = init_state(task, mesh), make_train_step(task, mesh, accumulation)
    evaluate = make_evaluator(task, mesh)
    found = {f"before/{name}": np.array(value) for name, value in evaluate(state.params).items()}
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
    return found | {f"after/{name}": np.array(value) for name, value in evaluate(state.params).items()}


def refusals(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """What each process says of a corpus with one bad shard, and of a mesh that leaves processes without rows."""
    from bert_jax.config import MeshConfig
    from bert_jax.data.mixture_spec import Part
    from bert_jax.errors import UserError
    from bert_jax.training import pretraining

    damaged, intact = (Path(corpus) for corpus in corpora)
    workdir = damaged.parent / "run"
    meshes = {"shard": (damaged, MeshConfig()), "mesh": (intact, MeshConfig(data=1, fsdp=1, tensor=processes))}
    found = {}
    for name, (corpus, mesh) in meshes.items():
        try:
            pretraining.pretrain(dataclasses.replace(LOSSES, mesh=mesh), [Part(corpus)], workdir)
        except UserError as error:
            found[name] = np.array(str(error))
    return found | {"workdir": np.array(workdir.exists())}


def lateness(process: int, processes: int, corpora: list[str]) -> dict[str, np.ndarray]:
    """What is said where all meet, and the third process comes late; and where all are in time."""
    from bert_jax.distributed import agreement
    from bert_jax.errors import PeerError

    agreement.wait_at_most(60)
    found = {"told": np.array(agreement.tell("a word", lambda: f"from {process}"))}
    found["gathered"] = np.array(agreement.gather("numbers", process))
    agreement.wait_at_most(2)
    if process == 2:
        time.sleep(5)
    try:
        agreement.meet("the corner")
    except PeerError as error:
        found["said"] = np.array(str(error))
    return found


def main(job: str, process: int, processes: int, port: int, out: Path, corpora: list[str]) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES[processes])
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, initialization_timeout=60)
    jax.config.update("jax_disable_most_optimizations", True)  # less than half the time to compile
    assert jax.process_count() == processes and len(jax.local_devices()) == DEVICES[processes]
    found = {"stream": stream, "losses": losses, "refusals": refusals, "lateness": lateness}[job](
        process, processes, corpora
    )
    np.savez(out / f"{process}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5]), sys.argv[6:])
