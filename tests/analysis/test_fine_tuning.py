"""Fine-tuned and pretrained models: measures against twins, restored layers bit for bit, losses of known points."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from etils import epath
from scipy import stats

import bert_jax
from bert_jax import report
from bert_jax.analysis.fine_tuning import SUITE, similarities, weights
from bert_jax.analysis.fine_tuning.fine_tuning import FineTuningSettings
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.config import TaskHead
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves
from tests.finetune import task_files
from tests.interventions.models import LAYERS, small_model, small_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
HEADS = Heads(pair=True, task=TaskHead("classification", ("no", "yes"), "pooled"))


@pytest.fixture(scope="module")
def pair():
    """Parameters of a fine-tuned model and of its base, all different."""
    return tuple(jax.tree.map(np.asarray, small_model(HEADS, seed).params) for seed in (0, 1))


@pytest.fixture(scope="module")
def task_run(sst2_run, tmp_path_factory):
    """The data directory of a suite, and the work directory of a model that was fine-tuned on its task."""
    data = tmp_path_factory.mktemp("finetuned") / "data"
    task_files.write_glue(data / "task", "sst2")
    return epath.Path(data), epath.Path(sst2_run)


def same(first, second, choose=lambda path: True) -> bool:
    other = name_leaves(second)
    return all(np.array_equal(leaf, other[path]) for path, leaf in name_leaves(first).items() if choose(path))


def test_cka_equals_its_twin_and_ignores_rotation():
    rng = np.random.default_rng(0)
    x, y = rng.normal(2, 1, (40, 6)), rng.normal(0, 3, (40, 9))
    y[:, :4] += x[:, :4]

    def gram(vectors):
        centring = np.eye(40) - 1 / 40
        return centring @ vectors @ vectors.T @ centring

    first, second = gram(x), gram(y)
    expected = np.trace(first @ second) / np.sqrt(np.trace(first @ first) * np.trace(second @ second))
    assert 0.1 < expected < 0.9
    np.testing.assert_allclose(similarities.linear_cka(x, y), expected, rtol=1e-10)
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    np.testing.assert_allclose(similarities.linear_cka(x, 3 * x @ rotation + 5), 1, rtol=1e-12)
    assert similarities.cosines(x, x @ rotation).mean() < 0.9
    parts = np.arange(len(x)) % 4
    found = similarities.cka_with_interval(x, y, parts)
    without = [similarities.linear_cka(x[parts != one], y[parts != one]) for one in range(4)]
    error = np.sqrt(3 / 4 * np.square(without - np.mean(without)).sum())
    assert found.value == pytest.approx(expected)
    np.testing.assert_allclose(found.low, expected - stats.t.ppf(0.975, 3) * error, rtol=1e-6)
    assert np.isnan(similarities.cka_with_interval(x, y, np.zeros(len(x), int)).low)


def test_cosines():
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 3, 5, 5)), rng.random((2, 3, 5, 5))
    flat = x[1, 2].ravel(), y[1, 2].ravel()
    expected = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    found = similarities.attention_cosines(x, y)
    np.testing.assert_allclose(found[1, 2], expected)
    padded = [np.pad(maps, ((0, 0), (0, 0), (0, 2), (0, 2))) for maps in (x, y)]
    np.testing.assert_allclose(similarities.attention_cosines(*padded), found)
    np.testing.assert_allclose(similarities.attention_cosines(x, 2 * x), 1)


def test_parameter_distances(pair):
    _, base = pair
    changed = jax.tree.map(np.array, base)
    changed["encoder"]["layers"]["up"]["kernel"][1] *= 1.5
    changed["encoder"]["pooler"]["kernel"] += 1
    found = similarities.relative_parameter_changes(changed, base)
    assert found.pop("encoder/layers/up/kernel") == pytest.approx([0, 0.5, 0])
    assert "encoder/pooler/kernel" not in found and not any(np.any(value) for value in found.values())


def test_restored_layers(pair):
    tuned, base = pair
    last = weights.num_stages(tuned)
    assert last == 1 + LAYERS and not same(tuned, base, weights.is_body)
    assert same(weights.restore_early(tuned, base, 0), tuned)
    assert same(weights.restore_early(tuned, base, last), base, weights.is_body)
    assert same(weights.restore_early(tuned, base, last), tuned, lambda path: not weights.is_body(path))
    two = weights.restore_early(tuned, base, 3)["encoder"]
    assert same(two["embeddings"], base["encoder"]["embeddings"])
    for layer, expected in enumerate((base, base, tuned)):
        kernels = [one["encoder"]["layers"]["qkv"]["kernel"][layer] for one in ({"encoder": two}, expected)]
        assert np.array_equal(*kernels)


def test_points_of_the_line(pair):
    tuned, base = pair
    assert same(weights.point_on_line(tuned, base, 1.0), tuned)
    at_base = weights.point_on_line(tuned, base, 0.0)
    assert same(at_base, base, weights.is_body) and same(at_base, tuned, lambda path: not weights.is_body(path))
    middle = weights.point_on_line(tuned, base, 0.5)["encoder"]["layers"]["up"]["kernel"]
    expected = (tuned["encoder"]["layers"]["up"]["kernel"] + base["encoder"]["layers"]["up"]["kernel"]) / 2
    np.testing.assert_allclose(middle, expected, atol=1e-6)


def settings(base, /, **changes) -> FineTuningSettings:
    values = {"task": "sst2", "examples": 10, "loss_examples": 12, "line": (0.0, 0.5, 1.0)}
    return FineTuningSettings(**{"base": str(base)} | values | changes)


def test_suite(task_run, tiny_run):
    data, run = task_run
    inputs = SuiteInputs(bert_jax.load(run), data, seed=0, progress=False)
    result, items = finish(SUITE.run(inputs, settings(tiny_run)), "fine-tuning")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    reported = json.loads((run / "results.json").read_text())
    scores, columns = result["restored_score"], result["uncertainty"]["accuracy on dev"]["columns"]
    assert scores["value"][0] == pytest.approx(reported["mean"])
    lines = [json.loads(line) for line in (run / "predictions" / "dev.jsonl").read_text().splitlines()]
    right = [line["prediction"] == line["label"] for line in lines]
    assert items["accuracy on dev"].scores["model"].tolist() == right and 0 < np.mean(right) < 1
    assert [{key: of[i] for key, of in scores.items()} for i in range(len(columns) - 1)] == list(columns.values())[:-1]
    assert result["random_body_score"] == columns["random body"]
    assert list(columns)[2] == f"base's embeddings and 1 of {result['layers']} layers"
    assert result["best_constant_score"] == pytest.approx(reported["baseline"])
    line = result["line_loss"]
    assert line[-1] == result["restored_loss"][0] and line[0] == result["restored_loss"][-1] != line[-1]
    assert line[-1]["train"]["value"] < result["random_body_loss"]["train"]["value"]
    base, random = (result["similarity"][name] for name in ("base", "random_weights"))
    assert len(base["cka_of_tokens"]["low"]) == len(base["cosine_of_cls"]["low"]) == result["layers"] + 1
    assert base["cosine_of_cls"]["value"][0] > random["cosine_of_cls"]["value"][0]
    assert np.shape(base["attention_cosine"])[0] == result["layers"]
    assert all(scalar.interval is not None for scalar in SUITE.scalars(result).values())
    score = SUITE.scalars(result)["score"]
    assert (score.value, *score.interval) == tuple(of[0] for of in scores.values())
    assert score.baselines == {
        "random body": result["random_body_score"]["value"],
        "best constant": result["best_constant_score"],
    }
    kinds = [type(block) for block in SUITE.blocks(result)]
    assert (kinds.count(report.Heatmap), kinds.count(report.Curves)) == (2, 3)


def test_a_model_beside_itself(task_run):
    data, run = task_run
    inputs = SuiteInputs(bert_jax.load(run), data, seed=0, progress=False)
    result = SUITE.run(inputs, settings(run, line=(0.0,)))
    base = result["similarity"]["base"]
    for name, values in base.items():
        every = list(values.values()) if isinstance(values, dict) else values
        np.testing.assert_allclose(every, 0 if name == "attention_half_width" else 1, atol=1e-6)
    assert len({json.dumps(loss) for loss in result["restored_loss"]}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": ""}, "--fine-tuning.base is missing"),
        ({"task": ""}, "--fine-tuning.task is missing"),
        ({"base": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_wrong_settings(task_run, tiny_run, changes, message):
    data, run = task_run
    inputs = SuiteInputs(bert_jax.load(run), data, seed=0, progress=False)
    with pytest.raises(UserError, match=message):
        SUITE.run(inputs, settings(tiny_run, **changes))


def test_models_that_do_not_fit(task_run, tiny_run):
    data, run = task_run
    model = bert_jax.load(run)
    fitting = SuiteInputs(model, data, seed=0, progress=False)
    wider = dataclasses.replace(model.config, num_heads=1)
    other_labels = Heads(task=TaskHead("classification", ("x", "y"), "pooled"))
    for changed, message in (
        (LoadedModel(model.config, Heads(), model.params, model.tokenizer), "has no task head"),
        (LoadedModel(wider, model.heads, model.params, model.tokenizer), "has num_heads 2, the model 1"),
        (LoadedModel(model.config, model.heads, model.params, small_tokenizer()), "has another vocabulary"),
        (
            LoadedModel(model.config, other_labels, model.params, model.tokenizer),
            "head of the model has the labels x, y",
        ),
    ):
        with pytest.raises(UserError, match=message):
            SUITE.run(fitting.__class__(changed, data, 0, False), settings(tiny_run))
