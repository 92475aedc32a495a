"""Supervisors of several processes, with children that only sleep, fail or end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bert_jax.distributed import connection
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.rendezvous import open_rendezvous
from bert_jax.distributed.supervisor import _forward_signals
from bert_jax.errors import PeerError

ROOT = Path(__file__).parents[2]
SAME = {"config": {"steps": 3}, "code": {"hash": "a"}, "versions": {"jax": "1"}, "environment": {}}
SLEEP = "time.sleep(60)"
DONE = "announce_exit(0)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def test_all_end_in_order():
    assert end(start(dict.fromkeys(range(3), DONE), 3)) == dict.fromkeys(range(3), (0, ""))


def test_a_process_that_ends_in_order_does_not_end_the_others():
    results = end(start({0: "time.sleep(1); announce_exit(75)", 1: "announce_exit(75)"}, 2))
    assert results == dict.fromkeys(range(2), (75, ""))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_by_all(victim):
    dies = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    results = end(start({i: dies if i == victim else SLEEP for i in range(3)}, 3))
    for process, (code, stderr) in results.items():
        assert code == 75
        assert stderr == (
            f"error: process {victim} of 3 (host{victim}) was killed by SIGKILL; process {process} (host{process}) "
            "stops: the same command continues from the newest checkpoint"
        )


def test_a_consequential_failure_is_not_named():
    # As with collective libraries: the others abort before any supervisor learns of the first failure.
    aborts = "time.sleep(0.5); os.abort()"
    results = end(start({0: aborts, 1: "time.sleep(0.9); os.kill(os.getpid(), signal.SIGKILL)", 2: aborts}, 3))
    assert all("process 1 of 3 (host1) was killed by SIGKILL" in stderr for _, stderr in results.values()), results
    assert {code for code, _ in results.values()} == {75}


def test_a_users_mistake_in_one_process_gives_code_2_in_all():
    results = end(start({0: SLEEP, 1: "print('error: no disk', file=sys.stderr); sys.exit(2)"}, 2))
    assert results[1] == (2, "error: no disk")
    assert results[0][0] == 2 and "process 1 of 2 (host1) ended with exit code 2" in results[0][1]
    assert "see its error message" in results[0][1]


def test_a_bug_in_one_process_gives_code_1_in_all():
    results = end(start({0: "raise RuntimeError('bug')", 1: SLEEP}, 2))
    assert results[0][0] == results[1][0] == 1
    assert "bug" in results[0][1] and "process 0 of 2 (host0) ended with exit code 1" in results[1][1]


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


@pytest.mark.parametrize("present, absent", [((0, 2), "process 1 "), ((0,), "processes 1, 2 ")])
def test_a_process_that_does_not_connect_is_named(present, absent):
    results = end(start(dict.fromkeys(present, DONE), 3, timeout=2))
    for code, stderr in results.values():
        assert code == 75 and f"peer: {absent}of 3 did not connect to 127.0.0.1 within 2 s" in stderr


def test_process_0_is_missing():
    (code, stderr) = end(start({1: DONE}, 2, timeout=2))[1]
    assert code == 75 and "peer: process 0 of 2 cannot be reached at 127.0.0.1:" in stderr


@pytest.mark.parametrize(
    "section, values, shown",
    [
        ("config", {"steps": 4}, "steps is 4 instead of 3"),
        ("code", {"hash": "b"}, "hash is b instead of a"),
        ("versions", {"jax": "2"}, "jax is 2 instead of 1"),
        ("environment", {"XLA_FLAGS": "-x"}, "XLA_FLAGS is -x instead of None"),
    ],
)
def test_no_child_is_started_when_reports_differ(section, values, shown, tmp_path):
    child = f"open({str(tmp_path / 'started')!r}, 'w'); announce_exit(0)"
    results = end(start(dict.fromkeys(range(3), child), 3, {2: {section: values}}))
    for code, stderr in results.values():
        assert code == 2 and f"process 2 (host2) differs from process 0 (host0) in its {section}: {shown}" in stderr
    assert not (tmp_path / "started").exists()


def test_a_port_in_use_is_a_users_mistake():
    running = start({0: DONE}, 2)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        words = [0, 2, taken.getsockname()[1], json.dumps(SAME | {"host": "h"}), 5, DONE]
        command = [sys.executable, "-m", "tests.distributed.peers", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2 and "cannot listen on port" in done.stderr
    running[0].kill()
    running[0].communicate()


def test_sigterm_reaches_the_child(tmp_path):
    child = f"signal.signal(signal.SIGTERM, lambda *_: announce_exit(75)); {write_pid(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_pids(tmp_path, 2)
    for supervisor in running.values():
        supervisor.terminate()
    assert {code for code, _ in end(running).values()} == {75}


def test_ctrl_c_reaches_the_child_once_as_sigterm(tmp_path):
    """A terminal sends it to the whole process group. Only the interrupted process exits with 130."""
    child = f"signal.signal(signal.SIGTERM, lambda *_: announce_exit(75)); {write_pid(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_pids(tmp_path, 2)
    os.killpg(running[0].pid, signal.SIGINT)
    running[1].terminate()
    saving = "Ctrl-C: saving after this step; a second Ctrl-C stops at once without saving"
    assert end(running) == {0: (130, saving), 1: (75, "")}


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _forward_signals([]) as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert interrupts == []
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_missing_heartbeats_are_detected(monkeypatch):
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    own_end, other_end = socket.socketpair()
    with own_end, other_end:
        assert connection.Connection(own_end, timeout=0.2).receive() is None


def test_heartbeats_are_not_received_as_messages(monkeypatch):
    monkeypatch.setattr(connection, "HEARTBEAT_SECONDS", 0.05)
    one, other = (connection.Connection(sock, timeout=1) for sock in socket.socketpair())
    time.sleep(0.3)
    one.send(word=1)
    assert other.receive() == {"word": 1}
    one.close()
    assert other.receive() is None
    other.close()


def test_clients_that_are_not_processes_of_the_run_are_refused():
    port = free_port()
    info = ProcessInfo("127.0.0.1", port, 0, 2, None)
    script = (
        "import socket, time; time.sleep(0.5)\n"
        f"with socket.create_connection(('127.0.0.1', {port})) as sock: sock.sendall(b'hello\\n'); sock.recv(9)"
    )
    client = subprocess.Popen([sys.executable, "-c", script])
    with pytest.raises(PeerError, match="process 1 of 2 did not connect"):
        open_rendezvous(info, SAME | {"host": "h"}, 3)
    client.wait()
