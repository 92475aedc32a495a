"""The attention suite: statistics and distances against plain twins, patterns of maps that are built as such, gradients
against finite differences, and the suite on a small model.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from scipy.spatial.distance import jensenshannon

from bert_jax import report
from bert_jax.analysis.attention import SUITE, attention_gradients, maps, patterns, statistics
from bert_jax.analysis.attention.attention import AttentionSettings, measure_maps
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.config import TaskHead
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.intervention import Intervention
from bert_jax.interventions.rows import batches, encode_texts
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from tests.analysis import data_folder
from tests.interventions.models import LAYERS, small_model

HEADS = 2
SETTINGS = AttentionSettings(
    texts=8, distance_texts=4, gradient_texts=3, flow_texts=3, flow_length=12, sentences=12, least_words=5
)

HEADS_OF_LOSS = {
    "mlm": Heads(),
    "classification": Heads(mlm=False, task=TaskHead("classification", ("a", "b", "c"), "cls")),
    "regression": Heads(mlm=False, task=TaskHead("classification", ("a",), "cls")),
    "tagging": Heads(mlm=False, task=TaskHead("tagging", ("a", "b"), "tokens")),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_folder.write(epath.Path(tmp_path_factory.mktemp("data")) / "data")


@pytest.fixture(scope="module")
def pairs():
    tokenizer = small_model().tokenizer
    texts = ("the river sings. over a dark stone", "a quick unfathomable light", "the mountain falls")
    return maps.halve(encode_texts(texts, tokenizer, 31), tokenizer, 2)


def test_only_plain_layers(data):
    model = small_model()
    mobile = dataclasses.replace(model.config, bottleneck_size=16, norm="none")
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), bert.shapes(mobile, model.heads))
    with pytest.raises(UserError, match=r"model\.bottleneck_size 16 and model\.norm none: leave the"):
        mobile_model = LoadedModel(mobile, model.heads, params, model.tokenizer)
        SUITE.run(SuiteInputs(mobile_model, data, seed=0, progress=False), SETTINGS)


def kinds_of(n: int, second: int) -> maps.TokenKinds:
    """[CLS] text [SEP] text [SEP], the first [SEP] before `second`; token 2 is punctuation."""
    tokens = np.arange(n)
    sep = (tokens == second - 1) | (tokens == n - 1)
    return maps.TokenKinds(tokens == 0, sep, tokens == 2, (tokens >= second).astype(int))


def test_halves_and_kinds(pairs):
    tokenizer = small_model().tokenizer
    row = pairs[0]
    assert tokenizer.decode(row.input_ids) == "[CLS] the river sings. [SEP] over a dark stone [SEP]"
    assert row.token_type_ids.tolist() == [0] * 6 + [1] * 5
    kinds = maps.token_kinds(row, tokenizer)
    assert kinds.punctuation.nonzero()[0].tolist() == [4] and kinds.sep.nonzero()[0].tolist() == [5, 10]
    assert kinds.cls.nonzero()[0].tolist() == [0] and kinds.segments.tolist() == [0] * 6 + [1] * 5
    pieces = [tokenizer.id_to_token(int(one)) for one in pairs[1].input_ids]
    assert pieces[pieces.index("[SEP]") + 1] in ("u", "light")  # no half begins inside of a word
    (without_types,) = maps.halve(encode_texts(["the river"], tokenizer, 31), tokenizer, 1)
    assert without_types.token_type_ids.tolist() == [0] * 5
    (short,) = maps.shorten(encode_texts(["the river sings over the stone"], tokenizer, 31), 5)
    assert tokenizer.decode(short.input_ids) == "[CLS] the river sings [SEP]"


def test_maps_are_those_of_each_text(pairs):
    model, seen = small_model(), []
    for one in maps.attention_maps(model, pairs):
        (batch,) = batches([pairs[one.index]], model.tokenizer.pad_id, 32)
        expected = capture(model, batch, [maps.PROBABILITIES])[maps.PROBABILITIES][:, 0, :, : one.length, : one.length]
        np.testing.assert_allclose(one.probabilities, expected, atol=1e-6)
        assert one.probabilities.shape == (LAYERS, HEADS, len(pairs[one.index].input_ids), one.length)
        seen.append(one.index)
    assert sorted(seen) == [0, 1, 2]


def test_statistics_are_those_of_a_loop():
    rng, n, kinds = np.random.default_rng(0), 9, kinds_of(9, 5)
    attention = rng.dirichlet(np.full(n, 0.3), (2, n))
    found = statistics.attention_statistics(attention, kinds)
    for head in range(2):
        a = attention[head]
        expected = {
            "self": sum(a[i, i] for i in range(n)) / n,
            "previous": sum(a[i, i - 1] for i in range(1, n)) / n,
            "next": sum(a[i, i + 1] for i in range(n - 1)) / n,
            "cls": sum(a[i, 0] for i in range(n)) / n,
            "sep": sum(a[i, 4] + a[i, 8] for i in range(n)) / n,
            "punctuation": sum(a[i, 2] for i in range(n)) / n,
            "sep_to_sep": sum(a[i, 4] + a[i, 8] for i in (4, 8)) / 2,
            "other_to_sep": sum(a[i, 4] + a[i, 8] for i in (0, 1, 2, 3, 5, 6, 7)) / 7,
            "entropy_nats": -sum(p * np.log(p) for p in a.flat) / n,
            "cls_entropy_nats": -sum(p * np.log(p) for p in a[0]),
        }
        assert expected.keys() == found.keys() == {*statistics.SHARES, *statistics.ENTROPIES}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][head], value)
    assert statistics.entropy(np.array([0.0, 1.0, 0.0])) == 0
    uniform = statistics.attention_statistics(statistics.uniform_attention(n), kinds)
    np.testing.assert_allclose([uniform["entropy_nats"], uniform["sep"]], [np.log(n), 2 / n], rtol=1e-6)


@pytest.mark.parametrize("n", [9, 24, 120])
def test_patterns_of_built_maps(n):
    second = n // 2
    kinds, tokens, rng = kinds_of(n, second), np.arange(n), np.random.default_rng(n)
    special = np.broadcast_to(kinds.special, (n, n)).astype(float)
    nearby = (np.abs(tokens[:, None] - tokens) == 1).astype(float)
    within = (kinds.segments[:, None] == kinds.segments).astype(float)
    built = {
        "vertical": special,
        "diagonal": nearby,
        "vertical+diagonal": special / special.sum(1, keepdims=True) + nearby / nearby.sum(1, keepdims=True),
        "block": within,
        "heterogeneous": rng.dirichlet(np.full(n, 0.5), n),
    }
    noise = 0.2 * rng.dirichlet(np.full(n, 2.0), n)
    stacked = np.stack([0.8 * one / one.sum(1, keepdims=True) + noise for one in built.values()])
    found = patterns.classify_patterns(stacked, kinds)
    assert [patterns.PATTERNS[i] for i in found] == list(built)
    assert patterns.classify_patterns(np.full((n, n), 1 / n), kinds) == patterns.PATTERNS.index("heterogeneous")


def test_distances_between_heads():
    rng, n = np.random.default_rng(0), 7
    attention = rng.dirichlet(np.full(n, 0.3), (4, n)).astype(np.float32)
    attention[3] = attention[0]
    padded = rng.random((4, n + 3, n + 3)).astype(np.float32)
    padded[:, :n, :n], padded[..., n:] = attention, 0
    found = np.asarray(statistics.divergence_sums(padded, jax.numpy.int32(n)))
    expected = [[sum(jensenshannon(a[i], b[i]) ** 2 for i in range(n)) for b in attention] for a in attention]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found[0, 3] == 0 < found[0, 1]
    distances = rng.random((6, 6))
    within, between = statistics.distances_by_layer(distances, 3)
    same = [distances[i, j] for layer in ((0, 1, 2), (3, 4, 5)) for i in layer for j in layer if i != j]
    np.testing.assert_allclose(within, np.mean(same))
    np.testing.assert_allclose(between, np.mean([*distances[:3, 3:].flat, *distances[3:, :3].flat]))
    assert statistics.distances_by_layer(distances, 1)[0] is None


@pytest.mark.parametrize("head", ["mlm", "classification", "regression", "tagging"])
def test_gradients_are_finite_differences(pairs, head):
    """Of a head's mean over all queries and [SEP] keys, in the second of two texts."""
    model, rows = small_model(HEADS_OF_LOSS[head]), pairs[:2]
    masked = [np.array([2, 3, 6]), np.array([2, 3])] if head == "mlm" else None
    both = attention_gradients.gradients_by_kind(model, rows, masked)
    first = attention_gradients.gradients_by_kind(model, rows[:1], masked and masked[:1])
    np.testing.assert_allclose(both["sep"][0], first["sep"][0], rtol=1e-4)
    found = both["sep"][1, 1, 1]
    (batch,) = batches(rows[1:], model.tokenizer.pad_id, 32)
    n, tokens = int(batch.lengths[0]), rows[1].input_ids
    if head == "mlm":
        hidden = batch.input_ids.copy()
        hidden[0, masked[1]] = model.tokenizer.mask_id
        batch = batch._replace(input_ids=hidden)

    def loss(change):
        output = "mlm_logits" if head == "mlm" else "task_logits"
        logits = capture(model, batch, [output], change)[output][0].astype(np.float64)
        if head == "regression":
            return logits[0, 0]
        used = {"mlm": masked and masked[1], "tagging": np.arange(n), "classification": [0]}[head]
        chosen = tokens[used] if head == "mlm" else logits[used].argmax(-1)
        losses = np.log(np.exp(logits[used]).sum(-1)) - logits[used, chosen]
        return losses.mean()

    def derivative(query, key, step=2e-3):
        place = {"heads": (1,), "positions": (query,), "keys": (key,), "factor": 1.0}
        name = "layers.1.attention.probabilities"
        plus, minus = (loss([Intervention(name, **place, add=sign * step)]) for sign in (1, -1))
        return (plus - minus) / (2 * step)

    keys = np.flatnonzero(tokens == model.tokenizer.sep_id)
    expected = np.mean([abs(derivative(query, key)) for query in range(n) for key in keys])
    assert expected > 1e-4
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_losses_of_heads():
    names = {head: attention_gradients.loss_name(heads) for head, heads in HEADS_OF_LOSS.items()}
    assert names.pop("mlm") == "masked tokens" and set(names.values()) == {"prediction"}
    span = TaskHead("span", ("start", "end"), "tokens")
    assert attention_gradients.loss_name(Heads(mlm=False, task=span)) is None
    assert attention_gradients.loss_name(Heads(mlm=False, pair=True)) is None


