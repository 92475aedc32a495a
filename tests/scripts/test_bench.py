"""bench.py: report, output, imports and time budget. Nothing is timed."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "benchmarks" / "bench.py"

# bench.py must run without the other requirements of the package, e.g. on a machine rented for an hour.
WITH_BLOCKED_IMPORTS = """
import os, runpy, sys

BLOCKED = {"orbax", "tensorflow_datasets", "grain", "numba", "tensorboardX", "tokenizers", "array_record",
           "etils.epath", "sentencepiece", "sentencex", "safetensors", "tqdm", "torch", "transformers"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
script, *sys.argv = sys.argv[1:]
sys.argv.insert(0, script)
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture(scope="module")
def bench():
    return load_script(SCRIPT)


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_measures_without_the_other_requirements(tmp_path):
    file = tmp_path / "bench.json"
    arguments = "--presets bert_tiny --seq-lens 16 --batch 2 --dropout 0.1 --attention reference,cudnn --rounds 2"
    command = [sys.executable, "-c", WITH_BLOCKED_IMPORTS, str(SCRIPT), *arguments.split(), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())

    assert report["format"] == 1
    assert set(report) == {"format", "environment", "ceilings", "results", "ratios", "date", "command"}
    assert {"jax", "jaxlib", "numpy"} <= set(report["environment"]["versions"])
    assert report["ceilings"]["float32"]["median"] > 0
    assert report["ceilings"]["bfloat16"]["median"] > 0
    assert report["ceilings"]["copy"]["median"] > 0

    measured, refused = report["results"]
    assert measured["status"] == "measured" and len(measured["samples"]) == 2
    step = measured["step_seconds"]
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert measured["tokens_per_s"] == pytest.approx(32 / step["median"])
    ceiling = report["ceilings"]["float32"]["median"]
    assert measured["mfu"] == pytest.approx(measured["model_flops"] / step["median"] / ceiling)
    # With random weights, the loss is that of a uniform prediction, ln 30522 = 10.33.
    assert measured["loss"] == pytest.approx(10.33, abs=0.3)
    assert refused["status"] == "unsupported" and "dropout" in refused["detail"]

    assert "bert_tiny, sequence length 16" in done.stdout
    assert "ms/step" in done.stdout and "tokens/s" in done.stdout and "MFU" in done.stdout
    assert "unsupported: model.attention 'cudnn'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--presets bert_huge", "bert_tiny, bert_mini"),
        ("--batch 0", "--batch"),
        ("--dropout 1.5", "--dropout"),
        ("--dtype float8", "float32, bfloat16"),
        ("--threads 4096", "cores"),
        ("--budget 1", "--budget"),
        ("--json no/such/directory/bench.json", "no directory"),
        ("--sequences 128", "--sequences"),
    ],
)
def test_bad_arguments_get_one_line_and_exit_code_2(arguments, complaint, bench, capsys):
    try:
        code = bench.main(arguments.split())
    except SystemExit as leaving:
        code = leaving.code
    error = capsys.readouterr().err
    assert code == 2
    assert complaint in error and error.count("\n") == 1


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Step(SimpleNamespace):
    """A fake step with a given cost on a fake clock."""

    compile_seconds = memory_bytes = None

    def run(self, steps: int) -> float:
        self.clock.now += steps * self.cost
        return steps * self.cost

    def loss(self) -> float:
        return 10.0


@pytest.mark.parametrize("seconds", [5, 20, 25, 40, 60, 100, 1000])
def test_budget_is_kept_and_first_cases_come_first(bench, seconds):
    clock = Clock()
    budget = bench.Budget(seconds, clock)
    groups = bench.group_cases([bench.Case(preset, 128, 8) for preset in "ab" for _ in range(3)])
    assert [len(group) for group in groups] == [3, 3]
    slowest = 8.0 + 2 * 1.0

    def build(case):
        clock.now += 8.0
        return Step(clock=clock, cost=1.0)

    rows, slowest_builds = [], {}
    for group in groups:
        group_rows = [bench.Row(case) for case in group]
        rows += group_rows
        bench.measure_group(group_rows, build, budget, 4, slowest_builds)
    # Only the duration of the first build is unknown.
    assert clock.now <= max(seconds, slowest)
    statuses = [row.status for row in rows]
    assert statuses == sorted(statuses), "a later case was measured although an earlier one was not"
    assert all(row.detail.startswith("budget: ") for row in rows if row.status == "not measured")
    if seconds == 1000:
        assert [len(row.samples) for row in rows] == [4] * 6
    if seconds == 20:
        assert statuses.count("measured") == 1


