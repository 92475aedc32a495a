"""Studies that are run: kills, failures, parts, files and the command, with tiny models that share compiled steps."""

import dataclasses
import json
import os
import shutil
import signal

import pytest

pytest.importorskip("scipy")
from bert_jax.cli import main as cli
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, ModelConfig, Phase
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.experiments import cell_records, runner, study_plan, study_report
from bert_jax.experiments.study import HeldOutRows, Study
from bert_jax.provenance import code
from bert_jax.report.text import render
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.workdir import read_config
from tests.runs import Killed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.fixture(scope="module")
def study() -> Study:
    """Static and dynamic masks, three seeds of six steps."""
    model = ModelConfig(vocab_size=9, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)
    base = Config(
        name="small",
        model=model,
        phases=(Phase(steps=6, seq_len=32, batch_size=64, learning_rate=2e-2, warmup_steps=2),),
        checkpoint=CheckpointConfig(every=2, keep=3),
        log=LogConfig(every=2, tensorboard=False),
        evaluation=EvaluationConfig(every=0, rows=8, batch_size=8),
    )
    masks = {"dynamic": {}, "static": {"data": {"example_copies": 1, "mask_copies": 1}}}
    margins = {"mlm_loss": 10.0, "mlm_loss_area": 10.0, "mlm_tokens_to_loss": 1e5, "nsp_accuracy": 0.001}
    rows = HeldOutRows("full_sentences", 32, 8)
    return Study(name="small", base=base, factors={"masks": masks}, margins=margins, rows=rows)


@pytest.fixture(scope="module")
def start(study, tiny_corpus, tiny_programs):
    """Opens and runs the study in a directory; `hooks` are those of `runs.share_programs`."""

    def start(workdir, *hooks, part=(0, 1), retries=1, study=study, wrap=lambda make: make):
        opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], workdir)
        return runner.run_study(opened, wrap(tiny_programs(*hooks)), part, retries)

    return start


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """The directory of a study that was not interrupted."""
    workdir = tmp_path_factory.mktemp("finished") / "study"
    code, results = start(workdir)
    assert code == 0 and results == json.loads((workdir / "results.json").read_text())
    return workdir


def contents(workdir):
    """Results and page without times."""
    results = json.loads((workdir / "results.json").read_text())
    page = render([one for one in study_report.sections(workdir) if one.title not in ("time", "provenance")])
    return {name: value for name, value in results.items() if name not in ("timing", "provenance")}, page


def test_results(finished, study, tiny_corpus):
    results, page = contents(finished)
    assert [(row["level"], row["metric"]) for row in results["comparisons"]] == [
        ("static", metric) for metric in study.margins
    ]
    loss, *_ = results["comparisons"]
    # The run repeats its examples, so the masks make a difference, which is within the margin.
    assert "for the number of comparisons, 4 (Holm)" in " ".join(page.split())
    assert loss["difference"] != 0 and loss["verdict"] == "equal" and loss["seeds"] == 3
    assert len({run["metrics"]["mlm_loss"] for run in results["runs"]}) == 6
    assert "equal within the margin" in page and "3 paired seeds can show a difference of" in page
    for run in results["runs"]:
        assert [(point["step"], point["tokens"]) for point in run["curve"]] == [(n, n * 64 * 32) for n in (2, 4, 6)]
        assert run["curve"][-1]["mlm_loss"] == run["metrics"]["mlm_loss"] < run["curve"][0]["mlm_loss"]
    assert "held-out MLM loss by tokens" in page and "mean loss from 4,096 to 12,288 tokens" in " ".join(page.split())
    html = (finished / "report.html").read_text()
    assert "equal within the margin" in html and "http" not in html
    opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], finished)
    for run in opened.runs:
        config = read_config(run.directory)
        assert config.seed == run.index and config.model.vocab_size == Tokenizer.load(tiny_corpus).vocab_size
        assert (config.data.mask_copies == 1) == ("static" in run.cell.name)


def test_a_kill_changes_nothing(finished, start, tmp_path, monkeypatch, capsys):
    """SIGTERM, then kills in runs, after training, before and after a record; started again every time."""
    workdir, killed = tmp_path / "study", []
    write_record, measure = runner.write_record, runner.measure

    def kill_once(name):
        if name not in killed:
            killed.append(name)
            raise Killed

    def write(run, record):
        if run.index == 1:
            kill_once("before a record")
        write_record(run, record)
        kill_once("after a record")

    def measure_or_die(opened, run, make_programs):
        kill_once("after training")
        return measure(opened, run, make_programs)

    monkeypatch.setattr(runner, "write_record", write)
    monkeypatch.setattr(runner, "measure", measure_or_die)

    def terminate(count, _):
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert start(workdir, terminate) == (75, None)
    assert "stopped and saved in run 1 of 6, baseline seed 0" in capsys.readouterr().out
    for step in (3, 6):
        with pytest.raises(Killed):
            start(workdir, lambda count, _, step=step: kill_once(f"step {step}") if count == step else None)
    for _ in range(3):
        with pytest.raises(Killed):
            start(workdir)
    assert start(workdir)[0] == 0
    assert len(killed) == 5 and contents(workdir) == contents(finished)
    assert start(workdir)[1] is not None  # nothing is left to do
    assert contents(workdir) == contents(finished)


