"""Supervisors of several processes, with children that only sleep, fail or end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.connections import PeerEvent, Peers
from bert_jax.distributed.monitor import Monitor, ProcessFailure
from bert_jax.distributed.process_report import COMPARED_SECTIONS, report_differences
from tests.distributed.peers import free_port

ROOT = Path(__file__).parents[2]
SAME = {"config": {"steps": 3}, "code": {"hash": "a"}, "versions": {"jax": "1"}, "environment": {}}
SLEEP = "time.sleep(60)"
DONE = "announce_exit(0)"


def start(children: dict[int, str], processes: int, reports: dict[int, dict] | None = None, timeout: float = 60):
    """Start the supervisors of some processes with these children."""
    port, running = free_port(), {}
    for process, child in children.items():
        report = SAME | {"host": f"host{process}"} | (reports or {}).get(process, {})
        words = [process, processes, port, json.dumps(report), timeout, child]
        command = [sys.executable, "-m", "tests.distributed.peers", *map(str, words)]
        running[process] = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
        )
    return running


def end(running) -> dict[int, tuple[int, str]]:
    """Exit code and stderr of each process."""
    results = {}
    for process, supervisor in running.items():
        _, stderr = supervisor.communicate(timeout=60)
        results[process] = supervisor.returncode, stderr.strip()
    return results


def write_pid(directory: Path) -> str:
    """Code with which a child writes its process id into a file named by its process index."""
    return f"open({str(directory)!r} + '/' + str(process_index), 'w').write(str(os.getpid()))"


def wait_for_pids(directory: Path, count: int) -> None:
    files = [directory / str(i) for i in range(count)]
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, "children did not start"
        time.sleep(0.05)


def test_processes_that_end_in_order_do_not_end_the_others():
    """Whatever their exit code."""
    results = end(start({0: "time.sleep(0.5); announce_exit(75)", 1: "announce_exit(0)", 2: DONE}, 3))
    assert results == {0: (75, ""), 1: (0, ""), 2: (0, "")}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_process_that_is_killed_again_after_a_restart_is_named_by_all(victim):
    dies = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    results = end(start({i: dies if i == victim else SLEEP for i in range(3)}, 3))
    killed = f"process {victim} of 3 (host{victim}) was killed by SIGKILL; "
    for process, (code, stderr) in results.items():
        own = f"process {process} (host{process}) "
        assert code == 75
        assert stderr.splitlines() == [
            f"warning: {killed}{own}starts again, from the newest checkpoint",
            f"error: {killed}{own}stops: the same command continues from the newest checkpoint",
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 0), ("sys.exit(75)", 0), ("sys.exit(1)", 1)]
)
def test_processes_are_started_once_more(failure, code, tmp_path):
    """With another port for jax, if it was taken in the meantime; a bug would repeat itself, and is not tried again."""
    first = f"path = {str(tmp_path)!r} + f'/{{process_index}}'; started = os.path.exists(path); open(path, 'w')"
    fails = f"{first}\nif started: announce_exit(0)\n{failure}"
    waits = f"{first}\nif started: announce_exit(0)\n{SLEEP}"
    results = end(start({0: waits, 1: fails, 2: waits}, 3))
    assert {found for found, _ in results.values()} == {code}, results
    assert ("process 0 (host0) starts again" in results[0][1]) == (code == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "code"), [((0, 1), 0), ((1,), 75)])
def test_a_checkpoint_allows_another_start(saving, code, tmp_path):
    """Process 1 is killed in its first three starts; each of the processes must have saved in between."""
    count = (
        f"path = {str(tmp_path)!r} + f'/{{process_index}}'; open(path, 'a').write('+')\nstarts = len(open(path).read())"
    )
    saves = f"if process_index in {saving}: link.send(b'+')\nif starts == 4: announce_exit(0)\ntime.sleep(0.5)"
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    results = end(start({i: "\n".join([count, saves, (SLEEP, killed)[i]]) for i in range(2)}, 2))
    assert {found for found, _ in results.values()} == {code}, results
    starts = 4 if code == 0 else 2
    assert [len((tmp_path / str(i)).read_text()) for i in range(2)] == [starts] * 2
    assert results[0][1].count("process 0 (host0) starts again, from the newest checkpoint") == starts - 1


CONSEQUENCE = """
E1124 03:38:04.205438   13668 coordination_service_agent.cc:289] Polled an error from coordination service.
F1124 03:38:04.205449   13668 client.h:80] Terminating process because the JAX distributed service failed
Additional GRPC error information from remote target coordination_service:
*** Check failure stack trace: ***
    @     0x7f7090858634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