def test_gradients_of_tagging_do_not_depend_on_padding(pairs):
    model = small_model(HEADS_OF_LOSS["tagging"])
    both = attention_gradients.gradients_by_kind(model, pairs[:2], None)
    alone = [attention_gradients.gradients_by_kind(model, [row], None) for row in pairs[:2]]
    np.testing.assert_allclose(both["sep"], [one["sep"][0] for one in alone], rtol=1e-4)
    assert np.isnan(alone[1]["punctuation"]).all()
    np.testing.assert_allclose(both["punctuation"], [one["punctuation"][0] for one in alone], rtol=1e-4)


def test_measures_are_means_over_texts(pairs):
    model = small_model()
    (of_texts, together), alone = (
        measure_maps(model, pairs, 3),
        [measure_maps(model, [row], 1).summary for row in pairs],
    )
    for name in ("sep", "entropy_nats", "near"):
        np.testing.assert_allclose(together[name], np.mean([one[name] for one in alone], axis=0), atol=1e-6)
        np.testing.assert_allclose(of_texts[name], [one[name].mean() for one in alone], atol=1e-6)
        interval = together["mean_of_heads"][name]
        assert min(of_texts[name]) <= interval["low"] < interval["value"] < interval["high"] <= max(of_texts[name])
        assert together["half_width"][name] > 0 and np.isnan(alone[0]["half_width"][name])
    np.testing.assert_allclose(together["near"], sum(together[name] for name in ("self", "previous", "next")))
    assert np.sum(list(together["pattern_texts"].values())) == 3 * LAYERS * HEADS
    shares = together["pattern_shares"]
    assert sum(shares["value"]) == pytest.approx(1) and (shares["low"] <= shares["value"]).all()
    assert together["distance_texts"] == 3


