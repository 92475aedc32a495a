"""Notices of clouds, from a server on this machine that tells the truth, lies, or does not answer."""

import http.server
import os
import signal
import threading

import pytest

from bert_jax.distributed import preemption
from bert_jax.distributed.preemption import NoticeServerError, ask_aws, ask_google

PREEMPTED, EVENT = (f"/computeMetadata/v1/instance/{name}" for name in ("preempted", "maintenance-event"))
TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
QUIET = {PREEMPTED: "FALSE", EVENT: "NONE", TOKEN: "secret"}


@pytest.fixture
def answers(monkeypatch):
    """What the server answers, by path; a number is a code."""
    values = dict(QUIET)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            wants = "X-aws-ec2-metadata-token" if self.path == ACTION else "Metadata-Flavor"
            allowed = self.headers[wants] == ("secret" if self.path == ACTION else "Google")
            self._answer(values.get(self.path, 404) if allowed else 401)

        def do_PUT(self):
            allowed = self.path == TOKEN and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._answer(values[TOKEN] if allowed else 405)

        def _answer(self, value):
            self.send_response(value if isinstance(value, int) else 200)
            if value == 302:
                self.send_header("Location", EVENT)
            self.end_headers()
            self.wfile.write(b"" if isinstance(value, int) else value.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        yield values
        server.shutdown()


@pytest.mark.parametrize(
    ("ask", "changed", "notice"),
    [
        (ask_google, {}, ""),
        (ask_google, {PREEMPTED: "TRUE\n"}, "instance/preempted TRUE"),
        (ask_google, {EVENT: "MIGRATE_ON_HOST_MAINTENANCE"}, ""),
        (ask_google, {EVENT: "TERMINATE_ON_HOST_MAINTENANCE"}, "maintenance-event TERMINATE_ON_HOST_MAINTENANCE"),
        (ask_google, {PREEMPTED: 404, EVENT: "TERMINATE_ON_HOST_MAINTENANCE"}, "TERMINATE_ON_HOST_MAINTENANCE"),
        (ask_aws, {}, ""),
        (ask_aws, {ACTION: '{"action": "terminate", "time": "2026-11-28T08:22:00Z"}'}, "instance-action terminate"),
    ],
)
def test_notices(answers, ask, changed, notice):
    answers.update(changed)
    assert ask().endswith(notice) and bool(ask()) == bool(notice)


@pytest.mark.parametrize(
    ("ask", "changed", "message"),
    [
        (ask_google, {PREEMPTED: "<html>" * 99999}, "answers '<html><html>.*', which is none of FALSE, TRUE"),
        (ask_google, {PREEMPTED: 500}, "instance/preempted answers with code 500"),
        (ask_google, {PREEMPTED: 302}, "instance/preempted answers with code 302"),
        (ask_google, {EVENT: ""}, "maintenance-event answers '', which is none of NONE"),
        (ask_google, {EVENT: 404}, "maintenance-event answers with code 404"),
        (ask_aws, {TOKEN: 403}, "latest/api/token answers with code 403"),
        (ask_aws, {ACTION: 500}, "instance-action answers with code 500"),
        (ask_aws, {ACTION: "TRUE"}, "instance-action answers 'TRUE', which has no action"),
        (ask_aws, {ACTION: "[1]"}, "which has no action"),
        (ask_aws, {ACTION: '{"action": ["stop"]}'}, "which has no action"),
        (ask_aws, {ACTION: "[" * 4096}, "which has no action"),
        (ask_aws, {TOKEN: "a\r\nb: c"}, "does not answer"),
    ],
)
def test_servers_that_lie(answers, ask, changed, message):
    answers.update(changed)
    with pytest.raises(NoticeServerError, match=message):
        ask()


@pytest.mark.parametrize(
    ("heard", "lines"),
    [
        (["", "", "x"], ["note: x: this machine is taken away; saving and stopping"]),
        (
            ["x", "x", "", "x"],
            ["warning: --cluster.notices gcp: x was there at the start, and is ignored", "note: x: "],
        ),
        (["x", "y"], ["warning: --cluster.notices gcp: x was there at the start, and is ignored", "note: y: "]),
        ([None, "", None, "x"], ["warning: --cluster.notices gcp: it is down; the run goes on, and asks", "note: x: "]),
    ],
)
def test_a_notice_is_a_single_signal(monkeypatch, capsys, heard, lines):
    left, signals, waited = list(heard), [], []

    def ask():
        if (notice := left.pop(0)) is None:
            raise NoticeServerError("it is down")
        return notice

    monkeypatch.setitem(preemption.CLOUDS, "gcp", ask)
    monkeypatch.setattr(os, "kill", lambda *arguments: signals.append(arguments))
    preemption._watch("gcp", waited.append)
    assert signals == [(os.getpid(), signal.SIGTERM)] and not left
    assert waited == [preemption.INTERVAL] * (len(heard) - 1)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(lines) and all(map(str.startswith, printed, lines))


def test_nobody_answers(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    with pytest.raises(NoticeServerError, match=r"does not answer \(.*refused"):
        ask_google()
