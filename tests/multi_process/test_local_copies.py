"""Four processes with local copies: one is killed, one loses its host with its disk; few steps are lost."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from bert_jax.config import MeshConfig
from bert_jax.training.run_directory.local_copies import NAME
from bert_jax.training.run_directory.workdir import read_config
from tests.multi_process.commands import STEPS, Job, lines
from tests.runs import assert_same_arrays, final_state

pytestmark = pytest.mark.slow
EVERY = 4
MESH = ["--mesh.data", "1", "--mesh.fsdp", "8"]
SHAPE = {"processes": 4, "devices": 2, "checkpoint_every": 1000}


def flags(local: Path) -> dict[int, list[str]]:
    more = [*MESH, "--checkpoint.local-directory", str(local), "--checkpoint.local-every", str(EVERY)]
    return dict.fromkeys(range(4), more)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, corpora) -> Path:
    """Work directory of an undisturbed run of four processes, whose two devices have an eighth of the state each."""
    workdir = tmp_path_factory.mktemp("sharded") / "run"
    for code, _, stderr in Job(corpora[0], workdir, **SHAPE, extra=dict.fromkeys(range(4), MESH)).end():
        assert code == 0, stderr[-3000:]
    return workdir


def copies(directory: Path) -> dict[str, set[str]]:
    """By process, the layouts of the copies in its folder."""
    found: dict[str, set[str]] = {}
    for file in directory.glob("*/process_*/*"):
        if match := NAME.fullmatch(file.name):
            found.setdefault(file.parent.name, set()).add(match[2])
    return found


def steps_of_starts(workdir: Path) -> list[list[int]]:
    """The steps that each start has in goodput.jsonl."""
    entries = [json.loads(line) for line in (workdir / "goodput.jsonl").read_text().splitlines()]
    groups = itertools.groupby(entries, key=lambda entry: entry["start_time"])
    return [[entry["step"] for entry in group] for _, group in groups]


def assert_equal_runs(workdir: Path, expected: Path) -> None:
    """Equal metrics and final states, bit for bit."""
    assert lines(workdir) == lines(expected)
    config = dataclasses.replace(read_config(expected), mesh=MeshConfig())
    (state, metadata), (wanted, wanted_metadata) = (final_state(one, config) for one in (workdir, expected))
    assert metadata == wanted_metadata and metadata["cursor"]["step"] == STEPS
    assert_same_arrays(state, wanted)


def step_continued_from(stderr: str) -> int:
    return int(re.search("continuing from step ([0-9]+)", stderr)[1])


def test_a_killed_process_costs_a_few_steps(tmp_path, corpora, sharded):
    """There is no checkpoint: the run starts again in place from its local copies."""
    workdir, local = tmp_path / "run", tmp_path / "local"
    job = Job(corpora[0], workdir, **SHAPE, extra=flags(local))
    job.wait_for(30)
    job.kill_child(2)
    results = job.end()
    assert [code for code, _, _ in results] == [0] * 4, results[0][2][-3000:]
    first, second = steps_of_starts(workdir)
    continued = step_continued_from(results[0][2])
    assert second[0] == continued and continued % EVERY == 0
    assert max(first) - 2 * EVERY <= continued <= max(first), "at most the copy that was being written is lost"
    assert not copies(local)
    assert_equal_runs(workdir, sharded)


def test_a_lost_host_costs_a_few_steps(tmp_path, corpora, sharded, separate_mount):
    """Process 1 has a disk of its own, which is lost with it; processes 0, 2 and 3 share one. Its copy is with 0."""
    workdir, local = tmp_path / "run", tmp_path / "local"
    local.mkdir()
    start = {**SHAPE, "extra": flags(local), "interpreters": {1: separate_mount(local)}}
    job = Job(corpora[0], workdir, **start)
    job.wait_for(30)
    job.supervisors[1].kill()
    results = job.end()
    assert [code for code, _, _ in results] == [75, -9, 75, 75], results[0][2][-3000:]
    kept = copies(local)
    assert kept.keys() == {"process_0", "process_2", "process_3"} and len(kept["process_0"]) == 2
    (first,) = steps_of_starts(workdir)
    results = Job(corpora[0], workdir, **start).end()
    assert [code for code, _, _ in results] == [0] * 4, results[0][2][-3000:]
    continued = step_continued_from(results[0][2])
    assert continued % EVERY == 0 and max(first) - 2 * EVERY <= continued <= max(first)
    assert_equal_runs(workdir, sharded)