def test_intervals_of_distances():
    """Of texts drawn one by one."""
    rng = np.random.default_rng(6)
    divergences, queries = rng.random((12, 4, 4)), rng.integers(5, 9, 12)
    found = statistics.distances_with_intervals(divergences, queries, 2)
    loops = []
    for chosen in rng.integers(12, size=(4000, 12)):
        roots = np.sqrt(sum(divergences[i] for i in chosen) / sum(queries[i] for i in chosen))
        loops.append([one.item() for one in statistics.distances_by_layer(roots, 2)])
    whole = statistics.distances_by_layer(np.sqrt(divergences.sum(0) / queries.sum()), 2)
    for one, value, resampled in zip(found, whole, np.transpose(loops), strict=True):
        assert one["value"] == pytest.approx(value)
        np.testing.assert_allclose([one["low"], one["high"]], np.quantile(resampled, [0.025, 0.975]), atol=0.004)
    assert statistics.distances_with_intervals(divergences, queries, 1)[0] is None


def test_suite(data):
    inputs = SuiteInputs(small_model(), data, seed=0, progress=False)
    result, items = finish(SUITE.run(inputs, SETTINGS), "attention")
    assert finish(SUITE.run(inputs, SETTINGS), "attention")[0] == result
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    text, treebank = result["text"], result["treebank"]
    assert (text["texts"], text["flow_texts"], text["gradients"]["texts"]) == (8, 3, 3)
    assert text["statistics"]["model"]["sep"] != text["statistics"]["random_weights"]["sep"]
    assert (treebank["selection"], treebank["sentences_of_selection"], treebank["sentences_of_scoring"]) == (
        "dev",
        12,
        8,
    )
    names = [row["relation"] for row in treebank["relations"]]
    assert names[-1] == "all" and "punct" not in names and "root" not in names
    scalars = SUITE.scalars(result)
    uas, overall = scalars["UAS, best head (%)"], treebank["relations"][-1]
    assert uas.value == pytest.approx(100 * overall["accuracy"], rel=1e-5)
    assert uas.baselines["best offset"] == pytest.approx(100 * overall["offset_accuracy"], rel=1e-5)
    random = treebank["random_weights"]["accuracy"][-1]
    assert uas.baselines["random weights"] == pytest.approx(100 * random, rel=1e-5)
    assert uas.interval[0] <= uas.value <= uas.interval[1]
    assert len(items["best head, all words (UAS)"].items) == 8
    assert items["best head, nsubj"].items[0].startswith("test, sentence ")
    numbers = [one for scalar in scalars.values() for one in (scalar.value, *scalar.baselines.values())]
    assert all(np.isfinite(numbers)) and len(scalars) == 7 and len(numbers) >= 14
    kinds = [type(block) for block in SUITE.blocks(result)]
    assert [kinds.count(kind) for kind in (report.Heatmap, report.Table)] == [4, 4]
    assert all(scalar.interval is not None for scalar in scalars.values())
    bands = [s for block in SUITE.blocks(result) if isinstance(block, report.Curves) for s in block.series]
    assert all((one.low is None) == one.dashed for one in bands)


