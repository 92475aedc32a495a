"""scripts/benchmarks/harness.py, which all benchmarks share."""

import json
import sys
from pathlib import Path

import pytest

from tests.pages import load_script


@pytest.fixture(scope="module")
def harness():
    return load_script(Path(__file__).resolve().parents[2] / "scripts/benchmarks/harness.py")


def test_sides_take_turns_and_ratios_are_by_round(harness):
    """The machine is twice as slow in the second round, which does not change the ratio."""
    order, seconds = [], iter([1.0, 3.0, 2.0, 6.0])

    def side(name):
        order.append(name)
        return next(seconds)

    samples = harness.interleave({name: lambda name=name: side(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "a", "b"] and samples == {"a": [1.0, 2.0], "b": [3.0, 6.0]}
    ratio = harness.ratio(samples["b"], samples["a"])
    assert ratio == {"median": 3.0, "min": 3.0, "max": 3.0} and harness.show(ratio) == "3.00 (3.00 to 3.00)"


def test_a_report_is_printed_and_written_with_its_circumstances(harness, tmp_path, capsys):
    def measure(options):
        if options.rounds == 13:
            raise harness.UserError("--rounds 13: it brings bad luck")
        return {"rounds": options.rounds, "rest": options.rest, "environment": {"devices": 2}}

    def run(*words):
        try:
            return harness.run("about", lambda add: add("--rounds", type=harness.positive), measure, render, words)
        except SystemExit as leaving:
            return leaving.code

    def render(report):
        return ["a line", f"rounds {report['rounds']}"]

    file = tmp_path / "report.json"
    assert run("--rounds", "3", "--json", str(file), "--", "--more") == 0
    assert capsys.readouterr().out == "a line\nrounds 3\n"
    report = json.loads(file.read_text())
    assert (report["rounds"], report["rest"], report["environment"]["devices"]) == (3, ["--more"], 2)
    assert report["command"][1:] == ["--rounds", "3", "--json", str(file), "--", "--more"]
    assert {"commit", "threads", "load", "versions"} <= set(report["environment"]) and "date" in report
    for words in (["--rounds", "0"], ["--rounds", "13"], ["--json", "no/such/file"], ["--wrong"]):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_processes_of_a_command_are_found_with_their_memory(harness):
    child = "x = bytearray(300 << 20); import time; time.sleep(1)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    seconds, peaks = harness.run_command([sys.executable, "-c", code], poll_seconds=0.05)
    assert seconds > 1 and peaks[0] >= 300 > peaks[1]
    with pytest.raises(harness.UserError, match="NameError"):
        harness.run_command([sys.executable, "-c", "nothing"])
