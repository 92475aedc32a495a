"""bert-jax bench: report, imports, time budget and flags. Nothing is timed."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bert_jax.bench import bench, floor, sweep, train_step
from bert_jax.chips import Sizes
from bert_jax.planning.roofline import program_flops
from bert_jax.planning.workload import workload

# It must run without the other requirements of the package, e.g. on a machine rented for an hour.
WITH_BLOCKED_IMPORTS = """
import sys

BLOCKED = {"orbax", "tensorflow_datasets", "grain", "numba", "tensorboardX", "tokenizers", "array_record",
           "etils.epath", "sentencepiece", "sentencex", "safetensors", "tqdm", "torch", "transformers"}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in BLOCKED or name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
from bert_jax.bench.bench import main
raise SystemExit(main())
"""


def report_of(file: Path, arguments: str, *python: str) -> tuple[dict, str]:
    command = [sys.executable, *(python or ("-m", "bert_jax", "bench")), *arguments.split(), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
def test_measures_without_the_other_requirements(tmp_path):
    arguments = "--presets bert_tiny --seq-lens 16 --batch 2 --dropout 0.1 --attention reference,cudnn --rounds 2"
    report, printed = report_of(tmp_path / "bench.json", arguments, "-c", WITH_BLOCKED_IMPORTS)
    assert {"jax", "jaxlib", "numpy"} <= set(report["environment"]["versions"])
    rates = {name: ceiling["per second"]["median"] for name, ceiling in report["ceilings"].items()}
    assert set(rates) == {"float32", "bfloat16"} and min(rates.values()) > 0
    measured, refused = report["cases"]
    assert measured["status"] == "measured" and len(measured["samples"]) == 2
    step = measured["seconds"]
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert measured["tokens/s"] == pytest.approx(32 / step["median"])
    assert 0 < measured["MFU"] < 1
    # With random weights, the loss is that of a uniform prediction, ln 30522 = 10.33.
    assert measured["loss"] == pytest.approx(10.33, abs=0.3)
    assert refused["status"].startswith("refused: model.attention 'cudnn'") and "dropout" in refused["status"]
    assert "cases, seq_len 16, batch 2" in printed and refused["status"] in printed


@pytest.mark.slow
def test_peer_on_the_same_shapes(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    arguments = "--peer transformers --floor --presets bert_tiny --seq-lens 32 --batch 2 --dropout 0.1 --rounds 2"
    report, printed = report_of(tmp_path / "bench.json", arguments + " --attention reference")
    ours, *peers, floor = report["cases"]
    assert [case["variant"] for case in report["cases"]] == [None, "stock", "gathered", "floor"]
    assert floor["loss"] is None and 0 < ours["floor / step"]["median"] < 2
    for case in (ours, *peers):
        assert case["status"] == "measured" and case["pair"] == "none"
        assert case["loss"] == pytest.approx(10.33, abs=0.3)
    ratios = [peer / own for peer, own in zip(peers[0]["samples"], ours["samples"], strict=True)]
    assert ours["times stock"]["min"] == pytest.approx(min(ratios)) and "times gathered" in ours
    assert "times stock" in printed


class Machine:
    """Builds steps that take 8 seconds to build and 1 to run, on a clock of its own."""

    def __init__(self, seconds: float):
        self.now, self.seconds, self.order = 0.0, seconds, []
        self.errors: dict[int, Exception] = {}

    def left(self) -> float:
        return self.seconds - self.now

    def build(self, case):
        if case.batch in self.errors:
            raise self.errors[case.batch]
        self.now += 8.0
        return SimpleNamespace(
            time_steps=lambda steps: self.run(case.batch, steps), loss=lambda: 10.0, memory_bytes=None
        )

    def run(self, name, steps):
        self.order.append(name)
        self.now += steps
        return float(steps)


@pytest.mark.parametrize("seconds", [5, 20, 60, 1000])
def test_budget_is_kept_and_first_cases_come_first(seconds):
    machine, results, slowest = Machine(seconds), [], 0.0
    for preset in "ab":
        group = [bench.CaseResult(bench.Case(preset, 128, batch)) for batch in range(3)]
        results += group
        slowest = bench.measure_group(group, machine.build, machine.left, 4, slowest)
    # Only the duration of the first build is unknown.
    assert machine.now <= max(seconds, 8.0 + 2 * 1.0)
    statuses = [result.status for result in results]
    assert statuses == sorted(statuses), "a later case was measured although an earlier one was not"
    assert set(statuses) <= {"measured", "not measured: the budget ended"}
    if seconds == 1000:
        assert [len(result.samples) for result in results] == [4] * 6
    if seconds == 20:
        assert statuses.count("measured") == 1


def test_a_group_is_interleaved_and_a_failing_case_is_a_result():
    machine = Machine(1e3)
    machine.errors[9] = RuntimeError("RESOURCE_EXHAUSTED:\nout of memory")
    results = [bench.CaseResult(bench.Case("a", 128, batch)) for batch in (1, 2, 9, 3)]
    bench.measure_group(results, machine.build, machine.left, 2, 0.0)
    assert machine.order == [1, 1, 2, 2, 3, 3, 1, 2, 3, 1, 2, 3]
    assert results[2].status == "out of memory: RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert [len(result.samples) for result in results] == [2, 2, 0, 2]


def test_each_set_of_shapes_gets_each_variant_once():
    cases = [bench.Case("a", 128, 8, scan_unroll=1), bench.Case("a", 128, 8, scan_unroll=2), bench.Case("a", 128, 4)]
    found = [(case.batch, case.variant) for case in train_step.with_variants(cases, ["stock", "gathered"])]
    peers = ["stock", "gathered"]
    assert found == [*[(8, one) for one in (None, *peers, None)], *[(4, one) for one in (None, *peers)]]


def test_default_cases_are_supported():
    parser = argparse.ArgumentParser()
    bench.flags(parser.add_argument)
    found = {platform: bench.default_cases(platform, parser.parse_args([])) for platform in ("cpu", "gpu", "tpu")}
    for cases in found.values():
        assert cases and all(case.attention not in ("xla", "cudnn") or case.attention_dropout == 0 for case in cases)
    shapes = {(case.preset, case.seq_len) for case in found["gpu"]}
    assert shapes == {(preset, seq_len) for preset in ("bert_base", "bert_large") for seq_len in (128, 512)}
    assert {case.attention for case in found["gpu"]} == {"reference", "xla", "cudnn", "pallas_gpu"}
    assert {case.dtype for case in found["gpu"]} == {"bfloat16"}


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_cases_of_a_sweep_are_valid_and_distinct(platform):
    groups = sweep.groups(platform, True)
    for group in groups.values():
        assert len(set(group)) == len(group)
        assert all(bench.train_step.config_of(case) for case in group if case.variant is None)
    peers = [case for group in groups.values() for case in group if case.variant]
    assert peers and not [case for group in sweep.groups(platform, False).values() for case in group if case.variant]


def test_a_sweep_goes_on(tmp_path):
    """A group is measured again unless all of its cases have been; a measurement is only replaced by another."""
    cases = [bench.Case("a", 128, batch) for batch in (1, 2, 3)]
    status = {("x", 0): "measured", ("x", 1): "measured", ("y", 1): "measured", ("y", 2): "not measured: the budget"}
    rows = [
        bench.dataclasses.asdict(cases[i]) | {"group": name, "status": one, "samples": [7.0]}
        for (name, i), one in status.items()
    ]
    file = tmp_path / "sweep.json"
    file.write_text(
        json.dumps({"options": {"sweep": True}, "devices": 1, "cases": rows, "environment": {"device": "H100"}})
    )
    rows = sweep.earlier_rows(file, "H100", 1)
    assert len(rows) == 3 and sweep.earlier_rows(tmp_path / "none.json", "H100", 1) == []
    assert sweep.is_measured("x", cases[:2], rows)
    assert not sweep.is_measured("y", cases[1:], rows) and not sweep.is_measured("z", cases[:1], rows)

    def merged(samples):
        results = [bench.CaseResult(cases[1], "y", "failed: x"), bench.CaseResult(cases[2], "y", "failed: x", samples)]
        report = bench.describe(SimpleNamespace(samples={}, sizes={}), results, 1, rows)
        return [(row["group"], row["batch"], row["samples"]) for row in report["cases"]]

    assert merged([]) == [("x", 1, [7.0]), ("x", 2, [7.0]), ("y", 2, [7.0])]
    written = file.read_text()
    for text, device, devices, words in (
        (written, "H200", 1, "of 1 x H100, not of 1 x H200"),
        (written, "H100", 2, "of 1 x H100, not of 2 x H100"),
        (written.replace("sweep", "floor"), "H100", 1, "is not the file"),
        ("[]", "H100", 1, "is not the file"),
    ):
        file.write_text(text)
        with pytest.raises(bench.UserError, match=words):
            sweep.earlier_rows(file, device, devices)


def test_a_floor_is_compared_only_with_steps_that_do_its_work():
    def floor_of(**changes):
        own = bench.Case("a", 128, 8, **{"pair": "none"} | changes)
        results = [
            bench.CaseResult(case, "a", "measured", [1.0]) for case in train_step.with_variants([own], ["floor"])
        ]
        ceiling = SimpleNamespace(samples={own.dtype: [1.0]}, sizes={own.dtype: 1})
        return bench.describe(ceiling, results, 1)["cases"][0].get("floor / step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "planned_bytes", lambda case, devices: 0)
        patch.setattr(train_step, "step_flops", lambda case: 1.0)
        assert floor_of() == {"median": 1.0, "min": 1.0, "max": 1.0}
        other = {"optimizer": "lamb", "accumulation": 2, "attention": "pallas_gpu", "remat": "full", "rows": "packed"}
        for name, value in other.items():
            assert floor_of(**{name: value}) is None


def test_mistakes_end_before_anything_is_measured(tmp_path, capsys):
    """One line, exit code 2; a file that is there is neither replaced nor continued by mistake."""
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("words")
    for arguments, words in (
        (f"--json {thesis}", "exists: choose another name"),
        (f"--sweep --json {thesis}", "is not the file of a sweep"),
        (f"--json {tmp_path}", "is no regular file"),
        (f"--json {tmp_path}/none/x.json", "there is no directory"),
        ("--json /dev/full", "is no regular file"),
        ("--sweep", "give --json FILE"),
        (f"--sweep --floor --json {tmp_path}/new.json", "leave out --floor"),
        (f"--sweep --optimizer lamb --json {tmp_path}/new.json", "leave out --optimizer"),
        ("--devices 99", "jax sees"),
    ):
        assert bench.main(arguments.split()) == 2
        assert words in capsys.readouterr().err
    for arguments, words in (
        ("--budget nan", "a number of seconds from 10"),
        ("--dropout x", "RATE or HIDDEN/ATTENTION"),
    ):
        with pytest.raises(SystemExit):
            bench.main(arguments.split())
        assert words in capsys.readouterr().err
    assert thesis.read_text() == "words" and [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("seq_len", [128, 16])
def test_products_of_the_floor_are_those_of_the_step(seq_len):
    """`bert-jax plan` counts the same FLOPs."""
    case = bench.Case("bert_mini", seq_len, 8, pair="none")
    model, targets = train_step.model_config(case), train_step.predictions(seq_len)
    products = [
        *3 * floor.layer_products(model, 8, seq_len, seq_len),
        *floor.layer_products(model, 8, targets, seq_len),
        *floor.head_products(model, 8 * targets),
    ]
    flops = sum(2 * count * m * k * n for count, m, k, n in products)
    assert flops == program_flops(workload(train_step.config_of(case), 0, Sizes(), 1))


@pytest.mark.parametrize(("contents", "starts"), [("full", [0]), ("padded", [0]), ("packed", [0, 32])])
def test_contents_of_rows(contents, starts):
    """Examples of half a row, alone or two of them, have the ids of the same number of whole rows."""
    length = 64 // (1 if contents == "full" else 2)
    rows = train_step.synthetic_rows(3, 64, contents, slots=4)
    whole = train_step.synthetic_rows(3 * len(starts), length)
    assert rows["example_id"].shape == rows["cls_positions"].shape == rows["pair_labels"].shape == (3, 4)
    real = np.zeros(64, bool)
    for slot in range(4):
        is_example = slot < len(starts)
        assert np.all((rows["example_id"][:, slot] >= 0) == is_example)
        assert np.all((rows["segment_ids"] == slot + 1).sum(1) == length * is_example)
    for slot, start in enumerate(starts):
        tokens = slice(start, start + length)
        real[tokens] = True
        assert np.all(rows["segment_ids"][:, tokens] == slot + 1) and np.all(rows["cls_positions"][:, slot] == start)
        for name in ("input_ids", "token_type_ids", "position_ids"):
            np.testing.assert_array_equal(rows[name][:, tokens], whole[name][slot :: len(starts)])
    assert not rows["segment_ids"][:, ~real].any() and not rows["input_ids"][:, ~real].any()
    assert len(np.unique(rows["example_id"])) == 3 * len(starts) + (len(starts) < 4)


@pytest.mark.parametrize(("kind", "types"), [("NVIDIA A100-SXM4", 2), ("NVIDIA H100 80GB HBM3", 3)])
def test_ceilings_of_types_that_a_gpu_has(kind, types):
    ceiling = train_step.Ceiling.__new__(train_step.Ceiling)
    ceiling._seconds = lambda dtype, calls: 1.0
    ceiling.__init__(SimpleNamespace(platform="gpu", device_kind=kind))
    assert len(ceiling.samples) == types and set(ceiling.sizes.values()) == {1024}
    del ceiling._seconds
    ceiling.sizes = dict.fromkeys(ceiling.sizes, 64)
    ceiling.add_samples(1)
    assert all(len(rates) == 1 for rates in ceiling.samples.values())
