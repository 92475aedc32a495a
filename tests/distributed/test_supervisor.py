"""Supervisors of several processes, with children that do nothing but die or not."""

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
from bert_jax.distributed.cluster_detection import Seat
from bert_jax.distributed.rendezvous import open_rendezvous
from bert_jax.distributed.supervisor import _forwarding
from bert_jax.errors import PeerError

ROOT = Path(__file__).parents[2]
SAME = {"config": {"steps": 3}, "code": {"hash": "a"}, "versions": {"jax": "1"}, "environment": {}}
SLEEP = "time.sleep(60)"
DONE = "leave(0)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(children: dict[int, str], processes: int, reports: dict[int, dict] | None = None, timeout: float = 60):
    """Supervisors of some of the processes; a child may sleep, die or end."""
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
    """Exit code and message of each."""
    found = {}
    for process, supervisor in running.items():
        _, said = supervisor.communicate(timeout=60)
        found[process] = supervisor.returncode, said.strip()
    return found


def note(directory: Path) -> str:
    """Python with which a child says that it is up: its process id, in a file with its number."""
    return f"open({str(directory)!r} + '/' + str(me), 'w').write(str(os.getpid()))"


def wait_for_notes(directory: Path, count: int) -> None:
    files = [directory / str(i) for i in range(count)]
    end = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < end, "children did not start"
        time.sleep(0.05)


def test_all_end_in_order():
    assert end(start(dict.fromkeys(range(3), DONE), 3)) == dict.fromkeys(range(3), (0, ""))


def test_who_stops_in_order_takes_nobody_along():
    found = end(start({0: "time.sleep(1); leave(75)", 1: "leave(75)"}, 2))
    assert found == dict.fromkeys(range(2), (75, ""))


@pytest.mark.parametrize("victim", [0, 2])
def test_the_dead_is_named_by_all(victim):
    dies = "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)"
    found = end(start({i: dies if i == victim else SLEEP for i in range(3)}, 3))
    for process, (code, said) in found.items():
        assert code == 75
        assert said == (
            f"error: process {victim} of 3 (host{victim}) was killed by SIGKILL; process {process} (host{process}) "
            "stops: the same command continues from the newest checkpoint"
        )


def test_who_dies_of_anothers_death_is_not_blamed():
    # As collective libraries do it: the others abort before anybody has heard of the first.
    aborts = "time.sleep(0.5); os.abort()"
    found = end(start({0: aborts, 1: "time.sleep(0.9); os.kill(os.getpid(), signal.SIGKILL)", 2: aborts}, 3))
    assert all("process 1 of 3 (host1) was killed by SIGKILL" in said for _, said in found.values()), found
    assert {code for code, _ in found.values()} == {75}


def test_a_users_mistake_in_one_process_is_one_in_all():
    found = end(start({0: SLEEP, 1: "print('error: no disk', file=sys.stderr); sys.exit(2)"}, 2))
    assert found[1] == (2, "error: no disk")
    assert found[0][0] == 2 and "process 1 of 2 (host1) ended with exit code 2" in found[0][1]
    assert "its own message says why" in found[0][1]


def test_a_traceback_stays_one():
    found = end(start({0: "raise RuntimeError('bug')", 1: SLEEP}, 2))
    assert found[0][0] == found[1][0] == 1
    assert "bug" in found[0][1] and "process 0 of 2 (host0) ended with exit code 1" in found[1][1]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_is_gone_is_named(victim, tmp_path):
    running = start({i: f"{note(tmp_path)}; {SLEEP}" for i in range(2)}, 2)
    wait_for_notes(tmp_path, 2)
    running[victim].kill()
    other = end({1 - victim: running[1 - victim]})[1 - victim]
    assert other[0] == 75
    assert f"process {victim} of 2" in other[1] and "is gone" in other[1]
    os.kill(int((tmp_path / str(victim)).read_text()), signal.SIGKILL)  # these children do not look at their parent
    end({victim: running[victim]})


