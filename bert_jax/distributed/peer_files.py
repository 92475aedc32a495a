"""Files that the processes of a run send to each other, from host to host, without a common disk.

Each process listens on a port of its own. Who sends must know a secret that process 0 draws at every start; the
processes get it through jax's key-value store, which is as open to strangers as the other ports of the run
(docs/pods.md).
"""

import contextlib
import hmac
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from bert_jax.distributed import jax_internals
from bert_jax.distributed.agreement import all_gather, compute_and_broadcast, is_first
from bert_jax.distributed.rendezvous import listen
from bert_jax.errors import UserError
from bert_jax.field_validation import from_json

TIMEOUT_SECONDS = 60.0
"""Without a byte in between."""
MAX_HEADER, CHUNK = 1024, 2**20
"""Bytes of a header, and bytes that are written at once."""
MAX_WAITING = 64
"""Connections that are not accepted yet."""
RECEIVED = b"+"


class _Header(TypedDict):
    secret: str
    name: str
    size: int


class PeerFiles:
    """Sends files to other processes, and writes those that it receives into a directory.

    All processes of a run construct it at the same time.
    """

    def __init__(self, directory: Path, names: re.Pattern):
        """Starts to listen.

        Args:
          directory: where received files appear, each when it is complete.
          names: of the files that are accepted.
        """
        self._directory, self._names = directory, names
        self._listener = listen(0, MAX_WAITING)
        self._secret = compute_and_broadcast("the secret of files", lambda: secrets.token_hex(16))
        own = [_own_address(), self._listener.getsockname()[1]]
        self._addresses: list[tuple[str, int]] = [(host, port) for host, port in all_gather("ports for files", own)]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close does not
        self._listener.close()

    def send(self, process: int, name: str, parts: Sequence[memoryview | bytes]) -> None:
        """Send a file to a process; when this returns, it is there.

        Args:
          process: index of the receiver.
          name: of the file.
          parts: its content.

        Raises:
          OSError: the connection failed, or the receiver could not write the file.
        """
        header = {"secret": self._secret, "name": name, "size": sum(len(part) for part in parts)}
        text = json.dumps(header).encode()
        with socket.create_connection(self._addresses[process], TIMEOUT_SECONDS) as sock:
            sock.sendall(struct.pack("!H", len(text)) + text)
            for part in parts:
                sock.sendall(part)
            if (answer := sock.recv(MAX_HEADER)) != RECEIVED:
                raise OSError(f"process {process} did not take {name}: {answer.decode(errors='replace')}")

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._receive, args=[sock], daemon=True).start()

    def _receive(self, sock: socket.socket) -> None:
        """Write one file; the connection of a stranger, or of a sender that stops, is closed."""
        sock.settimeout(TIMEOUT_SECONDS)
        foreign = ValueError, RecursionError, struct.error, UserError
        with sock, sock.makefile("rb") as stream, contextlib.suppress(OSError, *foreign):
            (length,) = struct.unpack("!H", stream.read(2))
            if length > MAX_HEADER:
                return
            header = from_json(_Header, json.loads(stream.read(length)), "a header")
            is_own = hmac.compare_digest(header["secret"].encode(), self._secret.encode())
            if not is_own or self._names.fullmatch(header["name"]) is None:
                return
            partial, left = self._directory / f"{header['name']}.received.partial", header["size"]
            try:
                with partial.open("wb") as file:
                    while left > 0 and (data := stream.read(min(CHUNK, left))):
                        file.write(data)
                        left -= len(data)
                if left == 0:
                    partial.replace(self._directory / header["name"])
                    sock.sendall(RECEIVED)
            except OSError as error:  # the disk is full, or the sender has stopped
                sock.sendall(str(error).encode()[:MAX_HEADER])
            finally:
                partial.unlink(missing_ok=True)


def _own_address() -> str:
    """The address under which the other processes reach this one: that of its connection to process 0."""
    host = jax_internals.coordinator_host()
    if is_first():
        return host
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return probe.getsockname()[0]