def test_runs_of_other_code_are_kept_and_named(finished, start, tmp_path, capsys):
    """As after an update in the middle of a study."""
    workdir = tmp_path / "study"
    shutil.copytree(finished, workdir)
    path = workdir / "cells" / "baseline" / "seed1.json"
    before = json.loads(path.read_text())
    assert before["code"] == code()
    path.write_text(json.dumps(before | {"code": {"version": "0.0.9", "commit": "", "sha256": "0123456789abcdef"}}))
    status, results = start(workdir)
    text = (
        "other code, which are kept: baseline/seed1 by bert_jax 0.0.9 (SHA-256 0123456789abcdef); the rest by bert_jax"
    )
    assert status == 0 and f"note: {workdir} has runs of {text}" in capsys.readouterr().err
    assert list(results["provenance"]["other_code"]) == ["baseline/seed1"]
    assert {**results, "timing": 0, "provenance": 0} == {**contents(finished)[0], "timing": 0, "provenance": 0}
    page = " ".join(contents(workdir)[1].split())
    assert "warning: Parts of this result were made by other code: baseline/seed1 by bert_jax 0.0.9" in page
    shown = page[page.index("configs -------") :]
    assert shown.index("data.mask_copies") < shown.index("model.hidden_size 16")  # what differs comes first
    assert "made by other code" in (workdir / "report.html").read_text()
    path.write_text(json.dumps(before | {"code": "0.0.9"}))
    with pytest.raises(UserError, match=r"seed1.json: code is '0.0.9': it must be an object: remove it"):
        start(workdir)


def test_parts_give_the_results_of_one_process(finished, start, tmp_path, capsys):
    workdir = tmp_path / "study"
    for index in (2, 0):
        assert start(workdir, part=(index, 3)) == (0, None)
    assert "4 of 6 runs are done" in capsys.readouterr().out and not (workdir / "results.json").exists()
    code, results = start(workdir, part=(1, 3))
    assert code == 0 and results is not None and contents(workdir) == contents(finished)


def failing(name, seed, times):
    """A `wrap` whose run of a cell and a seed fails so many times."""
    left = [times]

    def wrap(make):
        def make_programs(task, mesh):
            if task.config.name.endswith(name) and task.config.seed == seed and left[0] > 0:
                left[0] -= 1
                raise UserError("it fails\nevery time")
            return make(task, mesh)

        return make_programs

    return wrap


def test_failed_runs(finished, start, tmp_path, capsys):
    workdir = tmp_path / "study"
    code, results = start(workdir, wrap=failing("masks=static", 1, 2))
    assert code == 0 and "failed: masks=static seed 1: it fails every time" in capsys.readouterr().err
    loss = results["comparisons"][0]
    assert (loss["seeds"], loss["unscored"], loss["verdict"]) == (2, 1, None)
    page = contents(workdir)[1]
    assert "failed after 2 attempts: it fails every time" in page and "no verdict: fewer than 3 seeds" in page
    assert start(workdir)[1]["comparisons"][0]["unscored"] == 1  # it stays failed
    start(workdir, retries=2)  # unless it may be tried again
    results, expected = contents(workdir)[0], contents(finished)[0]
    assert [run.pop("attempts") for run in results["runs"]] == [1, 1, 1, 1, 3, 1]
    assert all(run.pop("attempts") for run in expected["runs"]) and results == expected


@pytest.mark.slow
def test_a_retry_succeeds(finished, start, tmp_path):
    _, results = start(tmp_path / "study", wrap=failing("baseline", 0, 1))
    assert results["comparisons"] == contents(finished)[0]["comparisons"]
    assert results["runs"][0]["attempts"] == 2


