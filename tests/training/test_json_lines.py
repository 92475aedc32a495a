"""Files of JSON lines: what a kill cut short, what a restart takes back, and how they grow in a store."""

import json
import threading
from typing import TypedDict

import pytest

from bert_jax.storage import files
from bert_jax.storage.files import UPLOAD_INTERVAL_SECONDS
from bert_jax.storage.paths import to_path
from bert_jax.training.run_directory.json_lines import JsonLines, read_lines, truncate_lines
from tests.stores import MemoryStore, memory_store


@pytest.fixture(params=["disk", "store"])
def place(request, tmp_path):
    return tmp_path if request.param == "disk" else memory_store()


def write_steps(path, steps, tail=""):
    text = "".join(json.dumps({"step": step, "text": "\u2028 ü"}, ensure_ascii=False) + "\n" for step in steps)
    path.write_bytes((text + tail).encode())


class Line(TypedDict):
    step: int


def steps_of(values):
    return [value["step"] for value in values]


@pytest.mark.parametrize("tail", ["", '{"step": 9', '{"step": 1, "loss": 2}'])
@pytest.mark.parametrize(
    ("step", "kept"), [(0, []), (2, [2, 2]), (5, [2, 2, 4]), (8, [2, 2, 4, 6, 8]), (99, [2, 2, 4, 6, 8])]
)
def test_truncate_lines(place, step, kept, tail):
    path = place / "metrics.jsonl"
    write_steps(path, [2, 2, 4, 6, 8], tail)
    before = path.read_bytes()
    assert steps_of(read_lines(path, Line)) == [2, 2, 4, 6, 8] and path.read_bytes() == before
    values = truncate_lines(path, Line, lambda value: value["step"] <= step)
    assert steps_of(values) == steps_of(read_lines(path, Line)) == kept
    after = path.read_bytes()
    assert before.startswith(after) and (not after or after.endswith(b"\n"))


@pytest.mark.parametrize(
    "damage", [b'{"step": 4\n', b"\0\xff\n", b"4\n", b"[" * 99_999 + b"\n", b'{"stfp": 4}\n', b"\r\n"]
)
def test_damaged_lines_are_reported_and_skipped(place, damage, capfd):
    path = place / "metrics.jsonl"
    write_steps(path, [2])
    path.write_bytes(path.read_bytes() + damage + b'{"step": 6}\n{"st')
    damaged = path.read_bytes()
    assert steps_of(read_lines(path, Line)) == [2, 6] and path.read_bytes() == damaged
    assert capfd.readouterr().err == f"warning: {path}: line 2 is incomplete or damaged; skipped\n"
    assert steps_of(truncate_lines(path, Line)) == [2, 6]
    assert capfd.readouterr().err == f"warning: {path}: line 2, 4 is incomplete or damaged; removed\n"
    assert steps_of(truncate_lines(path, Line)) == [2, 6] and not capfd.readouterr().err
    path.write_bytes(damaged)
    assert steps_of(truncate_lines(path, Line, cut_at_damage=True)) == [2]
    assert path.read_bytes() == damaged.splitlines(keepends=True)[0]


def test_truncate_lines_of_nothing(place):
    assert truncate_lines(place / "none", Line) == [] and not (place / "none").exists()
    (place / "empty").write_bytes(b"")
    assert truncate_lines(place / "empty", Line) == []
    (place / "half").write_bytes(b'{"st')
    assert truncate_lines(place / "half", Line) == [] and (place / "half").read_bytes() == b""


@pytest.mark.parametrize("durable", [False, True])
def test_lines_are_added_to_those_that_are_there(place, durable):
    path = place / "lines"
    write_steps(path, [1, 2])
    for step in (3, 4):
        lines = JsonLines(path, durable=durable)
        lines.write({"step": step})
        lines.close()
    assert steps_of(read_lines(path, Line)) == [1, 2, 3, 4]


def test_durable_lines_are_in_the_store_at_once():
    path = memory_store() / "ledger"
    lines = JsonLines(path, durable=True)
    for step in (1, 2):
        lines.write({"step": step})
        assert steps_of(read_lines(path, Line)) == list(range(1, step + 1))


def test_other_lines_come_in_company(monkeypatch):
    """One write for many lines; a later one carries what the one before did not."""
    path, clock = memory_store() / "metrics", [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    lines = JsonLines(path, durable=False)
    for step in range(5):
        lines.write({"step": step})
    assert not MemoryStore.written
    lines.flush()
    assert steps_of(read_lines(path, Line)) == [0, 1, 2, 3, 4] and len(MemoryStore.written) == 1
    lines.flush()
    assert len(MemoryStore.written) == 1, "nothing was added"
    clock[0] += UPLOAD_INTERVAL_SECONDS
    lines.write({"step": 5})
    lines.write({"step": 6})
    lines.close()
    assert steps_of(read_lines(path, Line)) == [0, 1, 2, 3, 4, 5, 6] and len(MemoryStore.written) <= 3


def test_adding_does_not_wait_for_the_network(monkeypatch):
    path, open_gate, begun = memory_store() / "metrics", threading.Event(), threading.Event()
    put = MemoryStore.put_whole

    def slow(self, *arguments):
        begun.set()
        assert open_gate.wait(30)
        put(self, *arguments)

    monkeypatch.setattr(MemoryStore, "put_whole", slow)
    monkeypatch.setattr(files, "UPLOAD_INTERVAL_SECONDS", 0.0)
    lines = JsonLines(path, durable=False)
    lines.write({"step": 1})
    assert begun.wait(30)
    lines.write({"step": 2})
    assert not path.exists()
    open_gate.set()
    lines.flush()
    assert steps_of(read_lines(path, Line)) == [1, 2]
    lines.close()


def test_trouble_in_the_other_thread_is_raised(monkeypatch):
    def fail(*_):
        raise OSError("the store is gone")

    lines = JsonLines(memory_store() / "metrics", durable=False)
    lines.write({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "put_whole", fail)
        with pytest.raises(OSError, match="the store is gone"):
            lines.flush()
    lines.flush()
    assert steps_of(read_lines(to_path("az://bucket/metrics"), Line)) == [1]
