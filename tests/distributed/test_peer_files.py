"""Files from process to process: complete or not there, and from nobody else."""

import json
import re
import socket
import struct
import time

import pytest

from bert_jax.distributed import jax_internals
from bert_jax.distributed.peer_files import PeerFiles


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """One process that sends to itself."""
    monkeypatch.setattr(jax_internals, "coordinator_host", lambda: "localhost")
    peers = PeerFiles(tmp_path, re.compile("[a-z]+"))
    yield peers
    peers.close()


def connect(peers) -> socket.socket:
    return socket.create_connection(("localhost", peers._addresses[0][1]), 10)


def test_a_file_arrives_whole(peers, tmp_path):
    content = bytes(range(256)) * 20_000
    peers.send(0, "copy", [content[:7], memoryview(content)[7:]])
    peers.send(0, "empty", [])
    assert (tmp_path / "copy").read_bytes() == content and (tmp_path / "empty").read_bytes() == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "empty"]


def test_a_sender_that_stops_leaves_nothing(peers, tmp_path):
    text = json.dumps({"secret": peers._secret, "name": "copy", "size": 1000}).encode()
    with connect(peers) as sock:
        sock.sendall(struct.pack("!H", len(text)) + text + b"x" * 500)
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(10) == b""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change", [{"secret": "no"}, {"secret": "é"}, {"name": "../copy"}, {"name": "COPY"}, {"size": "1"}, {"size": None}]
)
def test_others_are_refused(peers, tmp_path, change):
    text = json.dumps({"secret": peers._secret, "name": "copy", "size": 1} | change).encode()
    with connect(peers) as sock:
        sock.sendall(struct.pack("!H", len(text)) + text)
        assert sock.recv(10) == b""
    assert not list(tmp_path.rglob("*")) and not (tmp_path.parent / "copy").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\2{}",
        b"\xff\xff" + b"[" * 2000,
        b"\x04\0" + b"[" * 1024,
        b"\0\2\xff\xff",
    ],
)
def test_strangers_are_disconnected(peers, tmp_path, content):
    with connect(peers) as sock:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(10) in (b"",)
    peers.send(0, "copy", [b"1"])
    assert (tmp_path / "copy").read_bytes() == b"1"


def test_a_receiver_that_cannot_write_says_why(peers, tmp_path):
    tmp_path.rmdir()
    with pytest.raises(OSError, match=r"process 0 did not take copy: .*No such file or directory"):
        peers.send(0, "copy", [b"1"])
    tmp_path.mkdir()
