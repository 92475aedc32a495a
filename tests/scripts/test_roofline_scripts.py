"""calibrate_roofline.py and weak_scaling.py: their arithmetic and their output. Nothing is timed."""

import dataclasses
import json
from pathlib import Path

import pytest

from bert_jax.chips import CHIPS, Efficiency, Sizes
from bert_jax.planning.roofline import predict
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
    config = calibrate.config_of(case)
    chip = calibrate.measured_chip(*rates)
    real = dataclasses.replace(chip, efficiency=efficiency)
    seconds = slower * predict(config, 0, Sizes(), case.accumulation, real).step_seconds
    return config, [
        calibrate.Sample(dict.fromkeys(calibrate.CLOCKS, seconds), dict.fromkeys(calibrate.CLOCKS, chip))
    ] * 3


def test_fit_finds_the_efficiencies_that_made_the_times(calibrate):
    real = Efficiency(0.8, 0.6, 1.5, 0.7, 2.0)
    measured = [samples_of(calibrate, case, real) for case in calibrate.FITTED]
    assert calibrate.fit(calibrate.FITTED, measured) == pytest.approx(real, rel=1e-3)
    assert not set(calibrate.FITTED) & set(calibrate.CHECKED)
    # Products are not faster than the measured ones.
    measured = [samples_of(calibrate, case, real._replace(matmul=1.4)) for case in calibrate.FITTED]
    assert calibrate.fit(calibrate.FITTED, measured).matmul == pytest.approx(1.0)


def test_a_case_is_judged_by_the_median_of_predicted_over_measured(calibrate):
    case = calibrate.CHECKED[0]
    config, samples = samples_of(calibrate, case, calibrate.CPU, slower=2.0)
    odd = samples[0]._replace(seconds=dict.fromkeys(calibrate.CLOCKS, 100.0))
    result = calibrate.judge(case, config, [odd, *samples])
    assert result["cpu"]["ratio"] == result["clock"]["ratio"] == pytest.approx(0.5)
    assert result["case"] == "bert_tiny 128 x 16, adamw, dropout 0"


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
