"""calibrate_roofline.py and weak_scaling.py: their arithmetic and their output. Nothing is timed."""

import dataclasses
import json
from pathlib import Path

import pytest

from bert_jax.chips import CHIPS, GPU, TPU, Efficiency
from bert_jax.planning import published_runs
from bert_jax.planning.roofline import ERROR
from tests.pages import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def calibrate():
    return load_script(ROOT / "scripts" / "benchmarks" / "calibrate_roofline.py")


@pytest.fixture(scope="module")
def weak_scaling():
    return load_script(ROOT / "scripts" / "benchmarks" / "weak_scaling.py")


def samples_of(calibrate, case, efficiency, rates=(2e11, 1e11, 7e9), slower=1.0):
    """Samples of a machine that matches the model, except for a factor `slower`."""
    chip = calibrate.measured_chip(*rates)
    real = dataclasses.replace(chip, efficiency=efficiency)
    return [calibrate.Sample(slower * calibrate.predicted(case, real).step_seconds, chip)] * 3


@pytest.mark.parametrize("matmul", [0.8, 1.4])
def test_fit_finds_the_efficiencies_that_made_the_times(calibrate, matmul):
    """It limits products to the measured rate."""
    real = Efficiency(matmul, 0.6, 1.5, 0.7, 2.0)
    measured = [samples_of(calibrate, case, real) for case in calibrate.FITTED]
    found = calibrate.fit(calibrate.FITTED, measured)
    assert found.matmul == pytest.approx(min(1, matmul), rel=1e-3)
    if matmul < 1:
        assert found == pytest.approx(real, rel=1e-3)


def test_a_case_is_judged_by_the_median_of_predicted_over_measured(calibrate):
    case = calibrate.CHECKED[0]
    samples = samples_of(calibrate, case, calibrate.CPU, slower=2.0)
    result = calibrate.judge(case, [samples[0]._replace(seconds=100.0), *samples])
    assert result["ratio"] == pytest.approx(0.5) and result["case"] == "bert_tiny 128 x 16, adamw, dropout 0, reference"


def test_checked_cases_did_not_serve_to_fit(calibrate):
    assert not set(calibrate.FITTED) & set(calibrate.CHECKED)
    names = [calibrate.name_of(case) for case in (*calibrate.FITTED, *calibrate.CHECKED)]
    assert len(set(names)) == len(names)


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


def test_weak_scaling_keeps_rows_and_loses_only_to_links(weak_scaling, tmp_path, capsys):
    plot, written = tmp_path / "plot.png", tmp_path / "out.json"
    weak_scaling.main(["--chips", "v5e,h100", "--rows", "16", "--plot", str(plot), "--json", str(written)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = json.loads(written.read_text())["predictions"]
    assert [line["chips"] for line in lines] == 2 * list(weak_scaling.COUNTS)
    for line in lines:
        alone = line["step_seconds"] - line["links"] - line["network"]
        assert line["efficiency"] == pytest.approx(alone / line["step_seconds"])
        assert (line["network"] > 0) == (line["chips"] > CHIPS[line["chip"]].slice_devices)
    row = ["v5e", "2,048", "8", weak_scaling.harness.show(lines[8]["step_seconds"])]
    assert row in [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