def test_a_metric_that_is_not_finite_is_a_failure(start, study, tmp_path, monkeypatch):
    lost = {"step": 3, "tokens": 9, "mlm_loss": float("inf")}
    monkeypatch.setattr(runner, "measure", lambda *_: ({"mlm_loss": float("nan"), "nsp_accuracy": 0.5}, [lost]))
    _, results = start(tmp_path / "study", study=dataclasses.replace(study, seeds=1), retries=0)
    assert [run["error"] for run in results["runs"]] == ["not finite: mlm_loss, mlm_loss of step 3"] * 2
    assert results["comparisons"][0]["difference"] is None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"start": {"source": "nowhere"}}, "study small, masks=wrong: nowhere"),
        ({"start": {"source": "nowhere@4"}}, "study small, masks=wrong: nowhere holds no run of bert_jax"),
        ({"mesh": {"fsdp": 7}}, "study small, masks=wrong: mesh"),
    ],
)
def test_a_level_that_cannot_begin_is_found_before_the_first_run(change, line, start, study, finished, tmp_path):
    """Also when it is added to a finished study, whose runs are kept."""
    wrong = dataclasses.replace(study, factors={"masks": study.factors["masks"] | {"wrong": change}})
    shutil.copytree(finished, tmp_path / "study")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=line):
        start(tmp_path / "study", study=wrong)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_full_disk_is_not_a_failed_run(start, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(runner, "measure", full)
    with pytest.raises(OSError, match="No space left"):
        start(tmp_path / "study")
    assert not list(tmp_path.glob("study/cells/*/*.json"))


def test_causal_checkpoints_have_no_point_of_a_curve(finished, study, tiny_corpus, monkeypatch):
    opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], finished)

    def evaluate(opened, source, form, make_programs):
        kind = "causal" if source.name == "00000002" else "mlm"
        return {f"{kind}_loss": 3.0, "pair_accuracy": 0.5}

    monkeypatch.setattr(runner, "_evaluate", evaluate)
    metrics, curve = runner.measure(opened, opened.runs[0], Programs)
    assert metrics["mlm_loss"] == 3.0 and [point["step"] for point in curve] == [4, 6]


def test_sigterm_while_a_run_is_measured_stops_before_the_next_one(start, study, tmp_path, monkeypatch, capsys):
    def measure(*_):
        signal.raise_signal(signal.SIGTERM)
        point = {"step": 1, "tokens": 1, "mlm_loss": 1.0}
        return {"mlm_loss": 1.0, "nsp_accuracy": 0.5}, [point, point]

    monkeypatch.setattr(runner, "measure", measure)
    assert start(tmp_path / "study", study=dataclasses.replace(study, seeds=1)) == (75, None)
    assert "stopped and saved in run 2 of 2" in capsys.readouterr().out
    assert len(list(tmp_path.glob("study/cells/*/*.json"))) == 1


def test_plan(finished, study, tiny_corpus, tmp_path):
    for workdir, done in ((finished, 3), (tmp_path / "new", 0)):
        opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], workdir)
        values = study_plan.plan_study(opened, (0, 2), 1)
        assert [cell["finished"] for cell in values["cells"]] == [done] * 2
        assert values["left"] == (0 if done else 3) and values["runs"] == 6
        text = render(study_plan.to_sections(values))
        assert ("(measured:" in text) == bool(done) and "12,288" in text and f"{done} of 3" in text
    assert not (tmp_path / "new").exists()


def test_the_plan_of_many_runs(study, tiny_corpus, tmp_path):
    opened = runner.open_study(dataclasses.replace(study, seeds=1000), [CorpusWeight(tiny_corpus)], tmp_path / "new")
    assert study_plan.plan_study(opened, (1, 3), 1)["left"] == 667


@pytest.mark.parametrize("metrics", [{}, {"mlm_loss": 1.0}, {"mlm_loss": 1.0, "nsp_accuracy": float("nan")}])
def test_a_record_without_a_score_is_damaged(metrics, study, tiny_corpus, tmp_path):
    opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], tmp_path / "study")
    run = opened.runs[0]
    values = {
        "format_version": cell_records.FORMAT_VERSION,
        "code": code(),
        "attempts": 1,
        "error": "",
        "metrics": metrics,
        "finetuned": {},
        "tokens": 1,
        "timing": {"seconds": 1.0},
    }
    point = {"step": 1, "tokens": 1, "mlm_loss": 1.0}
    values |= {"curve": [point, point]}
    cell_records.write_record(run, values)
    with pytest.raises(UserError, match=r"seed0.json: metrics.(mlm_loss|nsp_accuracy) is missing .* remove it"):
        cell_records.read_record(run)
    cell_records.write_record(run, values | {"metrics": {"mlm_loss": 1.0, "nsp_accuracy": 0.5}, "curve": [point]})
    with pytest.raises(UserError, match=r"seed0.json: the curve has fewer than two checkpoints.* remove it"):
        cell_records.read_record(run)
    cell_records.write_record(run, values | {"curve": [point, point | {"mlm_loss": float("inf")}]})
    with pytest.raises(UserError, match=r"seed0.json: the loss of the checkpoint of step 1 is not finite: remove it"):
        cell_records.read_record(run)
    cell_records.write_record(run, values | {"error": "it failed"})
    assert cell_records.read_record(run)["error"]