@pytest.mark.parametrize(("folder", "other"), [("text", "treebank"), ("treebank", "text")])
def test_one_folder_is_enough(data, tmp_path, folder, other):
    shutil.copytree(data / folder, tmp_path / folder)
    inputs = SuiteInputs(small_model(Heads(mlm=False)), epath.Path(tmp_path), seed=0, progress=False)
    assert SUITE.obstacle(inputs, SETTINGS) is None
    result, _ = finish(SUITE.run(inputs, SETTINGS), "attention")
    assert result[other] is None and result[folder] is not None
    notes = [block.text for block in SUITE.blocks(result) if isinstance(block, report.Note)]
    assert f"The data have no folder {other}/." in notes and SUITE.scalars(result)
    if folder == "text":
        assert result["text"]["gradients"] is None
        assert any("the model has no MLM head" in note for note in notes)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"text/a.txt": ""},
            r"0 of 0 different lines have a token and, with \[CLS\] and \[SEP\], at most 63; 1 or more are",
        ),
        ({"text/a.txt": "the\nriver"}, "all lines of text/ that fit have a single token"),
        (
            {"treebank/a-dev.conllu": "1\tthe\t_\tX\t_\t_\t0\troot\t_\t_\n"},
            "dev, odd sentences or dev, even sentences of treebank/ has no word with a head",
        ),
        ({"treebank/a-dev.conllu": "1\tthe\n"}, "a-dev.conllu, line 1"),
        (
            {"treebank/a-dev.conllu": "1\t\u200b\t_\tX\t_\t_\t0\troot\t_\t_\n"},
            "even sentences of treebank/ has no sentence of at most 62 tokens with one or more",
        ),
    ],
)
def test_data_that_cannot_be_used(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f"{content}\n{content}")
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(small_model(), epath.Path(tmp_path), 0, False), SETTINGS)


