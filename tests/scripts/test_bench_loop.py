"""scripts/benchmarks/bench_loop.py on tiny shapes. Nothing is timed."""

import json
from pathlib import Path

import pytest

from tests.pages import load_script

TINY = "--preset bert_tiny --seq-len 64 --batch 2 --rounds 2"
KINDS = {"seconds", "cpu", "main"}


@pytest.fixture(scope="module")
def bench_loop():
    return load_script(Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "bench_loop.py")


@pytest.mark.slow
def test_the_loop_and_the_same_program_bare(bench_loop, tmp_path, capsys, monkeypatch):
    calls, steps, events = [], [], []
    train, call = bench_loop.loop.train, bench_loop.TrainStep.__call__

    def counted(step, *inputs):
        calls.append(step)
        return call(step, *inputs)

    def watched(task, mesh, workdir, metadata):
        before, place = len(calls), train(task, mesh, workdir, metadata)
        steps.append([json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()])
        events.append(((workdir / "tensorboard").exists(), task.task.config.checkpoint.local_directory is not None))
        # The loop warms up; then bare, loop, bare, loop.
        assert len(calls) - before == 2 + 4 * 4
        return place

    monkeypatch.setattr(bench_loop.TrainStep, "__call__", counted)
    monkeypatch.setattr(bench_loop.loop, "train", watched)
    file = tmp_path / "hooks.json"
    assert bench_loop.main(f"{TINY} --steps 4 --local-every 2 --memory {tmp_path} --json {file}".split()) == 0
    # Two steps to warm up and two windows of four; the metrics of the last step are not read.
    # A local copy follows the metrics of its step.
    assert steps == [[*range(1, 10)], [*range(1, 10)], [*range(1, 11)]]
    assert events == [(False, False), (True, False), (False, True)]
    assert len(set(calls)) == 1, "both sides must run one program"
    report = json.loads(file.read_text())
    assert report["metrics"] == len(calls[0].metrics)
    for name in ("loop", "loop with tensorboard", bench_loop.WATCHED):
        samples = report["samples"][name]
        assert {side: len(windows) for side, windows in samples.items()} == {"bare": 2, "loop": 2}
        assert all(set(timing) == KINDS and timing["seconds"] > 0 for timing in samples["loop"])
        share = report[name]["loop"]["main / seconds of bare"]
        ratios = [one["main"] / bare["seconds"] for one, bare in zip(samples["loop"], samples["bare"], strict=True)]
        assert (share["min"], share["max"]) == (min(ratios), max(ratios))
    assert "main / seconds of bare" in capsys.readouterr().out
