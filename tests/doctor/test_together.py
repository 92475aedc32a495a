"""`bert-jax doctor` in several processes, here threads: what each brings, what process 0 says; and what devices it
takes a run to have."""

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath

from bert_jax.data.mixture_spec import Part
from bert_jax.distributed.cluster_detection import Seat
from bert_jax.distributed.rendezvous import visit, welcome
from bert_jax.doctor import machine, shared_storage_probe, storage_checks
from bert_jax.doctor.doctor import DoctorOptions, run_doctor
from bert_jax.errors import UserError
from tests.distributed.test_supervisor import free_port
from tests.stores import MemoryStore, memory_store


def together(configs, corpora, workdirs, seconds=60.0):
    """Exit codes of all processes, and the lines that process 0 said."""
    port, said = free_port(), []

    def tell(lines) -> int:
        said.extend(lines)
        return 2 if any(line.level == "error" for line in said) else 0

    def one(i: int) -> int:
        seat = Seat("127.0.0.1", port, i, len(configs), None)
        return run_doctor(configs[i], [Part(corpora[i])], DoctorOptions(workdirs[i]), seat, seconds, tell)

    with concurrent.futures.ThreadPoolExecutor(len(configs)) as pool:
        codes = list(pool.map(one, range(len(configs))))
    return codes, said


def named(lines, name):
    return [line for line in lines if line.name == name]


@pytest.mark.parametrize("there", [False, True])
def test_processes_that_agree(tiny_config, tiny_corpus, tmp_path, there):
    """In a directory that is to be made, and in an empty one, where they see each other's marks."""
    if there:
        (tmp_path / "run").mkdir()
    codes, said = together([tiny_config] * 2, [tiny_corpus] * 2, [tmp_path / "run"] * 2)
    assert codes == [0, 0]
    for name in ("processes", "same-data", "clock", "workdir"):
        (line,) = named(said, name)
        assert line.level == "ok", line
    assert "2 process(es)" in named(said, "workdir")[0].text
    (line,) = named(said, "mesh")
    assert line.values["hosts"] == 2 and line.values["data"] == line.values["devices"]
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"] * there


def test_differences_are_named_and_the_rest_is_still_looked_at(tiny_config, tiny_corpus, tmp_path, monkeypatch):
    """Another seed, and a corpus that process 1 does not see."""
    monkeypatch.setattr(storage_checks, "VISIBILITY_TIMEOUT_SECONDS", 0.1)
    other = dataclasses.replace(tiny_config, seed=1)
    codes, said = together([tiny_config, other], [tiny_corpus, Path("/nowhere")], [tmp_path / "run"] * 2)
    assert codes == [2, 2]
    (line,) = named(said, "processes")
    assert line.level == "error" and "process 1 (" in line.text and "seed is 1, there 0" in line.text
    (line,) = named(said, "same-data")
    assert line.level == "error" and "process 1 (" in line.text and "no such corpus" in line.text
    assert {"rows", "rate", "mesh", "disk", "clock"} <= {line.name for line in said}


def test_a_work_directory_that_one_process_cannot_write(tiny_config, tiny_corpus, tmp_path):
    codes, said = together([tiny_config] * 2, [tiny_corpus] * 2, [tmp_path / "run", Path("/proc/run")])
    assert codes == [2, 2]
    (line,) = named(said, "workdir")
    assert line.level == "error" and "process 1 (" in line.text and "cannot write to /proc" in line.text


def test_who_does_not_come_is_named(tiny_config, tiny_corpus):
    seat, said = Seat("127.0.0.1", free_port(), 0, 2, None), []
    code = run_doctor(
        tiny_config, [Part(tiny_corpus)], DoctorOptions(), seat, 0.3, lambda lines: said.extend(lines) or 2
    )
    (line,) = said
    assert code == 2 and line.level == "error" and "process 1 of 2 did not come" in line.text
    with pytest.raises(UserError, match="process 0 of 2 cannot be reached"):
        run_doctor(tiny_config, [Part(tiny_corpus)], DoctorOptions(), seat._replace(process=1), 0.3, lambda lines: 0)


def test_clocks_are_compared_when_reports_come(monkeypatch):
    """Not when they were made: a process may have waited for the others since."""
    report = {"host": "h", "config": {}, "code": {}, "versions": {}, "environment": {}}
    seat = Seat("127.0.0.1", free_port(), 0, 2, None)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        guest = pool.submit(visit, seat._replace(process=1), report, 30.0)
        meeting, reports = welcome(seat, report, 30.0)
        meeting.say(go=7)
        theirs, number = guest.result()
    meeting.close()
    theirs.close()
    assert number == 7 and reports[0]["ahead"] == 0.0 and abs(reports[1]["ahead"]) < 2


def test_a_mark_is_taken_away_and_makes_no_directory(tmp_path):
    for workdir in (tmp_path / "a" / "run", tmp_path):
        with shared_storage_probe.probe_file(workdir) as probe:
            assert Path(probe.file).parent == tmp_path and not probe.error
            assert [str(path) for path in tmp_path.iterdir()] == [probe.file]
        assert list(tmp_path.iterdir()) == []
    with shared_storage_probe.probe_file(Path("/proc/run")) as probe:
        assert probe.file == "" and "cannot write to /proc" in probe.error
    (tmp_path / "file").write_text("")
    with shared_storage_probe.probe_file(tmp_path / "file" / "run") as probe:
        assert "Not a directory" in probe.error


def test_a_bucket_that_cannot_be_reached():
    """And one that can, in memory."""
    with shared_storage_probe.probe_file(memory_store().parent / "nowhere" / "run") as probe:
        assert probe.file == "" and "there is no bucket 'nowhere'" in probe.error
    with shared_storage_probe.probe_file(memory_store() / "run") as probe:
        assert probe.error == "" and epath.Path(probe.file).exists()
    assert MemoryStore.objects == {}


SEEN = {"count": 4, "kind": "chip", "slices": [0], "memory": 16.0, "reports_memory": True}


@pytest.mark.parametrize(
    ("wishes", "found"),
    [
        ((None, None, None), (8, 2, 2, 16.0)),
        ((None, 3, None), (12, 3, 1, 16.0)),
        ((None, None, 32), (32, 2, 1, None)),
        ((None, 8, 32), (32, 8, 1, None)),
        (("h100:4x8", None, None), (32, 4, 4, 60e9)),
        (("h100:4x8", 32, None), (32, 32, 4, 60e9)),
    ],
)
def test_the_devices_of_a_run(wishes, found):
    devices = machine.resolve_devices(*wishes, [SEEN, SEEN | {"slices": [1]}])
    assert devices[:3] == found[:3] and devices.reports_memory == (wishes[2] is None)
    assert devices.memory == pytest.approx(found[3], rel=0.1) if found[3] else devices.memory is None


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ((None, 3, 32), "32 devices cannot be divided evenly among 3 hosts"),
        ((None, 0, None), "--hosts is 0"),
        (("h100:4x8", None, 32), "give one of them"),
        (("h1000:4x8", None, None), "there is no chip 'h1000'"),
    ],
)
def test_numbers_that_contradict_each_other(wishes, words):
    with pytest.raises(UserError, match=words):
        machine.resolve_devices(*wishes, [SEEN])


def test_devices_are_counted(monkeypatch):
    own = machine.describe_local_devices(None)
    assert own["count"] >= 1 and own["kind"] == "cpu" and own["slices"] == [0] and own["memory"] > 2**20


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
