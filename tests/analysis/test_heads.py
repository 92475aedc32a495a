"""Heads: derivatives against a float64 twin, a planted head, losses of fine-tuning, orders of pruning, the suite."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax import report
from bert_jax.analysis.heads import SUITE, ablation, head_measures
from bert_jax.analysis.heads.heads import HeadsSettings, loss_items
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.command.progress import progress_bar
from bert_jax.config import TaskHead
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions import importance, pruning_masks, task_evaluation
from bert_jax.interventions.pruning_masks import CONTEXT
from bert_jax.model.heads import Heads
from tests.analysis import data_folder
from tests.interventions.models import LAYERS, masked_examples, small_model, small_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = (LAYERS, 2)
ALL = np.ones(SHAPE, bool)
TASK_HEADS = Heads(mlm=False, task=TaskHead("classification", ("0", "1"), "pooled"))
BAR = progress_bar("test", 1, "pass", shown=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return epath.Path(data_folder.write(tmp_path_factory.mktemp("heads") / "data"))


@pytest.fixture(scope="module")
def texts():
    return masked_examples()


def with_params(model: LoadedModel, change) -> LoadedModel:
    params = jax.tree.map(np.array, model.params)
    change(params)
    return task_evaluation.with_params(model, params)


def planted(layer: int, head: int) -> LoadedModel:
    """All heads but one send nothing to the next step."""

    def change(params):
        kernel = params["encoder"]["layers"]["attention_out"]["kernel"]
        kept = kernel[layer, head].copy()
        kernel[:] = 0
        kernel[layer, head] = kept

    return with_params(small_model(), change)


def test_a_planted_head_is_found(texts):
    model, at = planted(1, 0), (1, 0)

    def importances_under(mask):
        return importance.importance(pruning_masks.mask_derivatives(model, texts, {CONTEXT: mask})[CONTEXT]) * mask

    importances = importances_under(ALL)
    assert np.argwhere(importances).tolist() == [list(at)]
    assert head_measures.top_share(importances.ravel()) == 1
    unchanged = pruning_masks.evaluate(model, texts, {CONTEXT: ALL})
    alone = ablation.leave_one_out(lambda mask: pruning_masks.evaluate(model, texts, {CONTEXT: mask}), SHAPE, BAR)
    rises = alone.sums - unchanged.sums
    assert np.argwhere(np.abs(rises).sum(-1)).tolist() == [list(at)] and alone.sums.shape == (*SHAPE, texts.count)
    names = tuple(map(str, range(texts.count)))
    items = loss_items(names, unchanged, alone.sums.reshape(6, -1), alone.sums[at], is_mlm=True)
    assert items["loss"].scores["model"].sum() / items["loss"].weights["model"].sum() == pytest.approx(unchanged.loss)
    np.testing.assert_allclose(items["loss"].scores["no_head"] - unchanged.sums, rises[at])
    mean = items["rise of the loss without the head that matters most"].scores["mean_of_all_heads"]
    np.testing.assert_allclose(mean, rises[at] / 6)
    for iterative in (True, False):
        pruned, evaluations = ablation.prune(
            lambda mask: pruning_masks.evaluate(model, texts, {CONTEXT: mask}),
            importances_under,
            SHAPE,
            step=0.2,
            iterative=iterative,
            bar=BAR,
        )
        assert pruned["order"][-1][:2] == list(at) and pruned["removed"] == [0, 1, 2, 4, 5, 6]
        losses = [one.loss for one in evaluations]
        assert losses[:-1] == [unchanged.loss] * 5
        np.testing.assert_allclose(pruned["loss"]["value"], losses)
        np.testing.assert_allclose(evaluations[-1].sums, alone.sums[at])


def test_orders_of_pruning():
    """Losses count the heads that are left; importances change after the first removal."""
    first, later = np.array([[1.0, 2], [3, 4]]), np.array([[9.0, 8], [7, 6]])
    calls = []

    def importance(mask):
        calls.append(mask.sum())
        return first if mask.all() else later

    def evaluate(mask):
        return pruning_masks.Evaluation(np.array([float(mask.sum())]), np.ones(1), -float(mask.sum()))

    found = {
        iterative: ablation.prune(evaluate, importance, (2, 2), step=0.25, iterative=iterative, bar=BAR)[0]
        for iterative in (True, False)
    }
    assert [one[:2] for one in found[True]["order"]] == [[0, 0], [1, 1], [1, 0], [0, 1]]
    assert [one[:2] for one in found[False]["order"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert found[True]["loss"]["value"].tolist() == [4, 3, 2, 1, 0] and calls == [4, 3, 2, 1, 4]
    layers = ablation.without_layers(evaluate, later, BAR)
    assert layers["no_head"]["loss"] == [2, 2] and layers["one_head"] == {
        "loss": [3, 3],
        "score": [-3, -3],
        "head": [0, 0],
    }


def test_measures():
    assert (
        head_measures.counts_to_remove(6, 0.1) == [0, 1, 2, 3, 4, 5, 6]
        and head_measures.counts_to_remove(144, 0.5)[1] == 72
    )
    shares, curve = np.array([0, 0.25, 0.5, 0.75, 1]), np.array([2, 2.1, 2.3, 2.0, 9])
    assert [head_measures.removable_share(shares, curve, rise) for rise in (0.0, 0.1, 0.2, 9)] == [0, 0.25, 0.75, 1]
    assert np.isnan(head_measures.removable_share(shares, np.full((2, 5), np.nan), 0.1)).all()
    both = head_measures.removable_share(shares, np.stack([curve, np.full(5, 2.0)]), 0.1)
    assert both.tolist() == [0.25, 1]
    assert head_measures.top_share(np.ones(20)) == pytest.approx(0.1)
    assert head_measures.top_share(np.ones(25)) == pytest.approx(0.1)
    assert head_measures.top_share(np.stack([np.arange(15.0), np.ones(15)])).tolist() == pytest.approx(
        [(14 + 13 / 2) / 105, 0.1]
    )
    assert (
        head_measures.top_share(np.eye(12).ravel()) == pytest.approx(1) == head_measures.top_share(np.eye(20).ravel())
    )
    assert math.isnan(head_measures.top_share(np.zeros(4)))


def check_result(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    blocks = SUITE.blocks(result)
    kinds = [type(block) for block in blocks]
    assert (kinds.count(report.Heatmap), kinds.count(report.Curves), kinds.count(report.Table)) == (2, 2, 2)


def test_suite_on_text(data):
    inputs, settings = SuiteInputs(small_model(), data, 0, False), HeadsSettings(examples=5, random_orders=2, step=0.5)
    result = finish(SUITE.run(inputs, settings), "heads")[0]
    check_result(result)
    assert (result["examples"], result["importance_examples"], result["best_constant_score"]) == (5, 5, None)
    pruning = result["pruning"]
    iterative, once = (pruning[order]["loss"]["value"] for order in ("iterative", "once"))
    assert iterative[0] == result["loss"]["value"] == pruning["random"]["loss_mean"][0]
    assert iterative[-1] == once[-1] == pruning["random"]["loss_lowest"][-1]
    assert result["random_weights_top_tenth_share"] != result["top_tenth_share"]
    scalars, differences = SUITE.scalars(result), result["leave_one_out"]["loss_difference"]
    most = scalars["rise of the loss without the head that matters most (nats)"]
    assert most.value <= np.max(differences["value"]) + 1e-6 and "mean of all heads" in most.baselines
    assert np.allclose(np.array(result["leave_one_out"]["loss"]) - iterative[0], differences["value"], atol=1e-4)
    assert all(scalar.interval is not None for scalar in scalars.values())
    assert finish(SUITE.run(inputs, settings), "heads")[0] == result


def test_suite_on_a_task(data):
    model = small_model(TASK_HEADS)
    inputs = SuiteInputs(model, data, 0, False)
    settings = HeadsSettings(task="sst2", examples=30, random_orders=1, step=0.5)
    result = finish(SUITE.run(inputs, settings), "heads")[0]
    check_result(result)
    assert (result["examples"], result["importance_examples"], result["labels"]) == (24, 30, 24)


@pytest.mark.parametrize(
    ("heads", "changes", "message"),
    [
        (Heads(mlm=False), {}, "the model has no MLM head: give the task"),
        (Heads(), {"task": "sst2"}, "needs a fine-tuned model"),
        (
            dataclasses.replace(TASK_HEADS, task=dataclasses.replace(TASK_HEADS.task, labels=("a", "b"))),
            {"task": "sst2"},
            "the head of the model has the labels a, b",
        ),
    ],
)
def test_what_does_not_suit(data, heads, changes, message):
    model = small_model(heads)
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(model, data, 0, False), HeadsSettings(**changes))


@pytest.mark.parametrize(("name", "value"), [("step", 0.0), ("mask_share", 0.0)])
def test_wrong_settings(name, value):
    with pytest.raises(UserError, match=f"heads.{name}"):
        HeadsSettings(**{name: value})


def test_obstacles(data, tmp_path):
    inputs = SuiteInputs(small_model(), data, 0, False)
    assert SUITE.obstacle(inputs, HeadsSettings()) is None
    (tmp_path / "task").mkdir()
    without_text = dataclasses.replace(inputs, data=epath.Path(tmp_path))
    assert "no folder text" in SUITE.obstacle(without_text, HeadsSettings())
    causal = LoadedModel(
        dataclasses.replace(inputs.model.config, direction="causal"), Heads(), inputs.model.params, small_tokenizer()
    )
    assert "a causal model" in SUITE.obstacle(dataclasses.replace(inputs, model=causal), HeadsSettings())
