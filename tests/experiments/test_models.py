"""Studies of models that exist: fixed ones, one for each seed, recipes, and rates that halves of dev choose."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("scipy")
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.experiments import finetuned, models, results, runner, study_plan, study_report
from bert_jax.experiments.level_pairs import level_pairs
from bert_jax.experiments.study import HeldOutRows, Study, load_study
from bert_jax.finetune.seed_run import SeedResult
from bert_jax.report.text import render
from tests.finetune import task_files
from tests.pages import code_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
TASKS = {"sst2": {"steps": 12, "batch_size": 16, "learning_rate": 5e-3, "dropout": 0.0}}
RATES = {"tasks": {"learning_rate": (1e-3, 5e-3)}}
ABC, DEF = ("a", "b", "c"), ("d", "e", "f")


def make_study(**changes) -> Study:
    values = {"name": "s", "tasks": TASKS, "margins": {"sst2": 0.5}, "rows": HeldOutRows(seq_len=32, count=8)}
    return Study(**(values | {"seeds": 3} | changes))


def levels(*of_models, **others):
    """A factor with a level for each tuple of models."""
    named = [(one,) if isinstance(one, str) else one for one in of_models]
    return {"model": {f"m{i}": {"models": one} for i, one in enumerate(named)} | others}


def known(study, seeds=""):
    """What is known of a study's models; those at the index of a seed in `seeds` are runs with it."""
    paths = dict.fromkeys(path for one in study.combinations() for path in study.models_of(one))
    numbers = dict(zip(paths, map(int, seeds), strict=False))
    return {path: models.StudiedModel(path, "t", numbers.get(path), 9) for path in paths}


@pytest.mark.parametrize(
    ("factors", "seeds", "paired", "sampled"),
    [
        (levels("a", "b"), "", True, "not sampled: each level is one model"),
        (levels(ABC, DEF), "", False, "sampled: 3 models of each level"),
        (levels(ABC, DEF), "012012", True, "sampled: 3 models"),
        (levels(ABC, DEF), "012345", False, "sampled: 3 models"),
        (levels(ABC, "d"), "0120", False, "sampled, but not in model=m1"),
    ],
)
def test_pairs_of_models(factors, seeds, paired, sampled):
    study = make_study(factors=factors)
    cells = models.make_model_cells(study, known(study, seeds))
    (pair,) = level_pairs(study, cells)
    assert pair.paired == paired and not pair.share_pretraining
    assert results.sampled_sources(study, cells)["pretraining seed"].startswith(sampled)


def test_the_study_of_the_docs(tmp_path):
    (tmp_path / "two_steps.py").write_text(code_of("docs/ablation.md", "py"))
    study = load_study(str(tmp_path / "two_steps.py"))
    cells = models.make_model_cells(study, known(study, "012012"))
    assert [cell.name for cell in cells] == ["baseline", "steps=earlier", "rate=chosen"]
    assert all(pair.paired for pair in level_pairs(study, cells))


def test_recipes_share_their_models():
    study = make_study(models=ABC, factors={"recipe": {"one": {}, "chosen": RATES}})
    first, second = models.make_model_cells(study, known(study))
    assert second.pretrained == first.name and first.models == second.models == ABC
    assert [[one.learning_rate for one in cell.tasks["sst2"]] for cell in (first, second)] == [[5e-3], [1e-3, 5e-3]]
    (pair,) = level_pairs(study, [first, second])
    assert pair.paired and pair.share_pretraining


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 1}, "s: seeds is 1: an interval needs at least 2 seeds"),
        ({"factors": levels("a", ("b", "c"))}, "model=m1 has 2 models for 3 seeds: give one"),
        ({"factors": levels("a", ("b", "b", "c"))}, "give one, which all seeds fine-tune, or a different one for each"),
        ({"factors": levels("a", "a")}, "model=m1 and baseline would have equal runs"),
        ({"factors": levels("a", m1={})}, "model=m1 has no models, and others have"),
        ({"factors": {"model": {"x": {"models": "a"}, "y": {}}}}, "models is 'a': it must be a tuple of paths"),
        ({"factors": levels("a", "b") | {"x": {"y": {}, "z": {"model": {"num_layers": 1}}}}}, "model changes pretrain"),
        (
            {"factors": levels("a", "b") | {"x": {"y": {}, "z": {"models": ("c",)}}}, "design": "grid"},
            "both change",
        ),
        ({"margins": {"nsp_accuracy": 0.1}}, "margins.nsp_accuracy: a study of models compares mlm_loss"),
        ({"margins": {"mlm_loss": 0.1}}, "baseline is one model, whose held-out loss has no spread .* --compare B"),
    ],
)
def test_mistakes(changes, message):
    study = make_study(**({"factors": levels("a", "b")} | changes))
    with pytest.raises(UserError, match=message) as caught:
        models.make_model_cells(study, known(study))
    assert "\n" not in str(caught.value)