def drop(*path):
    """A change of a file: one key less."""

    def change(values):
        *outer, last = path
        for key in outer:
            values = values[key]
        del values[last]

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("results.json", dict.clear, "field 'format_version' is missing"),
        ("results.json", lambda values: values.update(format_version=9), "has format version 9"),
        ("results.json", drop("comparisons"), "field 'comparisons' is missing"),
        ("results.json", lambda values: values.update(comparisons=None), "comparisons is None"),
        ("results.json", lambda values: values.update(comparisons=[{}]), "field 'comparisons.0.factor' is missing"),
        ("results.json", lambda values: values.update(runs="a"), "runs is 'a'"),
        ("results.json", lambda values: values["runs"][0].update(metrics=None), "runs.0.metrics is None"),
        ("results.json", lambda values: values["comparisons"][0].update(verdict="so"), "verdict is 'so': it must be"),
        ("results.json", lambda values: values["provenance"].update(date=7), "provenance.date is 7"),
        ("results.json", lambda values: values.update(provenance="me"), "provenance is 'me': it must be an object"),
        ("results.json", lambda values: values["comparisons"][0].update(low=None), ""),
        ("results.json", lambda values: values["comparisons"][0]["detectable"].clear(), ""),
        ("study.json", dict.clear, "field 'format_version' is missing"),
        ("study.json", lambda values: values.update(format_version=9), "has format version 9"),
        ("study.json", drop("study"), "field 'study' is missing"),
        ("study.json", drop("study", "rows"), "field 'study.rows' is missing"),
        ("study.json", lambda values: values["study"]["rows"].update(count="many"), "study.rows.count is 'many'"),
    ],
)
def test_the_report_of_damaged_files_is_one_line(file, change, message, finished, tmp_path, capsys):
    for name in ("results.json", "study.json"):
        values = json.loads((finished / name).read_text())
        if name == file:
            change(values)
        (tmp_path / name).write_text(json.dumps(values))
    assert cli.main(["report", str(tmp_path)]) == (2 if message else 0)
    found = capsys.readouterr()
    if message:
        (line,) = found.err.splitlines()
        assert f"{tmp_path / file}" in line and message in line and not found.out


def test_a_level_is_added(finished, start, study, tmp_path):
    """Its runs are done, and no other one; the results have all."""
    workdir = tmp_path / "study"
    shutil.copytree(finished, workdir)
    masks = study.factors["masks"] | {"rare": {"objective": {"mask_rate": 0.1}}}
    more = dataclasses.replace(study, factors={"masks": masks})
    before = {path: path.read_bytes() for path in workdir.glob("cells/*/*.json")}
    assert start(workdir, part=(0, 100), study=more) == (0, None)
    assert (workdir / "results.json").read_bytes() == (finished / "results.json").read_bytes(), "not all runs are done"
    code, results = start(workdir, study=more)
    assert code == 0 and {row["level"] for row in results["comparisons"]} == {"static", "rare"}
    assert before.items() <= {path: path.read_bytes() for path in workdir.glob("cells/*/*.json")}.items()
    with pytest.raises(UserError, match=r"\(study.factors.masks.rare.objective.mask_rate 0.1 -> None\)"):
        start(workdir)


def test_one_line_for_every_mistake(finished, study, tiny_corpus, other_corpus, second_corpus, tmp_path):
    changed = dataclasses.replace(study, margins={"mlm_loss": 0.5})
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    for one, corpora, workdir, message in (
        (changed, [tiny_corpus], finished, r"began with other settings \(study.margins.mlm_loss 10.0 -> 0.5"),
        (study, [other_corpus], finished, r"began with other settings \(corpora"),
        (study, [tiny_corpus, second_corpus], finished, r"began with other settings \(corpora"),
        (study, [second_corpus, other_corpus], tmp_path / "new", "different tokenizers"),
        (study, [tmp_path / "none"], tmp_path / "new", "none"),
        (study, [tiny_corpus], tmp_path / "file", "holds files, but no study"),
        (study, [tiny_corpus], tmp_path / "other", "holds files, but no study"),
        (study, [tiny_corpus], finished / "cells" / "baseline" / "seed0", "holds files, but no study"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            runner.open_study(one, [CorpusWeight(corpus) for corpus in corpora], workdir)
        assert "\n" not in str(caught.value)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / cell_records.STUDY).write_text('{"format_version": 1}')
    with pytest.raises(UserError, match="it is damaged"):
        runner.open_study(study, [CorpusWeight(tiny_corpus)], tmp_path / "damaged")
