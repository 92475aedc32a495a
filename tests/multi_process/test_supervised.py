"""Real runs of several processes: one dies, one is told to stop."""

import shutil
import subprocess
import sys

import pytest

from tests.multi_process.commands import STEPS, Job, lines

pytestmark = pytest.mark.slow


def test_one_process_writes_and_logs(tmp_path, corpora, undisturbed):
    steps = [line["step"] for line in undisturbed if line["split"] == "train"]
    assert steps == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory, corpora):
    """What was said at each start of a run whose second process is killed, told to stop, and whose first is killed."""
    workdir, said = tmp_path_factory.mktemp("disturbed") / "run", {}
    job = Job(corpora[0], workdir, 2)
    job.wait_for(22)
    job.kill_child(1)
    said["killed"] = job.end()
    job = Job(corpora[0], workdir, 2)
    job.wait_until_ready()  # nobody has asked yet whether to stop
    job.supervisors[1].terminate()
    said["stopped"] = job.end()
    job = Job(corpora[0], workdir, 2)
    job.wait_for(52)
    job.kill_child(0)
    said["first killed"] = job.end()
    said["finished"] = Job(corpora[0], workdir, 2).end()
    return said | {"lines": lines(workdir)}


@pytest.mark.parametrize("start, victim", [("killed", 1), ("first killed", 0)])
def test_who_was_killed_is_named_by_both(disturbed, start, victim):
    for process, (code, _, said) in enumerate(disturbed[start]):
        assert code == 75, said[-3000:]
        last = said.strip().splitlines()[-1]
        assert last.startswith(f"error: process {victim} of 2 (") and "was killed by SIGKILL" in last
        assert f"process {process} (" in last and "the same command continues from the newest checkpoint" in last


def test_sigterm_to_one_stops_both_behind_the_same_update(disturbed):
    (first, out, _), (second, other, _) = disturbed["stopped"]
    assert first == second == 75
    assert not other.strip()
    assert int(out.partition("stopped and saved at update ")[2].split()[0]) < STEPS


def test_only_the_first_process_speaks(disturbed):
    (_, out, said), (_, other_out, other_said) = disturbed["finished"]
    assert "finished" in out and "continuing from step" in said and "pretraining:" in said
    assert not other_out.strip() and "continuing" not in other_said and "pretraining:" not in other_said


def test_restarts_change_nothing(disturbed, undisturbed):
    assert [code for code, _, _ in disturbed["finished"]] == [0, 0]
    assert disturbed["lines"] == undisturbed


def test_another_command_is_refused_before_anything_starts(tmp_path, corpora):
    found = Job(corpora[0], tmp_path / "run", 2, extra={1: ["--seed", "1"]}).end()
    for code, _, said in found:
        assert code == 2 and "process 1 (" in said and "another config" in said and "seed is 1, there 0" in said
    assert not (tmp_path / "run").exists()


@pytest.fixture
def elsewhere(tmp_path):
    """Makes an interpreter for which a directory is another one, an empty one: a host with disks of its own."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this user may make no mount of its own")

    def make(directory) -> str:
        script = tmp_path / "python"
        mounts = f'mount -t tmpfs none {directory} && exec "$0" "$@"'
        script.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{mounts}' {sys.executable} \"$@\"\n")
        script.chmod(0o755)
        return str(script)

    return make


def test_a_directory_of_each_host_is_refused(tmp_path, corpora, elsewhere):
    workdir = tmp_path / "run"
    workdir.mkdir()
    found = Job(corpora[0], workdir, 2, interpreters={1: elsewhere(workdir)}).end()
    assert [code for code, _, _ in found] == [2, 2], found
    assert "is not the same directory on all hosts" in found[1][2]
    assert not list(workdir.glob("mark-*"))


def test_what_one_process_cannot_do_ends_all(tmp_path, corpora, elsewhere):
    """It alone knows; the others wait for it somewhere else. jax's own limit, 300 s, is longer than a job here has."""
    corpus = tmp_path / "corpus"
    shutil.copytree(corpora[0], corpus)
    found = Job(corpus, tmp_path / "run", 2, interpreters={1: elsewhere(corpus)}).end()
    assert [code for code, _, _ in found] == [2, 2]
    assert "error: " in found[1][2] and str(corpus) in found[1][2]
    assert "process 1 of 2 (" in found[0][2] and "ended with exit code 2" in found[0][2]
