"""Heads: derivatives against a float64 twin, a planted head, losses of fine-tuning, orders of pruning, the suite."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from etils import epath

from bert_jax import report
from bert_jax.analysis import task_evaluation
from bert_jax.analysis.heads import SUITE, ablation, examples, losses, measures
from bert_jax.analysis.heads.heads import HeadsSettings
from bert_jax.analysis.heads.losses import ACTIVATIONS, CONTEXT
from bert_jax.analysis.rows import sample_texts
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.command.progress import progress_bar
from bert_jax.config import TaskHead
from bert_jax.errors import UserError
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from tests.analysis import data_folder
from tests.analysis.models import LAYERS, small_model, small_tokenizer
from tests.finetune import tiny_task

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = (LAYERS, 2)
ALL = np.ones(SHAPE, bool)
TASK_HEADS = Heads(mlm=False, task=TaskHead("classification", ("0", "1"), "pooled"))
BAR = progress_bar("test", 1, "pass", shown=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return epath.Path(data_folder.write(tmp_path_factory.mktemp("heads") / "data"))


@pytest.fixture(scope="module")
def texts(data):
    tokenizer = small_model().tokenizer
    rows = sample_texts([data / "text" / "a.txt"], tokenizer, 32, 6, seed=1).rows
    return examples.masked_texts(rows, tokenizer, 0.3, seed=0)


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


def twin_losses(model: LoadedModel, batch: losses.ExampleBatch, mask: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The losses of examples in NumPy and float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    embeddings, layers = params["encoder"]["embeddings"], params["encoder"]["layers"]

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt(np.square(x - x.mean(-1, keepdims=True)).mean(-1, keepdims=True) + 1e-12) * p["scale"]
            + p["bias"]
        )

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    ids, types, present = batch.inputs
    x = embeddings["word"][ids] + embeddings["token_type"][types] + embeddings["position"][: ids.shape[1]]
    x = norm(x, embeddings["norm"])
    for layer in range(LAYERS):
        p = jax.tree.map(lambda one, layer=layer: one[layer], layers)
        query, key, value = np.moveaxis(np.einsum("bsh,hcnd->bscnd", x, p["qkv"]["kernel"]) + p["qkv"]["bias"], 2, 0)
        scores = np.einsum("bqnd,bsnd->bnqs", query, key) / math.sqrt(query.shape[-1])
        scores = np.where(present[:, None, None] > 0, scores, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = np.einsum("bnqs,bsnd->bqnd", weights, value) * mask[layer][:, None]
        out = np.einsum("bqnd,ndh->bqh", context, p["attention_out"]["kernel"]) + p["attention_out"]["bias"]
        x = norm(x + out, p["attention_norm"])
        up = gelu(x @ p["up"]["kernel"] + p["up"]["bias"]) * units[layer]
        x = norm(x + up @ p["down"]["kernel"] + p["down"]["bias"], p["feed_forward_norm"])
    x = np.take_along_axis(x, batch.positions[..., None], 1)
    head = params["mlm"]
    x = norm(gelu(x @ head["transform"]["kernel"] + head["transform"]["bias"]), head["norm"])
    logits = x @ embeddings["word"].T + head["bias"]
    logits -= logits.max(-1, keepdims=True)
    likelihoods = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(likelihoods, np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    valid = batch.labels >= 0
    return -(chosen * valid).sum(1) / np.maximum(valid.sum(1), 1)


def test_derivatives_are_finite_differences_of_a_float64_twin(texts):
    """Of heads, and of every seventh unit."""
    model, (batch,) = small_model(), texts.batches
    masks = {CONTEXT: np.ones(SHAPE), ACTIVATIONS: np.ones((LAYERS, model.config.intermediate_size))}
    masks[CONTEXT][1, 0], masks[ACTIVATIONS][:, ::3] = 0.25, 0.5
    evaluation = losses.evaluate(model, texts, masks)
    used = batch.indices >= 0
    order = batch.indices[used]
    np.testing.assert_allclose(
        (evaluation.sums / evaluation.weights)[order], twin_losses(model, batch, *masks.values())[used], rtol=1e-5
    )
    found = losses.mask_derivatives(model, texts, masks)
    for site, every in ((CONTEXT, 1), (ACTIVATIONS, 7)):
        expected = np.zeros_like(found[site])
        for layer, i in [at for at in np.ndindex(*masks[site].shape) if at[1] % every == 0]:
            sides = []
            for step in (1e-5, -1e-5):
                moved = {name: mask.copy() for name, mask in masks.items()}
                moved[site][layer, i] *= 1 + step
                sides.append(twin_losses(model, batch, *moved.values())[used])
            expected[order, layer, i] = (sides[0] - sides[1]) / 2e-5
        expected = expected[:, :, ::every]
        assert np.abs(expected).min(axis=(0, 1, 2)) > 0 and np.abs(expected).max() > 0.02
        atol = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found[site][:, :, ::every], expected, atol=atol, rtol=1e-3)


def test_derivatives_are_finite_differences_of_the_model(texts):
    model, mask, step = small_model(), np.ones(SHAPE), 0.02
    found = losses.mask_derivatives(model, texts, {CONTEXT: mask})[CONTEXT]
    for layer, head in np.ndindex(*SHAPE):
        sides = []
        for sign in (1, -1):
            moved = mask.copy()
            moved[layer, head] += sign * step
            one = losses.evaluate(model, texts, {CONTEXT: moved})
            sides.append(one.sums / one.weights)
        expected = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found[:, layer, head], expected, atol=1e-3 * np.abs(found).max())


def test_a_planted_head_is_found(texts):
    model, at = planted(1, 0), (1, 0)

    def importance(mask):
        return measures.importance(losses.mask_derivatives(model, texts, {CONTEXT: mask})[CONTEXT]) * mask

    importances = importance(ALL)
    assert np.argwhere(importances).tolist() == [list(at)]
    assert measures.top_share(importances) == 1
    unchanged = losses.evaluate(model, texts, {CONTEXT: ALL})
    alone = ablation.leave_one_out(lambda mask: losses.evaluate(model, texts, {CONTEXT: mask}), unchanged, SHAPE, BAR)
    assert np.argwhere(alone["loss_difference"]).tolist() == [list(at)] and alone["standard_error"][at] > 0
    assert alone["loss"][at] == pytest.approx(unchanged.loss + alone["loss_difference"][at])
    for iterative in (True, False):
        pruned = ablation.prune(
            lambda mask: losses.evaluate(model, texts, {CONTEXT: mask}),
            importance,
            SHAPE,
            step=0.2,
            iterative=iterative,
            bar=BAR,
        )
        assert pruned["order"][-1][:2] == list(at) and pruned["removed"] == [0, 1, 2, 4, 5, 6]
        assert pruned["loss"][:-1] == [unchanged.loss] * 5 and pruned["loss"][-1] == alone["loss"][at]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "span"])
def test_losses_are_those_of_fine_tuning(kind):
    labels = {"regression": ("score",), "span": ("start", "end")}.get(kind, ("a", "b", "c"))
    reads = "tokens" if kind in ("tagging", "span") else "mean"
    head = TaskHead("classification" if kind == "regression" else kind, labels, reads)
    encoded, rng = tiny_task.examples(20), np.random.default_rng(0)
    count, tokens = len(encoded.lengths), len(encoded.input_ids)
    made = {
        "classification": rng.integers(0, 3, count).astype(np.int32),
        "regression": rng.normal(size=count).astype(np.float32),
        "tagging": rng.integers(-1, 3, tokens).astype(np.int32),
        "span": rng.integers(0, encoded.lengths[:, None], (count, 2)).astype(np.int32),
    }
    encoded = encoded._replace(labels=made[kind])
    task = tiny_task.make_task(head)
    rows = type(task.train)(encoded, 32, 4, task.train.special_ids, 1)
    params = bert.init(task.config.model, jax.random.key(0), task.heads)
    packed = [jax.tree.map(jnp.asarray, batch) for batch in rows.in_order(8)]
    sums = [FineTuning.score(task, params, batch)[1]["task_loss"] for batch in packed]
    model = LoadedModel(task.config.model, task.heads, params, small_tokenizer())
    found = losses.evaluate(
        model, examples.labelled_examples(head.kind, encoded, np.arange(count)[::-1], 0), {CONTEXT: np.ones((2, 2))}
    )
    assert found.weights.sum() == sum(one.weight for one in sums)
    np.testing.assert_allclose(found.loss, sum(one.sum for one in sums) / found.weights.sum(), rtol=1e-5)


def test_orders_of_pruning():
    """Losses count the heads that are left; importances change after the first removal."""
    first, later = np.array([[1.0, 2], [3, 4]]), np.array([[9.0, 8], [7, 6]])
    calls = []

    def importance(mask):
        calls.append(mask.sum())
        return first if mask.all() else later

    def evaluate(mask):
        return losses.Evaluation(np.array([float(mask.sum())]), np.ones(1), -float(mask.sum()))

    found = {
        iterative: ablation.prune(evaluate, importance, (2, 2), step=0.25, iterative=iterative, bar=BAR)
        for iterative in (True, False)
    }
    assert [one[:2] for one in found[True]["order"]] == [[0, 0], [1, 1], [1, 0], [0, 1]]
    assert [one[:2] for one in found[False]["order"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert found[True]["loss"] == [4, 3, 2, 1, 0] and calls == [4, 3, 2, 1, 4]
    layers = ablation.without_layers(evaluate, later, BAR)
    assert layers["no_head"]["loss"] == [2, 2] and layers["one_head"] == {
        "loss": [3, 3],
        "score": [-3, -3],
        "head": [0, 0],
    }


def test_measures():
    values = np.array([[3.0, 4], [0, 0]])
    np.testing.assert_allclose(measures.normalize_by_layer(values), [[0.6, 0.8], [0, 0]])
    derivatives = np.array([[[1.0, -2]], [[-3, -2]]])
    assert measures.importance(derivatives).tolist() == [[2, 2]]
    mask = np.array([[True, False], [True, True]])
    assert measures.least_important(np.array([[5.0, 0], [5, 6]]), mask, 1).tolist() == [[False, False], [True, True]]
    assert measures.counts_to_remove(6, 0.1) == [0, 1, 2, 3, 4, 5, 6] and measures.counts_to_remove(144, 0.5)[1] == 72
    shares, curve = (0, 0.25, 0.5, 0.75, 1), (2, 2.1, 2.3, 2.0, 9)
    assert [measures.removable_share(shares, curve, rise) for rise in (0.0, 0.1, 0.2, 9)] == [0, 0.25, 0.75, 1]
    assert measures.top_share(np.ones((4, 5))) == pytest.approx(0.1)
    assert measures.top_share(np.eye(12)) == pytest.approx(1) and measures.top_share(np.eye(20)) == 1
    assert math.isnan(measures.top_share(np.zeros((2, 2))))
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 4, (3, 5)), rng.normal(size=(3, 5))
    expected = scipy.stats.spearmanr(one.ravel(), other.ravel()).statistic
    assert measures.rank_correlation(one, other) == pytest.approx(expected)


def test_standard_error_of_a_difference():
    rng = np.random.default_rng(0)
    weights = np.full(50, 3.0)
    before, difference = rng.normal(9, 1, 50), rng.normal(2, 1, 50)
    after = losses.Evaluation(before + difference, weights, 0)
    mean, error = losses.loss_difference(after, losses.Evaluation(before, weights, 0))
    assert mean == pytest.approx(difference.mean() / 3)
    assert error == pytest.approx(scipy.stats.sem(difference) / 3)


def check_result(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    blocks = SUITE.blocks(result)
    kinds = [type(block) for block in blocks]
    assert (kinds.count(report.Heatmap), kinds.count(report.Curves), kinds.count(report.Table)) == (2, 2, 2)


def test_suite_on_text(data):
    inputs, settings = SuiteInputs(small_model(), data, 0, False), HeadsSettings(examples=5, random_orders=2, step=0.5)
    result = _plain(SUITE.run(inputs, settings))
    check_result(result)
    assert (result["examples"], result["importance_examples"], result["best_constant_score"]) == (5, 5, None)
    pruning = result["pruning"]
    assert pruning["iterative"]["loss"][0] == result["loss"] == pruning["random"]["loss_mean"][0]
    assert pruning["iterative"]["loss"][-1] == pruning["once"]["loss"][-1] == pruning["random"]["loss_lowest"][-1]
    assert result["random_weights_top_tenth_share"] != result["top_tenth_share"]
    most = SUITE.scalars(result)["loss without the head that matters most"]
    assert most.value == max(map(max, result["leave_one_out"]["loss"]))
    assert most.baselines == {"no head removed": result["loss"]}
    assert _plain(SUITE.run(inputs, settings)) == result


def test_suite_on_a_task(data):
    model = small_model(TASK_HEADS)
    inputs = SuiteInputs(model, data, 0, False)
    settings = HeadsSettings(task="sst2", examples=100, random_orders=1, step=0.5)
    result = _plain(SUITE.run(inputs, settings))
    check_result(result)
    assert (result["examples"], result["importance_examples"], result["labels"]) == (24, 64, 24)
    fewer = _plain(SUITE.run(inputs, dataclasses.replace(settings, examples=10)))
    assert (fewer["examples"], fewer["importance_examples"]) == (10, 10) and fewer["loss"] != result["loss"]


@pytest.mark.parametrize(
    ("heads", "changes", "message"),
    [
        (Heads(mlm=False), {}, "the model has no MLM head: give the task"),
        (Heads(), {"task": "sst2"}, "needs a fine-tuned model"),
        (TASK_HEADS, {"task": "sst"}, "--task sst is unknown"),
        (
            dataclasses.replace(TASK_HEADS, task=dataclasses.replace(TASK_HEADS.task, labels=("a", "b"))),
            {"task": "sst2"},
            "the model's head has the labels a, b",
        ),
    ],
)
def test_what_does_not_suit(data, heads, changes, message):
    model = small_model(heads)
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(model, data, 0, False), HeadsSettings(**changes))


@pytest.mark.parametrize(("name", "value"), [("step", 0.0), ("mask_share", 0.0), ("examples", 0), ("rise", -1.0)])
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


def _plain(result):
    from bert_jax.analysis.results import _plain

    return _plain(result, "heads")
