"""The lens: readings equal those of one forward pass, and a model whose layers do nothing reads the same everywhere."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax import report
from bert_jax.analysis.lens import SUITE, lens, readings
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import choose_masked, encode_texts, sample_texts
from bert_jax.model.heads import Heads
from tests.building import make_sentence
from tests.interventions.models import LAYERS, small_model

SETTINGS = lens.LensSettings(texts=20, mask_share=0.3, examples=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = epath.Path(tmp_path_factory.mktemp("data"))
    (directory / "text").mkdir()
    rng = np.random.default_rng(0)
    lines = [make_sentence(rng) for _ in range(40)]
    (directory / "text" / "lines.txt").write_text("\n".join([*lines, "", "stone " * 70]) + "\n")
    return directory


@pytest.fixture(scope="module")
def rows(data):
    model = small_model()
    return sample_texts([data / "text" / "lines.txt"], model.tokenizer, 64, 20, seed=1).rows


def idle(model: LoadedModel) -> LoadedModel:
    """The model with layers that do nothing: their outputs are zero, and normalised vectors stay as they are."""
    params = jax.tree.map(np.array, model.params)
    for name in ("attention_out", "down"):
        params["encoder"]["layers"][name] = jax.tree.map(np.zeros_like, params["encoder"]["layers"][name])
    for norm in (
        params["encoder"]["embeddings"]["norm"],
        *(params["encoder"]["layers"][f"{name}_norm"] for name in ("attention", "feed_forward")),
    ):
        norm["scale"], norm["bias"] = np.ones_like(norm["scale"]), np.zeros_like(norm["bias"])
    return LoadedModel(model.config, model.heads, params, model.tokenizer)


def test_readings_are_those_of_a_forward_pass(rows):
    model = small_model()
    masked = choose_masked(rows, model.tokenizer.special_ids, 0.3, seed=0)
    readings, tokens, row_of_token = lens.read_masked(model, rows, masked)
    assert readings.ranks.shape == (LAYERS + 1, sum(map(len, masked))) and (np.diff(row_of_token) >= 0).all()
    column = 0
    for row, positions in zip(rows[:3], masked[:3], strict=True):
        ids = row.input_ids.copy()
        ids[positions] = model.tokenizer.mask_id
        text = model.tokenizer.decode(ids[1:-1])
        for position in positions:
            candidates = model.fill_mask(text, top=model.tokenizer.vocab_size)[int((positions < position).sum())]
            gold = [one.token_id for one in candidates].index(row.input_ids[position])
            assert tokens[column] == row.input_ids[position]
            assert (readings.ranks[-1, column], readings.top[-1, column]) == (gold + 1, candidates[0].token_id)
            expected = np.log(candidates[gold].probability)
            np.testing.assert_allclose(readings.log_likelihoods[-1, column], expected, atol=1e-4)
            column += 1
    assert (readings.divergences[-1] == 0).all() and readings.divergences[0].mean() > 0.01


def test_layers_that_do_nothing_read_the_same(rows):
    model = idle(small_model())
    masked = choose_masked(rows, model.tokenizer.special_ids, 0.3, seed=0)
    readings, tokens, texts = lens.read_masked(model, rows, masked)
    for values, tolerance in ((readings.log_likelihoods, 1e-3), (readings.divergences, 1e-4), (readings.top, 0)):
        np.testing.assert_allclose(values, np.broadcast_to(values[-1], values.shape), atol=tolerance)
    found = lens.summarize(readings, tokens, texts).values
    assert found["settled_since"] == [len(tokens), 0, 0, 0] and found["mean_settled_since"]["value"] == 0


def test_leads_since():
    top = np.array([[5, 5, 1, 1], [5, 2, 5, 1], [5, 5, 5, 1]])
    assert readings.leads_since(top, np.full(4, 5)).tolist() == [0, 2, 1, 3]


def test_divergence_and_ranks_of_known_logits():
    logits = np.log(np.array([[[0.5, 0.25, 0.25]], [[0.2, 0.7, 0.1]]]))
    found = readings.read_logits(logits, np.array([1]))
    expected = sum(p * np.log(p / q) for p, q in ((0.2, 0.5), (0.7, 0.25), (0.1, 0.25)))
    np.testing.assert_allclose(found.divergences[:, 0], [expected, 0], atol=1e-12)
    np.testing.assert_allclose(np.exp(found.log_likelihoods[:, 0]), [0.25, 0.7])
    assert found.ranks[:, 0].tolist() == [2, 1] and found.top[:, 0].tolist() == [0, 1]


def test_intervals_of_medians_and_sums_are_over_texts():
    rng = np.random.default_rng(0)
    texts = np.repeat(np.arange(3, 33), rng.integers(1, 6, 30))
    ranks = rng.integers(1, 50, (2, len(texts)))
    of_text = [ranks[:, texts == text] for text in range(3, 33)]
    np.testing.assert_array_equal(readings.sums_of_texts(ranks, texts), np.stack([x.sum(1) for x in of_text], axis=1))
    found = readings.median_ranks(ranks, texts)
    loops = []
    for chosen in rng.integers(30, size=(4000, 30)):
        sample = np.sort(np.concatenate([of_text[i] for i in chosen], axis=1))
        loops.append(sample[:, (sample.shape[1] - 1) // 2])
    np.testing.assert_array_equal(found.value, np.median(ranks, axis=1))
    np.testing.assert_allclose([found.low, found.high], np.quantile(loops, [0.025, 0.975], axis=0), atol=1.5)


def test_unigram():
    found = readings.unigram_readings(np.array([2, 0, 2]), np.array([1, 0, 5])).means
    expected = -(2 * np.log(6 / 9) + np.log(2 / 9)) / 3
    np.testing.assert_allclose(found["loss_nats"], expected)
    assert (found["accuracy"], found["median_rank"]) == (2 / 3, 1)


def test_masks_are_ordinary_tokens_and_depend_on_the_seed(rows):
    tokenizer = small_model().tokenizer
    masks = [choose_masked(rows, tokenizer.special_ids, 0.3, seed) for seed in (0, 0, 1)]
    for row, positions in zip(rows, masks[0], strict=True):
        assert len(positions) == max(1, round(0.3 * (len(row.input_ids) - 2)))
        assert not np.isin(row.input_ids[positions], tokenizer.special_ids).any()
    same = [[a.tolist() for a in masks[0]] == [b.tolist() for b in one] for one in masks[1:]]
    assert same == [True, False]
    (unknown,) = encode_texts(["\u4e00"], tokenizer, 8)
    assert [len(one) for one in choose_masked([unknown], tokenizer.special_ids, 0.3, 0)] == [0]


def test_suite(data):
    inputs = SuiteInputs(small_model(), data, seed=0, progress=False)
    result, items = finish(SUITE.run(inputs, SETTINGS), "lens")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["texts"], result["lines"]) == (20, 41) and result["masked_tokens"] == result["model"]["masked"]
    assert result["random_weights"]["loss_nats"] != result["model"]["loss_nats"]
    scalars = SUITE.scalars(result)
    loss = scalars["loss at masked tokens, last state (nats)"]
    assert loss.value == pytest.approx(result["model"]["loss_nats"]["value"][-1], rel=1e-5)
    assert loss.baselines["token frequency"] == pytest.approx(result["unigram"]["loss_nats"], rel=1e-5)
    assert loss.baselines["random weights"] == pytest.approx(
        result["random_weights"]["loss_nats"]["value"][-1], rel=1e-5
    )
    assert loss.interval[0] < loss.value < loss.interval[1] and len(scalars) == 4
    test = items["masked tokens predicted by the last state"]
    assert len(test.items) == 20 and test.weights["model"].sum() == result["masked_tokens"]
    blocks = SUITE.blocks(result)
    assert sum(isinstance(block, report.Table) for block in blocks) == 2
    assert finish(SUITE.run(inputs, SETTINGS), "lens")[0] == result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": Heads(mlm=False)}, "the model has no MLM head"),
        ({"config": {"direction": "causal"}}, "a causal model"),
    ],
)
def test_models_without_a_masked_lm(data, change, message):
    model = small_model()
    config = dataclasses.replace(model.config, **change.get("config", {}))
    other = LoadedModel(config, change.get("heads", model.heads), model.params, model.tokenizer)
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(other, data, 0, False), SETTINGS)


@pytest.mark.parametrize("content", ["", "\n\n", "stone " * 200])
def test_files_without_text(content, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(content)
    with pytest.raises(
        UserError, match=r"0 of \d different lines have a token and, with \[CLS\] and \[SEP\], at most 64; 1 or more"
    ):
        SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, False), SETTINGS)
