"""The meeting of the supervisors before a run, with strangers on its port."""

import contextlib
import functools
import json
import os
import socket
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.distributed import messages, rendezvous
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.connections import Connection, PeerEvent, Peers
from bert_jax.distributed.monitor import Monitor
from bert_jax.distributed.rendezvous import open_rendezvous
from bert_jax.errors import PeerError, UserError
from tests.distributed.peers import free_port

REPORT = {"host": "h", "config": {"steps": "3"}}


def process(index: int, port: int, count: int = 2, secret: str = "s") -> ProcessInfo:
    return ProcessInfo("127.0.0.1", port, index, count, None, secret)


def meet(infos, timeout: float = 20, decide=len):
    """What each process gets from the rendezvous: the result, or the error."""

    def join(info):
        try:
            peers, result = open_rendezvous(info, REPORT, timeout, decide, int)
        except (PeerError, UserError) as error:
            return error
        peers.close()
        return result

    with ThreadPoolExecutor(len(infos)) as pool:
        return list(pool.map(join, infos))


def connect(port: int) -> socket.socket:
    """A stranger, as soon as the server listens."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)


def say(*lines: bytes):
    """A stranger that sends lines and reads what comes until the end."""

    def act(port: int) -> bytes:
        with connect(port) as sock, contextlib.suppress(OSError):
            sock.sendall(b"\n".join(lines))
            sock.settimeout(60)
            return b"".join(iter(lambda: sock.recv(2**16), b""))
        return b""

    return act


def wait_silently(port: int) -> bytes:
    with connect(port) as sock:
        sock.settimeout(60)
        return b"".join(iter(lambda: sock.recv(2**16), b""))


def drip(port: int) -> bytes:
    with connect(port) as sock, contextlib.suppress(OSError):
        for _ in range(600):
            sock.sendall(b"{")
            time.sleep(0.1)
    return b""


HELLO = {"process": 1, "processes": 2, "proof": "0" * 64, "report": REPORT}
STRANGERS = {
    "no JSON": say(b"GET / HTTP/1.1", b"", b""),
    "a number": say(b"5", b""),
    "an array": say(b"[1, 2, {}]", b""),
    "other fields": say(b'{"a": 1}', b""),
    "other types": say(json.dumps(HELLO | {"process": {}, "processes": "2", "proof": 1, "report": 0}).encode(), b""),
    "deep nesting": say(b"[" * 100_000, b""),
    "a long line": say(b"a" * 2**21),
    "a process without the secret": say(json.dumps(HELLO).encode(), b""),
    "not text": say(b"\xff\xfe\n"),
    "half a character": say(json.dumps(HELLO | {"proof": "\ud800"}).encode(), b""),
    "a report of another form": say(json.dumps(HELLO | {"report": {"host": 1}}).encode(), b""),
    "numbers without bounds": say(b'{"process": 1e999, "processes": NaN, "proof": "0", "report": {"host": "h"}}', b""),
    "many digits": say(b'{"process": ' + b"9" * 10_000 + b"}", b""),
    "many messages": say(b"{}\n" * 100_000),
    "silence": wait_silently,
    "a byte at a time": drip,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_neither_delay_the_start_nor_take_a_seat(stranger, monkeypatch):
    """A second process comes a moment after the stranger, and takes the seat."""
    monkeypatch.setattr(rendezvous, "HELLO_TIMEOUT_SECONDS", 60)
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        server = pool.submit(meet, [process(0, port)])
        answer = pool.submit(STRANGERS[stranger], port)
        time.sleep(0.3)
        assert not server.done()
        start = time.monotonic()
        assert meet([process(1, port)]) == [2] and server.result() == [2]
        assert time.monotonic() - start < 20
        assert b"result" not in answer.result()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["host", "port", "config"]), inner),
    max_leaves=6,
)
FIELDS = [*typing.get_type_hints(messages._Message), "result"]


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4) | values, st.binary(max_size=20))
@settings(
    max_examples=int(os.environ.get("BERT_JAX_FUZZ_EXAMPLES", "200")),
    derandomize="BERT_JAX_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
)
def test_any_line_is_a_message_that_all_its_readers_take_or_none(value, noise):
    """Readers: the rendezvous, and the monitor of a run, which is connected to strangers if there is no secret."""
    assert messages.parse_message(noise) is None or json.loads(noise) is not None
    message = messages.parse_message(json.dumps(value).encode())
    if message is None:
        return
    meeting = rendezvous._Meeting(process(0, 1))
    with meeting, socket.socket() as sock:
        stranger = Connection(sock)
        meeting.waiting[stranger] = "q", 0.0
        assert "refuse" in meeting._seat(stranger, message)
    peers = Peers({})
    peers.close()
    peers.events.put(PeerEvent(1, message))
    monitor = Monitor(peers, process(0, 1), ["a", "b"], [])
    monitor._handle_next_event()
    for failure in filter(None, (*monitor.failures, monitor.first_failure)):
        assert monitor._describe(failure)


def test_many_connections():
    """Beyond a limit the oldest are closed, so that neither files nor seats run out."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        server = pool.submit(meet, [process(0, port)])
        for _ in range(1100):
            stack.enter_context(connect(port))
        start = time.monotonic()
        assert meet([process(1, port)]) == [2] and server.result() == [2]
        assert time.monotonic() - start < 20