""".strip()
"""What jax writes when a peer ends."""
OTHER = "W1124 03:38:05.123456   13668 slow_operation_alarm.cc:73] a program is compiled for more than 2 minutes"


@pytest.mark.slow
@pytest.mark.parametrize("recovers", [True, False])
def test_what_the_runtime_writes_about_peers_is_shown_if_the_run_fails(recovers, tmp_path):
    """Other lines are never held back, and neither are those of the process that failed first."""
    writes = f"print({CONSEQUENCE!r}, file=sys.stderr); print({OTHER!r}, file=sys.stderr, flush=True)"
    path = f"path = {str(tmp_path)!r} + f'/{{process_index}}'; started = os.path.exists(path); open(path, 'w')"
    again = f"if started: {DONE if recovers else 'pass'}"
    killed = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    results = end(start({i: "\n".join([path, writes, again, (SLEEP, killed)[i]]) for i in range(2)}, 2))
    assert [code for code, _ in results.values()] == ([0, 0] if recovers else [75, 75])
    first, second = (stderr for _, stderr in results.values())
    assert first.count(OTHER) == second.count(OTHER) == 2
    assert first.count(CONSEQUENCE) == (0 if recovers else 2) and second.count(CONSEQUENCE) == (1 if recovers else 2)
    assert first.splitlines()[-1].startswith(OTHER if recovers else "error: process 1 of 2 (host1) was killed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", 75, "was killed by SIGKILL"),
        ("sys.exit(1)", "sys.exit(75)", 1, "ended with exit code 1"),
    ],
)
def test_a_consequential_failure_is_not_named(first, then, code, words):
    # As with collective libraries: the others abort or raise before any supervisor learns of the first failure.
    then = f"time.sleep(0.5); {then}"
    results = end(start({0: then, 1: f"time.sleep(0.9); {first}", 2: then}, 3))
    assert all(f"process 1 of 3 (host1) {words}" in stderr for _, stderr in results.values()), results
    assert {found for found, _ in results.values()} == {code}


@pytest.mark.parametrize(
    ("code", "signals", "again"),
    [(75, [], True), (1, [], True), (2, [], False), (75, [signal.SIGTERM], False)],
)
def test_votes_for_a_restart(code, signals, again, monkeypatch, capsys):
    """Process 1 of 2, whose child ended after another was killed; process 0 announces what was decided."""
    peers, sent = Peers({}), []
    monkeypatch.setattr(peers, "send", lambda **message: sent.append(message))
    info = ProcessInfo("127.0.0.1", 1, 1, 2, None)
    monitor = Monitor(peers, info, ["host0", "host1"], signals)
    monitor.first_failure = ProcessFailure(0, -signal.SIGKILL)
    peers.events.put(PeerEvent(0, {"restart": {"port": 7 if again else None}}))
    assert monitor.agree_on_restart(code) == (7 if again else None)
    peers.close()
    assert sent == [{"vote": again}] and ("starts again" in capsys.readouterr().err) == again


@pytest.mark.parametrize(
    ("failing", "child", "code"),
    [(1, "print('error: no disk', file=sys.stderr); sys.exit(2)", 2), (0, "raise RuntimeError('error: no disk')", 1)],
)
def test_a_users_mistake_or_a_bug_in_one_process_has_the_same_code_in_all(failing, child, code):
    results = end(start({failing: child, 1 - failing: SLEEP}, 2))
    assert results[0][0] == results[1][0] == code and "error: no disk" in results[failing][1]
    shown = results[1 - failing][1]
    assert f"process {failing} of 2 (host{failing}) ended with exit code {code}" in shown
    assert "see its error message" in shown
    assert code == 1 or results[failing][1] == "error: no disk", "a user's mistake has one message"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_host_is_named(victim, tmp_path):
    running = start({i: f"{write_pid(tmp_path)}; {SLEEP}" for i in range(2)}, 2)
    wait_for_pids(tmp_path, 2)
    running[victim].kill()
    code, stderr = end({1 - victim: running[1 - victim]})[1 - victim]
    assert code == 75
    assert f"process {victim} of 2" in stderr and "is gone" in stderr
    # These children do not end with their supervisor.
    os.kill(int((tmp_path / str(victim)).read_text()), signal.SIGKILL)
    end({victim: running[victim]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("present", "message"),
    [
        ((0, 2), "process 1 of 3 did not connect to 127.0.0.1 within 1 s"),
        ((0,), "processes 1, 2 of 3 did not connect to 127.0.0.1 within 1 s"),
        ((1,), "process 1 of 3 could not join process 0 at 127.0.0.1:"),
    ],
)
def test_a_process_that_does_not_connect_is_named(present, message):
    for code, stderr in end(start(dict.fromkeys(present, DONE), 3, timeout=1)).values():
        assert code == 75 and f"peer: {message}" in stderr


def test_no_child_is_started_when_reports_differ(tmp_path):
    child = f"open({str(tmp_path / 'started')!r}, 'w'); announce_exit(0)"
    for code, stderr in end(start(dict.fromkeys(range(3), child), 3, {2: {"config": {"steps": 4}}})).values():
        assert code == 2
        assert "process 2 (host2) differs from process 0 (host0) in its config: steps is 4 instead of 3" in stderr
    assert not (tmp_path / "started").exists()


def test_all_sections_of_reports_are_compared():
    other = {"config": {"steps": 4}, "code": {"hash": "b"}, "versions": {"jax": "2"}, "environment": {"XLA_FLAGS": "x"}}
    other["corpora"] = {"/data": "c"}
    texts = report_differences([SAME | {"host": "a"}, SAME | other | {"host": "b"}])
    shown = ["steps is 4 instead of 3", "hash is b instead of a", "jax is 2 instead of 1"]
    shown += ["XLA_FLAGS is x instead of None", "/data is c instead of None"]
    for section, words, text in zip(COMPARED_SECTIONS, shown, texts, strict=True):
        assert f"process 1 (b) differs from process 0 (a) in its {section}: {words}." in text


@pytest.mark.slow
def test_ctrl_c_reaches_the_child_once_as_sigterm(tmp_path):
    """A terminal sends it to the whole process group. Only the interrupted process exits with 130."""
    child = f"signal.signal(signal.SIGTERM, lambda *_: announce_exit(75)); {write_pid(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_pids(tmp_path, 2)
    os.killpg(running[0].pid, signal.SIGINT)
    running[1].terminate()
    saving = "Ctrl-C: saving after this step; a second Ctrl-C stops at once without saving"
    assert end(running) == {0: (130, saving), 1: (75, "")}


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    child = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {write_pid(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_pids(tmp_path, 2)
    os.killpg(running[0].pid, signal.SIGINT)
    assert [running[0].stderr.readline().strip() for _ in range(2)][1].startswith("Ctrl-C: saving")
    os.killpg(running[0].pid, signal.SIGINT)
    results = end(running)
    assert {process: code for process, (code, _) in results.items()} == {0: 130, 1: 75}
    assert all("process 0 of 2 (host0) was killed by SIGKILL" in stderr for _, stderr in results.values())