@pytest.mark.parametrize("present, absent", [((0, 2), "process 1 "), ((0,), "processes 1, 2 ")])
def test_who_does_not_come_is_named(present, absent):
    found = end(start(dict.fromkeys(present, DONE), 3, timeout=2))
    for code, said in found.values():
        assert code == 75 and f"gone: {absent}of 3 did not come to 127.0.0.1 within 2 s" in said


def test_the_first_process_does_not_come():
    (code, said) = end(start({1: DONE}, 2, timeout=2))[1]
    assert code == 75 and "gone: process 0 of 2 cannot be reached at 127.0.0.1:" in said


@pytest.mark.parametrize(
    "name, theirs, shown",
    [
        ("config", {"steps": 4}, "steps is 4, there 3"),
        ("code", {"hash": "b"}, "hash is b, there a"),
        ("versions", {"jax": "2"}, "jax is 2, there 1"),
        ("environment", {"XLA_FLAGS": "-x"}, "XLA_FLAGS is -x, there None"),
    ],
)
def test_no_child_is_started_when_they_differ(name, theirs, shown, tmp_path):
    child = f"open({str(tmp_path / 'started')!r}, 'w'); leave(0)"
    found = end(start(dict.fromkeys(range(3), child), 3, {2: {name: theirs}}))
    for code, said in found.values():
        assert code == 2 and f"process 2 (host2) has another {name} than process 0 (host0): {shown}" in said
    assert not (tmp_path / "started").exists()


def test_a_taken_port_is_a_users_mistake():
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
    child = f"signal.signal(signal.SIGTERM, lambda *_: leave(75)); {note(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_notes(tmp_path, 2)
    for supervisor in running.values():
        supervisor.terminate()
    assert {code for code, _ in end(running).values()} == {75}


def test_ctrl_c_reaches_the_child_once_as_sigterm(tmp_path):
    """A terminal sends it to the whole process group. Only who was interrupted says so: 130 restarts nothing."""
    child = f"signal.signal(signal.SIGTERM, lambda *_: leave(75)); {note(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_notes(tmp_path, 2)
    os.killpg(running[0].pid, signal.SIGINT)
    running[1].terminate()
    saving = "Ctrl-C: saving after this step; a second Ctrl-C stops at once without saving"
    assert end(running) == {0: (130, saving), 1: (75, "")}


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _forwarding([]) as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert interrupts == []
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    child = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {note(tmp_path)}; {SLEEP}"
    running = start({0: child, 1: child}, 2)
    wait_for_notes(tmp_path, 2)
    os.killpg(running[0].pid, signal.SIGINT)
    assert [running[0].stderr.readline().strip() for _ in range(2)][1].startswith("Ctrl-C: saving")
    os.killpg(running[0].pid, signal.SIGINT)
    found = end(running)
    assert {process: code for process, (code, _) in found.items()} == {0: 130, 1: 75}
    assert all("process 0 of 2 (host0) was killed by SIGKILL" in said for _, said in found.values())


def test_silence_is_noticed(monkeypatch):
    monkeypatch.setattr(connection, "BEAT_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert connection.Connection(ours, silence=0.2).receive() is None


def test_signs_of_life_are_no_messages(monkeypatch):
    monkeypatch.setattr(connection, "BEAT_SECONDS", 0.05)
    one, other = (connection.Connection(plug, silence=1) for plug in socket.socketpair())
    time.sleep(0.3)
    one.send(word=1)
    assert other.receive() == {"word": 1}
    one.close()
    assert other.receive() is None
    other.close()


def test_strangers_are_sent_away():
    port = free_port()
    seat = Seat("127.0.0.1", port, 0, 2, None)
    script = (
        "import socket, time; time.sleep(0.5)\n"
        f"with socket.create_connection(('127.0.0.1', {port})) as plug: plug.sendall(b'hello\\n'); plug.recv(9)"
    )
    knocking = subprocess.Popen([sys.executable, "-c", script])
    with pytest.raises(PeerError, match="process 1 of 2 did not come"):
        open_rendezvous(seat, SAME | {"host": "h"}, 3)
    knocking.wait()
