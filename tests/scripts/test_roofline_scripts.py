"""calibrate_roofline.py: its arithmetic and its output. Nothing is timed."""

import dataclasses
import json
from pathlib import Path

import pytest

from bert_jax.bench.train_step import Case
from bert_jax.chips import CHIPS, GPU, TPU, Efficiency
from bert_jax.planning import published_runs
from bert_jax.planning.roofline import ERROR
from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def calibrate():
    return load_script(ROOT / "scripts" / "benchmarks" / "calibrate_roofline.py")


CASES = [
    Case("bert_tiny", 128, 16),
    Case("bert_tiny", 512, 4),
    Case("bert_mini", 128, 8),
    Case("bert_small", 128, 4, optimizer="lamb"),
    Case("bert_medium", 128, 2),
    Case("bert_medium", 512, 2, 0.0, 0.0),
]


@pytest.mark.parametrize("matmul", [0.8, 1.4])
def test_fit_finds_the_efficiencies_that_made_the_times(calibrate, matmul):
    """It limits products to the peak of the chip, here one whose other work is never bound by its vector rate."""
    chip = dataclasses.replace(CHIPS["h100"], vector_ops=1e18, float32_share=1.0)
    real = Efficiency(matmul, 0.6, 1.5, 0.7, 2.0)
    made = dataclasses.replace(chip, efficiency=real)
    measured = [[calibrate.predicted(case, made).step_seconds] * 3 for case in CASES]
    found = calibrate.fit(CASES, measured, chip)
    assert found.matmul == pytest.approx(min(1, matmul), rel=1e-3)
    if matmul < 1:
        assert found == pytest.approx(real, rel=1e-3)


def test_a_case_is_judged_by_the_median_of_predicted_over_measured(calibrate):
    case, chip = CASES[0], CHIPS["h100"]
    seconds = 2 * calibrate.predicted(case, chip).step_seconds
    result = calibrate.judge(case, [100.0, seconds, seconds, seconds], chip)
    assert (
        result["ratio"] == pytest.approx(0.5) and result["case"] == "bert_tiny 128 x 16, adamw, dropout 0.1, reference"
    )


def sweep_file(calibrate, path, device, seconds_of):
    groups = calibrate.sweep.groups("gpu", False)
    rows = [
        dataclasses.asdict(case) | {"group": name, "status": "measured", "samples": [seconds_of(case)] * 2}
        for name, group in groups.items()
        for case in group
    ]
    path.write_text(
        json.dumps({"options": {"sweep": True}, "devices": 1, "environment": {"device": device}, "cases": rows})
    )
    return path


@pytest.mark.slow
def test_a_sweep_calibrates_the_chip_that_it_measured(calibrate, tmp_path, capsys):
    """Times made from other efficiencies than those of the table are found, and the error of each case is shown."""
    real = Efficiency(0.5, 0.6, 0.7, 0.8, 0.75)
    chip = dataclasses.replace(CHIPS["h100"], efficiency=real)
    file = sweep_file(
        calibrate,
        tmp_path / "sweep.json",
        "NVIDIA H100 80GB HBM3",
        lambda case: calibrate.predicted(case, chip).step_seconds,
    )
    assert calibrate.main(["--sweep", str(file), "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert {case["role"] for case in report["cases"]} == {"fitted", "checked"}
    assert report["fit"]["matmul"] == pytest.approx(0.5, rel=0.05)
    assert all(1 < case["ratio"] < 2 for case in report["cases"]), "the table has smaller shares"
    assert "efficiencies that fit: matmul" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "words"), [("cpu", "which bert_jax/chips.py does not have"), (None, "is not the file of a sweep")]
)
def test_a_sweep_that_cannot_calibrate_is_one_line(calibrate, device, words, tmp_path, capsys):
    file = tmp_path / "sweep.json"
    if device:
        sweep_file(calibrate, file, device, lambda case: 1.0)
    assert calibrate.main(["--sweep", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_published_runs_calibrate_the_table_of_chips(calibrate, tmp_path, capsys):
    """The stated error is not smaller than theirs, nor much larger; the efficiencies are those that fit; the page has
    the table."""
    assert calibrate.main(["--published", "--json", str(tmp_path / "out.json")]) == 0
    families = json.loads((tmp_path / "out.json").read_text())["published"]
    off = [abs(run["ratio"] - 1) for judged in families.values() for run in judged["runs"]]
    assert ERROR - 0.05 < max(off) <= ERROR and len(off) > 20
    for family, efficiency in (("GPU", GPU), ("TPU", TPU)):
        assert list(families[family]["fit"].values()) == pytest.approx(efficiency, rel=0.02)
    page = (ROOT / "docs" / "scaling.md").read_text()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == len(off) + 2 and all(row in page for row in rows)
    assert {source for judged in families.values() for source in [run["source"] for run in judged["runs"]]} == set(
        published_runs.SOURCES
    )