def test_rounds_interleave_the_cases_of_a_group(bench):
    clock, order = Clock(), []

    class Noted(Step):
        def run(self, steps: int) -> float:
            order.append(self.name)
            return super().run(steps)

    rows = [bench.Row(bench.Case("a", 128, batch)) for batch in (1, 2, 3)]
    bench.measure_group(
        rows, lambda case: Noted(clock=clock, cost=1.0, name=case.batch), bench.Budget(1e3, clock), 2, {}
    )
    assert order == [1, 1, 2, 2, 3, 3, 1, 2, 3, 1, 2, 3]


def test_a_failing_case_is_a_row(bench):
    clock = Clock()
    errors = {
        1: RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"),
        2: NotImplementedError("no such kernel"),
        3: ValueError("what\nelse"),
        4: MemoryError(),
    }

    def build(case):
        if case.batch in errors:
            raise errors[case.batch]
        return Step(clock=clock, cost=1.0)

    rows = [bench.Row(bench.Case("a", 128, batch)) for batch in (1, 2, 3, 4, 5)]
    bench.measure_group(rows, build, bench.Budget(1e3, clock), 2, {})
    expected = ["out of memory", "unsupported", "failed", "out of memory", "measured"]
    assert [row.status for row in rows] == expected
    assert rows[2].detail == "ValueError: what else"


def test_each_set_of_shapes_gets_both_variants_of_the_peer_once(bench):
    cases = [bench.Case("a", 128, 8, scan_unroll=1), bench.Case("a", 128, 8, scan_unroll=2), bench.Case("a", 128, 4)]
    programs = [(case.batch, case.program) for case in bench.with_peers(cases)]
    peers = ["transformers stock", "transformers gathered"]
    assert programs == [
        *[(8, program) for program in ("bert_jax", *peers, "bert_jax")],
        *[(4, program) for program in ("bert_jax", *peers)],
    ]


def test_default_cases_are_supported(bench):
    for platform in ("cpu", "gpu", "tpu"):
        cases = bench.default_cases(platform, bench.harness.parse("", bench.flags, []))
        assert cases
        assert all(case.attention == "reference" or case.attention_dropout == 0 for case in cases)
    on_gpu = bench.default_cases("gpu", bench.harness.parse("", bench.flags, []))
    assert {(case.preset, case.seq_len) for case in on_gpu} == {
        (preset, seq_len) for preset in ("bert_base", "bert_large") for seq_len in (128, 512)
    }
    assert {case.attention for case in on_gpu} == {"reference", "xla", "cudnn"}
    assert {case.dtype for case in on_gpu} == {"bfloat16"}


@pytest.mark.slow
def test_peer_on_the_same_shapes(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    file = tmp_path / "bench.json"
    arguments = "--peer transformers --presets bert_tiny --seq-lens 32 --batch 2 --dropout 0.1 --rounds 2"
    done = run_script(*arguments.split(), "--json", str(file))
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert [r["program"] for r in report["results"]] == ["bert_jax", "transformers stock", "transformers gathered"]
    assert all(result["status"] == "measured" for result in report["results"])
    assert all(result["loss"] == pytest.approx(10.33, abs=0.3) for result in report["results"])
    assert {result["case"]["pair"] for result in report["results"]} == {"none"}
    assert [ratio["peer"] for ratio in report["ratios"]] == ["transformers stock", "transformers gathered"]
    assert "tokens/s of bert_jax over the peer's" in done.stdout
