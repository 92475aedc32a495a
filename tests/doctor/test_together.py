"""`bert-jax doctor` in several processes (threads here): their reports, the findings of process 0, and the devices of a
run."""

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax.data.mixture import CorpusWeight
from bert_jax.distributed import shared_directory
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.doctor import machine_checks, storage_checks
from bert_jax.doctor.doctor import DoctorOptions, run_doctor
from bert_jax.errors import UserError
from tests.distributed.peers import free_port
from tests.stores import MemoryStore, memory_store


def run_together(configs, corpora, workdirs, seconds=60.0):
    """Exit codes of all processes, and the findings that process 0 prints."""
    port, findings = free_port(), []

    def print_findings(new) -> int:
        findings.extend(new)
        return 2 if any(finding.level == "error" for finding in findings) else 0

    def one(i: int) -> int:
        info = ProcessInfo("127.0.0.1", port, i, len(configs), None)
        return run_doctor(
            configs[i], [CorpusWeight(corpora[i])], DoctorOptions(workdirs[i]), info, seconds, print_findings
        )

    with concurrent.futures.ThreadPoolExecutor(len(configs)) as pool:
        codes = list(pool.map(one, range(len(configs))))
    return codes, findings


def named(findings, name):
    return [finding for finding in findings if finding.name == name]


