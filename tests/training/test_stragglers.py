"""Slow processes are named; a process that was suspended is not taken for one that hangs."""

import time
import types

import pytest

from bert_jax.distributed import jax_internals
from bert_jax.training.monitoring import stragglers, watchdog
from bert_jax.training.monitoring.stragglers import HostShare, HostShares, find_slow
from bert_jax.training.reporter import _Window
from bert_jax.training.run_directory.goodput import FILE, Activity, GoodputRecorder, describe_slow


def host_share(process: int, share: float, seconds: float = 2.5) -> HostShare:
    return {"process": process, "host": f"host{process}", "step": 10, "share": share, "seconds": seconds}


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        ([], []),
        ([0.9], []),
        ([0.9, 0.9], []),
        ([0.3, 0.21], []),
        ([0.3, 0.19], [0]),
        ([0.02, 0.5, 0.03, 0.6], [3, 1]),
        ([0.5, 0.5, 0.5, 0.1], []),
    ],
)
def test_who_is_slow(shares, slow):
    found = find_slow([host_share(process, share) for process, share in enumerate(shares)])
    assert [one["process"] for one in found] == slow
    assert not find_slow([host_share(process, share, 0.3) for process, share in enumerate(shares)])
    assert all(one["others"] < one["share"] and one["host"] == f"host{one['process']}" for one in found)


class Store:
    """jax's key-value store of a run, in one process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.texts[key] = text

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [(name, text) for name, text in self.texts.items() if name.startswith(f"{key}/")]


@pytest.mark.parametrize("others_first", [False, True])
def test_shares_of_the_line_before_whoever_is_first(monkeypatch, others_first):
    """Process 0 writes its line before or after the others."""
    store, process = Store(), [0]
    monkeypatch.setattr(jax_internals, "key_value_store", lambda: store)
    fake = types.SimpleNamespace(process_count=lambda: 3, process_index=lambda: process[0])
    monkeypatch.setattr(stragglers, "jax", fake)
    shares, found = [HostShares() for _ in range(3)], []
    for step, slow in (10, 0.8), (20, 0.0), (30, 0.7):
        for process[0] in (1, 2, 0) if others_first else (0, 1, 2):
            named = shares[process[0]].exchange(step, slow if process[0] == 2 else 0.1, 1.0)
            assert not named or process[0] == 0
            found += [(step, one["process"], one["share"], one["others"]) for one in named]
    assert found == [(20, 2, 0.8, 0.1)]  # the last line's shares are read with the next one


def test_the_report_counts_the_lines_of_each_process(tmp_path):
    with GoodputRecorder(tmp_path, time.perf_counter()) as goodput:
        for step, of in (1, [0.4]), (2, []), (3, [0.8, 0.3]):
            slow = [{"process": i, "host": "h", "share": share, "others": 0.1} for i, share in enumerate(of, 1)]
            goodput.write_totals(step, **({"slow": slow} if slow else {}))
    first, second = describe_slow(tmp_path)
    assert "Process 1 (h) was slow in 2 line(s)" in first and "60% of the time, the others for 10%" in first
    assert "Process 2 (h) was slow in 1 line(s)" in second
    assert (tmp_path / FILE).read_text().count("slow") == 2


def test_share_of_a_window(tmp_path, monkeypatch):
    """10 s, of which a save takes 2, the device 6: 2 of 8 s are the host's; 4 s of suspension are more than that."""
    clock = [100.0]
    monkeypatch.setattr("bert_jax.training.reporter.time.perf_counter", lambda: clock[0])
    goodput = GoodputRecorder(tmp_path, 0.0)
    window = _Window(goodput)
    clock[0], goodput.seconds["checkpoint"], window.device_wait = 110.0, 2.0, 6.0
    assert window.host_share() == 0.25
    goodput.suspended += 4.0
    assert window.host_share() == 0.5


def test_a_process_that_was_suspended_does_not_stall(tmp_path, monkeypatch):
    """Its thread wakes up 600 s late, in a step."""
    goodput, clock, late = GoodputRecorder(tmp_path, 0.0), [1000.0], [0.0, 600.0, 0.0, 700.0]
    goodput.activity, goodput.longest = Activity("step", 999.0, 0.0), {"step": 1.0}
    made = watchdog.Watchdog(tmp_path, goodput, 300.0, lambda *_: None)

    def wait(seconds: float) -> bool:
        clock[0] += seconds + (late.pop(0) if late else 0.0)
        return not late

    monkeypatch.setattr(watchdog.time, "perf_counter", lambda: clock[0])
    made._closed = types.SimpleNamespace(wait=wait)
    made._stacks = types.SimpleNamespace(were_asked_for=lambda: False)
    monkeypatch.setattr(made, "_write", lambda *_: pytest.fail("a stall"))
    made._watch()
    assert goodput.suspended == pytest.approx(1300.0)
    with goodput.measure("data_wait"):
        pass
    assert goodput.longest["step"] == pytest.approx(1.4)