def test_long_sentences_are_skipped_and_counted(data, tmp_path):
    shutil.copytree(data / "treebank", tmp_path / "treebank")
    inputs = SuiteInputs(small_model(), epath.Path(tmp_path), seed=0, progress=False)
    settings = dataclasses.replace(SETTINGS, max_length=8, sentences=24, least_words=1)
    found = SUITE.run(inputs, settings)["treebank"]
    sentences = [*data_folder.phrases(24, 3), *data_folder.phrases(8, 4)]
    tokens = [len(inputs.model.tokenizer.encode(" ".join(word for word, *_ in one))) for one in sentences]
    too_long = sum(count > 6 for count in tokens)
    assert found["skipped_sentences"] == too_long > 0
    assert found["sentences_of_selection"] + found["sentences_of_scoring"] == len(sentences) - too_long


def test_rare_relations_count_together(data, tmp_path):
    shutil.copytree(data / "treebank", tmp_path / "treebank")
    inputs = SuiteInputs(small_model(), epath.Path(tmp_path), seed=0, progress=False)
    result, _ = finish(SUITE.run(inputs, dataclasses.replace(SETTINGS, least_words=1000)), "attention")
    assert [row["relation"] for row in result["treebank"]["relations"]] == ["all"]
    assert result["treebank"]["rare_relations"] == 5
    scalars = SUITE.scalars(result)
    assert "best head less best offset, mean of relations (points)" not in scalars
    assert np.isfinite(scalars["UAS, best head (%)"].value) and SUITE.blocks(result)


def test_settings():
    with pytest.raises(UserError, match=r"attention.flow_length 3: they must be at least 5 and 4"):
        AttentionSettings(flow_length=3)
    with pytest.raises(UserError, match=r"attention.mask_share is 0"):
        dataclasses.replace(SETTINGS, mask_share=0.0)