def test_another_secret_is_a_users_mistake():
    port = free_port()
    first, second = meet([process(0, port), process(1, port, secret="t")], timeout=2)
    assert isinstance(second, UserError) and "--cluster.secret-file" in str(second)
    assert isinstance(first, PeerError) and "1 connection(s) with another secret were refused" in str(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"index": 1, "count": 3}, "process 0 runs with 2 processes"),
        ({"index": 2, "count": 2}, "process 0 runs with 2 processes"),
        ({"index": 1, "count": 2}, "process 1 is connected already"),
    ],
)
def test_a_process_that_does_not_belong_to_the_run_is_refused(other, words):
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, [process(0, port, count=2 + ("already" in words))])
        refused = [] if "already" not in words else [pool_process(port)]
        (error,) = meet([process(other["index"], port, other["count"] + ("already" in words))], timeout=3)
        assert isinstance(error, PeerError if refused else UserError) and words in str(error)
        for connection in refused:
            connection.close()
        rest = [process(1, port)] if not refused else [process(1, port, 3), process(2, port, 3)]
        assert meet(rest) == [2 + bool(refused)] * len(rest) and first.result() == [2 + bool(refused)]


def pool_process(port: int) -> Connection:
    """Process 1 of 3, which is seated and never reads the decision."""
    info, connection = process(1, port, 3), Connection(connect(port))
    question = connection.wait_for_message(time.monotonic() + 5)["question"]
    proof = rendezvous._proof(info, question, 1)
    connection.send(process=1, processes=3, proof=proof, report=REPORT)
    time.sleep(0.3)
    return connection


def test_errors_of_the_decision_are_raised_by_all():
    def refuse(reports):
        raise UserError(f"{len(reports)} reports differ")

    port = free_port()
    errors = meet([process(i, port, 3) for i in range(3)], decide=refuse)
    assert [(type(error), str(error)) for error in errors] == [(UserError, "3 reports differ")] * 3


def test_another_program_on_the_port_of_process_0():
    """It is not asked for ever, whether it answers or not."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as accepted:
                accepted.sendall(b"220 ready\n")
                accepted.recv(1)

        thread = threading.Thread(target=greet)
        thread.start()
        (error,) = meet([process(1, server.getsockname()[1])], timeout=1)
        thread.join()
    assert isinstance(error, PeerError) and "is another program" in str(error)


def test_too_few_files(monkeypatch):
    limits = []
    monkeypatch.setattr(rendezvous.resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(rendezvous.resource, "setrlimit", lambda _, values: limits.append(values))
    (error,) = meet([process(0, free_port(), 1024)], timeout=1)
    assert isinstance(error, UserError) and "limit is 1024: raise it (`ulimit -n 1344`)" in str(error) and not limits
    (error,) = meet([process(0, free_port(), 64)], timeout=1)
    assert isinstance(error, PeerError) and limits == [(384, 1024)]


def test_a_port_in_use_is_a_users_mistake():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        info = process(0, taken.getsockname()[1])
        with pytest.raises(UserError, match="cannot listen on port"):
            open_rendezvous(info, REPORT, 5, len, int)


def test_messages_over_a_connection():
    """In any packets; None at the end. The kernel detects a host that is gone in 60 s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
    peers = Peers({3: Connection(accepted)})
    option = functools.partial(accepted.getsockopt, socket.IPPROTO_TCP)
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    idle, interval, count = (option(getattr(socket, f"TCP_KEEP{name}")) for name in ("IDLE", "INTVL", "CNT"))
    assert idle + interval * count == 60 and option(socket.TCP_USER_TIMEOUT) == 60_000
    peer.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
    assert [peers.events.get(timeout=5) for _ in range(2)] == [(3, {"a": 1}), (3, {"b": 2})]
    peer.sendall(b": 3}\n")
    assert peers.events.get(timeout=5) == (3, {"c": 3})
    peer.close()
    assert peers.events.get(timeout=5) == (3, None)
    peers.send(late=True)
    peers.close()


def test_messages_that_come_together():
    """What follows the message that a process waits for is not lost."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = [Connection(socket.create_connection(server.getsockname())), Connection(server.accept()[0])]
    ends[0].sock.sendall(b'{"decision": 1}\n{"first_failure": [1, 2]}\n')
    assert ends[1].wait_for_message(time.monotonic() + 5) == {"decision": 1}
    peers = Peers({0: ends[1]})
    ends[0].send(done=True)
    assert [peers.events.get(timeout=5).message for _ in range(2)] == [{"first_failure": (1, 2)}, {"done": True}]
    ends[0].close()
    peers.close()