def results_of(rng, accuracies, seeds, size):
    """Fine-tuning results by rate and seed; every example is right with the accuracy of its rate."""
    return [[SeedResult(s, one, False, {}, rng.random(size) < one) for s in range(seeds)] for one in accuracies]


def test_no_example_chooses_for_itself():
    """Of eight equal rates, the best on dev has a score that is too high, and the choice by halves has not."""
    rng = np.random.default_rng(0)
    nested, best = [], []
    for index in range(300):
        found = results_of(rng, [0.7] * 8, 1, 60)
        best.append(max(runs[0].correct.mean() for runs in found))
        nested += finetuned.choose_by_halves(found, range(8), np.random.default_rng(index))["scores"]
    assert np.mean(best) > 0.77
    assert np.mean(nested) == pytest.approx(0.7, abs=4 * np.std(nested) / np.sqrt(300))


def test_the_better_rate_is_chosen_and_a_diverged_one_is_not():
    rng = np.random.default_rng(0)
    found = results_of(rng, [0.6, 0.95, 0.8], 3, 200)
    diverged = SeedResult(0, float("nan"), True, {})
    found[1][1] = found[0][2] = found[1][2] = found[2][2] = diverged
    scores = finetuned.choose_by_halves(found, [1.0, 2.0, 3.0], rng)
    assert scores["learning_rates"] == [[2.0, 2.0], [3.0, 3.0]]
    first, second = found[1][0].correct, found[2][1].correct
    assert scores["scores"] == [first.mean(), second.mean(), None] and scores["failed"] == 1
    assert scores["examples"] == pytest.approx(((first + 0.0 + second) / 2).tolist())


@pytest.fixture(scope="module")
def task_data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("glue")
    task_files.write_glue(directory / "sst2", "sst2")
    return directory


@pytest.mark.slow
def test_two_checkpoints_and_a_recipe(tiny_run, task_data, tiny_programs, tmp_path):
    """Two fixed models without a corpus; the second factor chooses a learning rate."""
    paths = [str(tiny_run / "checkpoints" / step) for step in ("00000004", "00000008")]
    study = make_study(models=(paths[0],), factors=levels(*paths) | {"recipe": {"one": {}, "chosen": RATES}}, seeds=2)
    opened = runner.open_study(study, [], tmp_path / "study", task_data)
    assert study_plan.plan_study(opened, (0, 1), 1)["seconds_left"] is None
    code, found = runner.run_study(opened, tiny_programs())
    assert code == 0 and not any(run["error"] for run in found["runs"]) and found["curves"] is None
    rows = [(row["factor"], row["seeds"], row["paired"]) for row in found["comparisons"]]
    assert rows == [("model", 2, True), ("recipe", 2, True)]
    chosen = [run["finetuned"]["sst2"]["learning_rates"] for run in found["runs"] if run["cell"] == "recipe=chosen"]
    assert all(rate in RATES["tasks"]["learning_rate"] for (pair,) in chosen for rate in pair)
    assert not list((tmp_path / "study/cells").glob("*/seed?"))  # nothing is pretrained
    page = render(study_report.sections(tmp_path / "study"))
    assert "pretraining seed: not sampled: each level is one model" in " ".join(page.split())
    assert "--corpus" not in page and "nothing was pretrained" in page
    assert opened.identity["models"][paths[0]][:16] in page
    values = study_plan.plan_study(opened, (0, 1), 1)
    assert values["left"] == 0 and values["cells"][0]["seconds"] is not None


@pytest.mark.slow
def test_runs_with_other_seeds(tiny_run, tiny_corpus, other_corpus, tiny_programs, tmp_path):
    """Held-out losses of several runs a level; what cannot be compared is refused before anything is computed."""
    paths = []
    for index in range(4):
        directory = tmp_path / f"run{index}"
        shutil.copytree(tiny_run, directory)
        described = json.loads((directory / "config.json").read_text())
        described["config"]["seed"] = index % 2
        (directory / "config.json").write_text(json.dumps(described))
        paths.append(str(directory / "checkpoints" / ("00000008" if index < 2 else "00000004")))
    study = make_study(factors=levels(paths[:2], paths[2:]), tasks={}, margins={"mlm_loss": 0.1}, seeds=2)
    opened = runner.open_study(study, [CorpusWeight(tiny_corpus)], tmp_path / "study")
    _, found = runner.run_study(opened, tiny_programs())
    (row,) = found["comparisons"]
    assert row["paired"] and row["difference"] > 0 and found["variances"] == []
    missing = dataclasses.replace(study, factors=levels(["none", paths[0]], paths[2:]))
    for one, parts, message in (
        (study, [], "margins.mlm_loss is of held-out rows: add --corpus DIR"),
        (study, [other_corpus], "has another tokenizer than the corpora"),
        (missing, [tiny_corpus], "none does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            runner.open_study(one, [CorpusWeight(corpus) for corpus in parts], tmp_path / "new")
