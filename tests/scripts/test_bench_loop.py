"""scripts/benchmarks/bench_loop.py: both cases on tiny shapes, and its arithmetic. Nothing is timed."""

import json
from pathlib import Path

import pytest

from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]
TINY = "--preset bert_tiny --seq-len 16 --batch 2 --rounds 2"
KINDS = {"seconds", "cpu", "main"}


@pytest.fixture(scope="module")
def bench_loop():
    return load_script(ROOT / "scripts" / "benchmarks" / "bench_loop.py")


def check_comparison(compared, name, baselines, rounds):
    """The baselines have one window more than the measured side."""
    samples = compared["samples"]
    assert set(samples) == set(compared["medians"]) == {name, *baselines}
    for side, windows in samples.items():
        assert len(windows) == rounds + (side != name)
        assert all(set(timing) == KINDS and timing["seconds"] > 0 for timing in windows)
    assert set(compared["overhead"]) == set(baselines)
    assert all(set(kinds) == KINDS for kinds in compared["overhead"].values())


def test_hooks_runs_the_loop_and_the_same_program_bare(bench_loop, tmp_path, capsys, monkeypatch):
    made, calls, steps, events = [], [], [], []
    train = bench_loop.loop.train

    class Counted(bench_loop.TrainStep):
        def __init__(self, config):
            super().__init__(config)
            made.append(self)

        def __call__(self, *inputs):
            calls.append(made.index(self))
            return super().__call__(*inputs)

    def watched(task, mesh, workdir, metadata):
        place = train(task, mesh, workdir, metadata)
        steps.append([json.loads(line)["step"] for line in (workdir / "metrics.jsonl").read_text().splitlines()])
        events.append((workdir / "tensorboard").exists())
        return place

    monkeypatch.setattr(bench_loop, "TrainStep", Counted)
    monkeypatch.setattr(bench_loop.loop, "train", watched)
    file = tmp_path / "hooks.json"
    assert bench_loop.main(f"hooks {TINY} --steps 4 --log-every 2 --json {file}".split()) == 0

    # Two steps to warm up and two windows of four; the metrics of the last step are not read.
    assert steps == [[2, 4, 6, 8]] * 2
    assert events == [False, True], "TensorBoard is off in the first run only"
    shared, plain = made
    assert set(plain.metrics) < set(shared.metrics), "the second program must lack the norms per layer"
    # To warm up; then in each run: the loop warms up, and bare, plain, loop, bare, plain, loop, bare, plain.
    bare, loop = [*[0] * 4, *[1] * 4], [0] * 4
    assert calls == [0, 0, 1, 1, *[0, 0, *bare, *loop, *bare, *loop, *bare] * 2]

    report = json.loads(file.read_text())
    assert list(report["variants"]) == ["loop", "loop with tensorboard"]
    for variant in report["variants"].values():
        assert variant["lines"] == 4
        check_comparison(variant, "loop", ["bare", "bare without layers"], rounds=2)
    assert (
        report["metrics"] == len(shared.metrics) and report["steps"] == 4 and report["environment"]["platform"] == "cpu"
    )
    printed = capsys.readouterr().out
    assert "loop over bare:" in printed and "ms per step" in printed


def test_checkpoint_commits_and_leaves_nothing(bench_loop, tmp_path, capsys):
    file, out = tmp_path / "checkpoint.json", tmp_path / "out"
    out.mkdir()
    arguments = f"checkpoint {TINY} --optimizer lamb --every 2 --out {out} --json {file}"
    assert bench_loop.main(arguments.split()) == 0
    report = json.loads(file.read_text())

    check_comparison(report, "with a save", ["without"], rounds=2)
    assert len(report["saves"]) == 2
    for save in [report["alone"], *report["saves"]]:
        assert set(save) == {"blocked", "written", "committed", "waited", "flush"}
        assert 0 <= save["written"] <= save["committed"]
    # Parameters and two moments in float32; what is random hardly compresses, but moments of few steps do.
    assert 4 * report["parameters"] < report["bytes"] < 1.1 * 12 * report["parameters"]
    assert set(report["bytes_per_second"]) == {"alone", "training", "sha256"}
    assert list(out.iterdir()) == []
    printed = capsys.readouterr().out
    assert "save alone: blocked" in printed and "with a save over without:" in printed


def test_the_run_is_the_preset_in_other_shapes(bench_loop):
    words = "hooks --preset bert_mini --seq-len 64 --batch 4 --optimizer lamb"
    options = bench_loop.harness.parse("", bench_loop.flags, words.split())
    config = bench_loop.make_config(options, bench_loop.LogConfig())
    assert config.model == bench_loop.presets.load_config("bert_mini").model
    assert config.optimizer.name == "lamb"
    (phase,) = config.phases
    assert (phase.seq_len, phase.batch_size) == (64, 4)


def test_overhead_is_against_the_windows_on_both_sides(bench_loop):
    """A linear drift of the machine's speed has no effect."""
    bare = [{"seconds": float(i), "cpu": 1.0, "main": 0.0} for i in (1, 2, 3)]
    loop = [{"seconds": i * 1.02, "cpu": 1.5, "main": i / 10} for i in (1.5, 2.5)]
    drifting = {"bare": bare, "loop": loop}
    overhead = bench_loop.compare(drifting, "loop", ["bare"])["overhead"]["bare"]
    assert overhead["seconds"]["share"]["median"] == pytest.approx(0.02)
    assert overhead["seconds"]["per_step"] == pytest.approx(0.04)
    assert overhead["cpu"]["share"]["median"] == pytest.approx(0.5)
    assert overhead["main"]["share"] == pytest.approx({"median": 0.1, "min": 0.1, "max": 0.1})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (f"hooks {TINY} --steps 3 --log-every 2", "multiple of --log-every"),
        ("hooks --preset bert_huge", "bert_mini"),
        ("hooks --seq-len 4096", "position table"),
        ("checkpoint --every 0", "whole number from 1"),
        ("checkpoint --out no/such/directory", "no such directory"),
        ("", "case"),
    ],
)
def test_errors_get_exit_code_2(arguments, complaint, bench_loop, capsys):
    try:
        code = bench_loop.main(arguments.split())
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert complaint in capsys.readouterr().err
