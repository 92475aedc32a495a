"""Studies that fine-tune: shared pretraining runs, scores, failed fine-tuning runs, and the data of the tasks."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

pytest.importorskip("scipy")
from bert_jax import statistics
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.experiments import budget, results, runner, study_plan, study_report
from bert_jax.experiments.study import HeldOutRows, Study
from bert_jax.report.text import render
from tests.experiments.test_results import record
from tests.experiments.test_study import make_study
from tests.finetune import task_files

pytestmark = pytest.mark.usefixtures("quick_compilation")
NORMS = {"none": {}, "layer": {"tasks": {"cls_norm": "layer"}}}
TASKS = {"sst2": {"seeds": 2, "steps": 12, "batch_size": 16, "learning_rate": 5e-3, "dropout": 0.0}}


@pytest.fixture(scope="module")
def task_data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("glue")
    for task in ("sst2", "cola"):
        task_files.write_glue(directory / task, task)
    return directory


@pytest.fixture(scope="module")
def study(tiny_config) -> Study:
    rows = HeldOutRows(seq_len=32, count=8)
    values = {"factors": {"norm": NORMS}, "margins": {"sst2": 0.5}, "tasks": TASKS}
    return Study(name="norms", base=tiny_config, rows=rows, seeds=2, **values)


def open_study(study, corpus, workdir, task_data):
    return runner.open_study(study, [CorpusWeight(corpus)], workdir, task_data)


def test_the_plan_counts_shared_runs_once(study, tiny_corpus, task_data, tmp_path, monkeypatch):
    monkeypatch.setattr(study_plan, "_planned_seconds", lambda _: 60.0)
    opened = open_study(study, tiny_corpus, tmp_path / "study", task_data)
    values = study_plan.plan_study(opened, (0, 1), 1)
    assert (values["left"], values["seconds_left"]) == (4, 120.0)


@pytest.mark.slow
def test_a_study_that_fine_tunes(study, tiny_corpus, task_data, tiny_programs, tmp_path):
    opened = open_study(study, tiny_corpus, tmp_path / "study", task_data)
    stopped = []

    def terminate(count, _):
        if count == 10 and not stopped:  # pretraining has 8 steps
            stopped.append(count)
            os.kill(os.getpid(), signal.SIGTERM)

    assert runner.run_study(opened, tiny_programs(terminate)) == (75, None)
    code, found = runner.run_study(opened, tiny_programs())
    assert code == 0 and not any(run["error"] for run in found["runs"])
    cells = tmp_path / "study/cells"
    assert sorted(path.name for path in cells.iterdir()) == ["baseline", "norm=layer"]
    assert (cells / "baseline/seed1/checkpoints").is_dir() and not (cells / "norm=layer/seed1").exists()
    scores = json.loads((cells / "norm=layer/seed1.finetuned/sst2/results.json").read_text())
    # The second pretraining seed has fine-tuning seeds of its own.
    assert [one["seed"] for one in scores["seeds"]] == [2, 3]
    (run,) = (run for run in found["runs"] if run["cell"] == "norm=layer" and run["seed"] == 1)
    assert run["finetuned"]["sst2"]["scores"] == [one["score"] for one in scores["seeds"]]
    (row,) = found["comparisons"]
    assert row["metric"] == "sst2" and row["seeds"] == 2 and row["bootstrap_low"] <= row["bootstrap_high"]
    for run in opened.runs:
        of_run = json.loads(run.record_path.read_text())
        assert np.mean(of_run["finetuned"]["sst2"]["examples"]) == pytest.approx(of_run["metrics"]["sst2"], abs=1e-5)
    assert "fine-tuning seed: sampled" in render(study_report.sections(tmp_path / "study"))


def test_parts_keep_shared_pretraining_together(study, tiny_corpus, task_data, tmp_path):
    opened = open_study(study, tiny_corpus, tmp_path / "new", task_data)
    parts = [runner.runs_of_part(opened.runs, (index, 2)) for index in range(2)]
    assert [[(run.cell.name, run.index) for run in part] for part in parts] == [
        [("baseline", index), ("norm=layer", index)] for index in range(2)
    ]


def test_held_out_rows_are_scored_only_for_margins(study, tiny_corpus, task_data, tmp_path, monkeypatch):
    """A level may have no MLM head, as replaced-token detection."""
    opened = open_study(study, tiny_corpus, tmp_path / "new", task_data)
    monkeypatch.setattr(runner.pretraining, "evaluate", lambda *_, **__: pytest.fail("nothing is compared"))
    assert runner.measure(opened, opened.runs[0], lambda *_: None) == ({}, [])


@pytest.mark.slow
def test_results_of_fine_tuning():
    """The multi-bootstrap of per-example scores; failed fine-tuning runs are shown; all failed: no score."""
    study = make_study(factors={"norm": NORMS}, tasks={"sst2": {}}, margins={"sst2": 0.5})
    cells, rng = budget.make_cells(study, 99), np.random.default_rng(0)
    matrices = {"baseline": rng.random((3, 40)), "norm=layer": rng.random((3, 40)) + 0.5}
    records = {}
    for name, matrix in matrices.items():
        records[name] = [record(sst2=float(row.mean())) for row in matrix]
        for one, row in zip(records[name], matrix, strict=True):
            scores = {"scores": [0.5, 0.4, None], "failed": 2, "learning_rates": []}
            one["finetuned"] = {"sst2": scores | {"examples": row.tolist()}}
    (row,) = results.compare_levels(study, cells, records)
    sides = [statistics.SeedScores.from_examples(matrices[name]) for name in ("norm=layer", "baseline")]
    expected = statistics.multibootstrap(*sides, 40, paired=True, seed=0)
    assert (row["bootstrap_low"], row["bootstrap_high"]) == (expected.low, expected.high)
    shown = study_report._failures(results.make_results(study, cells, records)["runs"][0])
    assert shown == "sst2: 2 of 3 fine-tuning runs failed, 1 of them diverged"
    records["norm=layer"][1] |= {"metrics": {}}
    assert results.compare_levels(study, cells, records)[0]["seeds"] == 2


@pytest.mark.parametrize(
    ("changes", "data", "message"),
    [
        ({"tasks": {"sst3": {}}, "margins": {"mlm_loss": 1.0}}, "there", "--task sst3 is unknown"),
        ({"tasks": {"sst2": {"epoch": 3}}}, "there", "tasks.sst2: there is no option 'epoch': did you mean 'epochs'"),
        ({"tasks": {"sst2": {"epochs": -1.0}}}, "there", "epochs is -1"),
        ({"tasks": {"sst2": {"learning_rate": (1e-4, 1e-4)}}}, "there", "learning_rate: give different rates"),
        (
            {"tasks": {"cola": {"learning_rate": (1e-4, 2e-4)}}, "margins": {"cola": 0.1}},
            "there",
            "tasks.cola has several learning rates, and its score is not the accuracy of texts",
        ),
        ({"tasks": {}, "margins": {"mlm_loss": 1.0}}, "there", "norm layer: tasks: the study has no tasks"),
        ({"tasks": {}}, "there", "there is no metric 'sst2'"),
        ({"factors": {"a": {"x": {}, "y": {"seed": object()}}}}, "there", "a=y: seed is <object "),
        ({}, None, "fine-tunes on sst2: add --task-data DIR"),
        ({}, "elsewhere", "--task-data: there is no directory"),
        ({}, "ragged", "sst2/train.tsv:2 has 1 columns"),
    ],
)
def test_mistakes(changes, data, message, study, tiny_corpus, task_data, tmp_path):
    """Before any run: the files of the tasks are read, too."""
    task_files.write_glue(tmp_path / "ragged" / "sst2", "sst2")
    (tmp_path / "ragged" / "sst2" / "train.tsv").write_text("sentence\tlabel\nthe river\n")
    directory = {"there": task_data, "elsewhere": tmp_path, "ragged": tmp_path / "ragged", None: None}[data]
    with pytest.raises(UserError, match=message):
        open_study(dataclasses.replace(study, **changes), tiny_corpus, tmp_path / "new", directory)


def test_other_data_of_a_task_is_another_study(study, tiny_corpus, task_data, tmp_path):
    opened = open_study(study, tiny_corpus, tmp_path / "study", task_data)
    runner.write_identity(opened.workdir, opened.identity)
    other = tmp_path / "glue"
    task_files.write_glue(other / "sst2", "sst2")
    (other / "sst2" / "train.tsv").write_text("sentence\tlabel\nthe river\t1\n")
    with pytest.raises(UserError, match=r"other settings \(task_data.sst2"):
        open_study(study, tiny_corpus, tmp_path / "study", other)
