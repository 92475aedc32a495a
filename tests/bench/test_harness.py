"""bert_jax/bench/harness.py, which all benchmarks share: it measures what it says."""

import json

from bert_jax.bench import harness


def test_sides_take_turns_and_ratios_are_by_round():
    """The machine is twice as slow in the second round, which does not change the ratio."""
    order, seconds = [], iter([1.0, 3.0, 2.0, 6.0])

    def side(name):
        order.append(name)
        return {"seconds": next(seconds), "cpu": 1.0, "main": 0.0}

    samples = harness.interleave({name: lambda name=name: side(name) for name in "ab"}, rounds=2)
    assert order == ["a", "b", "a", "b"]
    rows = harness.summary(samples, "a", ("seconds",), MB=9.0)
    assert rows["a"] == {"seconds": {"median": 1.5, "min": 1.0, "max": 2.0}, "MB/s": 6.0}
    assert rows["b"]["seconds / a"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    assert harness.show(rows["b"]["seconds / a"]) == "3 (3 to 3)"


def test_clocks_tell_waiting_from_work():
    _, waiting = harness.timed(lambda: harness.time.sleep(0.2), steps=2)
    assert waiting["seconds"] >= 0.1 and waiting["cpu"] < waiting["seconds"] / 2
    working = harness.timer(lambda: [hash(str(i)) for i in range(300_000)])()
    assert 0 < working["main"] <= working["cpu"] + 0.01


def test_a_report_is_printed_and_written_with_its_circumstances(tmp_path, capsys):
    def measure(options):
        if options.rounds == 13:
            raise harness.UserError("--rounds 13: it brings bad luck")
        rows = [
            {"side": side, "seconds": 0.01234 * len(side), "machine": "one", "samples": [1]} for side in ("a", "bb")
        ]
        return {"sides": rows, "samples": {"a": [1.0]}}

    def flags(add):
        add("--rounds", type=harness.positive)
        add("--kinds", type=harness.listed(harness.one_of("x", "y")))

    def run(*words):
        try:
            return harness.run("about", flags, measure, harness.report_lines, words)
        except SystemExit as leaving:
            return leaving.code

    file = tmp_path / "report.json"
    assert run("--rounds", "3000", "--json", str(file)) == 0
    machine, *printed = capsys.readouterr().out.splitlines()
    assert f"{harness.processor_name()}, " in machine and "threads, load " in machine
    # What all rows share is named once.
    assert printed[:3] == ["options: rounds 3,000", "", "sides, machine one"]
    assert [line.split() for line in printed[-3:]] == [["side", "seconds"], ["a", "0.0123"], ["bb", "0.0247"]]
    report = json.loads(file.read_text())
    assert (
        report["options"] == {"rounds": 3000}
        and report["samples"] == {"a": [1.0]}
        and report["sides"][1]["samples"] == [1]
    )
    assert report["command"][1:] == ["--rounds", "3000", "--json", str(file)]
    assert {"commit", "processor", "threads", "load", "versions"} <= set(report["environment"]) and "date" in report
    for words in ("--rounds 0", "--rounds 13", "--kinds x,z", "--json no/such/file", "--wrong"):
        assert run(*words.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_name_of_the_processor(tmp_path):
    description = tmp_path / "cpuinfo"
    description.write_text("processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC  9R14 \nflags\t: avx2\n")
    assert harness.processor_name(str(description)) == "AMD EPYC 9R14"
    description.write_text("processor\t: 0\nCPU part\t: 0xd40\n")
    assert harness.processor_name(str(description)) == harness.processor_name(str(tmp_path / "absent")) != ""