@pytest.mark.parametrize("exists", [False, True])
def test_processes_that_agree(tiny_config, tiny_corpus, tmp_path, exists):
    """In a new directory and in an empty one, where they see each other's probe files."""
    if exists:
        (tmp_path / "run").mkdir()
    codes, findings = run_together([tiny_config] * 2, [tiny_corpus] * 2, [tmp_path / "run"] * 2)
    assert codes == [0, 0]
    for name in ("processes", "workdir"):
        (finding,) = named(findings, name)
        assert finding.level == "ok", finding
    assert "2 process(es)" in named(findings, "workdir")[0].text
    (finding,) = named(findings, "mesh")
    assert finding.values["hosts"] == 2 and finding.values["data"] == finding.values["devices"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"] * exists


def test_differences_are_named_and_the_other_checks_still_run(tiny_config, tiny_corpus, tmp_path, monkeypatch):
    """Another seed, and a corpus that process 1 does not see."""
    monkeypatch.setattr(shared_directory, "VISIBILITY_TIMEOUT_SECONDS", 0.1)
    other = dataclasses.replace(tiny_config, seed=1)
    codes, findings = run_together([tiny_config, other], [tiny_corpus, Path("/nowhere")], [tmp_path / "run"] * 2)
    assert codes == [2, 2]
    config, corpora = named(findings, "processes")
    assert config.level == "error" and "process 1 (" in config.text and "seed is 1 instead of 0" in config.text
    assert corpora.level == "error" and "process 1 (" in corpora.text and "no such corpus" in corpora.text
    assert {"rows", "rate", "mesh", "disk"} <= {finding.name for finding in findings}


def test_directories_of_two_processes(tiny_config, tiny_corpus, tmp_path, monkeypatch):
    """As with one relative path, seen from two directories."""
    monkeypatch.setattr(shared_directory, "VISIBILITY_TIMEOUT_SECONDS", 0.1)
    places = [tmp_path / name / "run" for name in "ab"]
    for place in places:
        place.parent.mkdir()
    codes, findings = run_together([tiny_config] * 2, [tiny_corpus] * 2, places)
    assert codes == [2, 2] and any("not the same directory for process 0 and process 1" in f.text for f in findings)


@pytest.mark.parametrize("index", [0, 1])
def test_missing_processes_are_named(tiny_config, tiny_corpus, index):
    info = ProcessInfo("127.0.0.1", free_port(), index, 2, None)
    words = ["process 1 of 2 did not connect", "process 1 of 2 could not join process 0"][index]
    with pytest.raises(UserError, match=f"{words}.*: start the command in all processes"):
        run_doctor(tiny_config, [CorpusWeight(tiny_corpus)], DoctorOptions(), info, 0.3, lambda _: 0)


def test_a_probe_file_is_removed_and_creates_no_directory(tmp_path):
    for workdir in (tmp_path / "a" / "run", tmp_path):
        with storage_checks.probe_file(workdir) as probe:
            assert [path.name for path in tmp_path.iterdir()] == [probe["file"]] and not probe["error"]
        assert list(tmp_path.iterdir()) == []
    with storage_checks.probe_file(Path("/proc/run")) as probe:
        assert probe["file"] == "" and "cannot write to /proc" in probe["error"]
    (tmp_path / "file").write_text("")
    with storage_checks.probe_file(tmp_path / "file" / "run") as probe:
        assert "Not a directory" in probe["error"]


def test_the_directory_of_local_copies_is_probed(tmp_path):
    probe = storage_checks.probe_local_directory(str(tmp_path / "a"))
    assert probe["error"] == "" and probe["free"] > 0 and list(tmp_path.iterdir()) == []
    assert "cannot write to /proc" in storage_checks.probe_local_directory("/proc/a")["error"]
    assert storage_checks.probe_local_directory(None) == {"error": "", "free": 0}


def test_a_bucket_that_cannot_be_reached():
    """And one that can, in memory."""
    with storage_checks.probe_file(memory_store().parent / "nowhere" / "run") as probe:
        assert probe["file"] == "" and "there is no bucket 'nowhere'" in probe["error"]
    with storage_checks.probe_file(memory_store() / "run") as probe:
        assert probe["error"] == "" and any(name.endswith(probe["file"]) for name in MemoryStore.objects)
    assert MemoryStore.objects == {}


DEVICES = {"count": 4, "kind": "chip", "slices": [0], "memory": 16.0, "most_memory": None, "reports_memory": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, None, None), (8, 2, 2, 16.0)),
        ((None, 3, None), (12, 3, 1, 16.0)),
        ((None, None, 32), (32, 2, 1, None)),
        ((None, 8, 32), (32, 8, 1, None)),
        (("h100:4x8", None, None), (32, 4, 4, 60e9)),
        (("h100:4x8", 32, None), (32, 32, 4, 60e9)),
    ],
)
def test_the_devices_of_a_run(options, expected):
    devices = machine_checks.resolve_devices(*options, [DEVICES, DEVICES | {"slices": [1]}])
    assert devices[:3] == expected[:3] and devices.reports_memory == (options[2] is None)
    assert devices.memory == pytest.approx(expected[3], rel=0.1) if expected[3] else devices.memory is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((None, 3, 32), "32 devices cannot be divided evenly among 3 hosts"),
        (("h100:4x8", None, 32), "give one of them"),
        (("h1000:4x8", None, None), "there is no chip 'h1000'"),
    ],
)
def test_numbers_that_contradict_each_other(options, words):
    with pytest.raises(UserError, match=words):
        machine_checks.resolve_devices(*options, [DEVICES])


@pytest.mark.slow
def test_the_command_in_two_processes(tiny_config, tiny_corpus, tmp_path):
    """Process 0 prints; both end with its exit code."""
    port, running = free_port(), []
    small = ["--model.vocab-size", "120", "--phases.0.steps", "5", "--phases.0.batch-size", "8"]
    for i in range(2):
        where = ["--cluster.coordinator", f"127.0.0.1:{port}", "--cluster.processes", "2", "--cluster.process", str(i)]
        command = [sys.executable, "-m", "bert_jax", "doctor", "bert_tiny", "--corpus", str(tiny_corpus), "--json"]
        command += [*small, "--workdir", str(tmp_path / "run"), *where]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    (told, nothing) = (process.communicate(timeout=120)[0] for process in running)
    assert [process.returncode for process in running] == [0, 0] and nothing == ""
    (line,) = [line for line in json.loads(told) if line["name"] == "processes"]
    assert "2 processes on 1 host(s) agree" in line["text"]
