"""A proxy before an HTTP server that delays, resets, refuses and truncates the answers to some requests."""

import contextlib
import http.client
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SO_LINGER, SOL_SOCKET
from urllib.parse import urlsplit

FAULTS = ("delay", "reset", "503", "truncate")


class FaultyLink:
    """What to do to requests, and what was done."""

    def __init__(self, target: str):
        """Every request passes; `target` is the URL of the server."""
        self.target = urlsplit(target)
        self.schedule: list[str | None] = []
        """faults of the next requests that read an object, in order; None: it passes"""
        self.always: str | None = None
        """fault of all requests after the schedule; "down" closes every connection"""
        self.done: list[str] = []
        self.reads: list[str] = []
        """paths of the requests that read an object, with their ranges"""
        self.delay_seconds = 0.05
        self._lock = threading.Lock()

    def fault_of(self, method: str, path: str, range_: str) -> str | None:
        """The fault of a request; only GET requests for objects have one, unless the link is down."""
        with self._lock:
            is_read = method == "GET" and "?" not in path and path.count("/") > 1
            if is_read:
                self.reads.append(f"{path} {range_}")
            if self.always == "down":
                return "reset"
            if not is_read:
                return None
            fault = self.schedule.pop(0) if self.schedule else self.always
            if fault:
                self.done.append(fault)
            return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    link: FaultyLink

    def handle_error(self, request, client_address):
        pass  # connections that were reset


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_):
        pass

    def _forward(self) -> None:
        link = self.server.link
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = link.fault_of(self.command, self.path, self.headers.get("Range", ""))
        if fault == "delay":
            time.sleep(link.delay_seconds)
        if fault == "reset":
            self._reset()
            return
        if fault == "503":
            content = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            self._answer(503, [("Content-Type", "application/xml")], content, len(content))
            return
        connection = http.client.HTTPConnection(link.target.hostname, link.target.port, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        skipped = {"transfer-encoding", "connection", "content-length"}
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
        length = int(answer.headers.get("Content-Length") or len(content))
        connection.close()
        self._answer(answer.status, headers, content[: len(content) // 2] if fault == "truncate" else content, length)
        if fault == "truncate":
            self._reset()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def _reset(self) -> None:
        self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward


@contextlib.contextmanager
def faulty_link(target: str) -> Iterator[tuple[str, FaultyLink]]:
    """The proxy in threads: its address, and its faults."""
    socketserver.TCPServer.allow_reuse_address = True
    server = _Server(("127.0.0.1", 0), _Handler)
    server.link = FaultyLink(target)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", server.link
    server.shutdown()
    server.server_close()
    thread.join()
