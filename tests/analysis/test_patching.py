"""Activation patching: a planted head is found, each patch is that of an intervention, and the suite runs."""

import itertools
import json

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax import report
from bert_jax.analysis import bootstrap
from bert_jax.analysis.cloze import PATCHING, patching
from bert_jax.analysis.cloze.minimal_pairs import SentencePair
from bert_jax.analysis.cloze.patching import CONTEXT, ROLES, MaskedPair, PatchingSettings
from bert_jax.analysis.cloze.predictions import mask_log_probabilities
from bert_jax.analysis.result_files import finish
from bert_jax.analysis.suite import SuiteInputs, UnsuitedError
from bert_jax.convert.conversion import convert
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.intervention import Intervention
from bert_jax.interventions.rows import batches
from tests.interventions.models import LAYERS, make_model, small_model, small_tokenizer, write_native

NOUNS, VERBS = ("river", "mountain", "stone"), ("sings", "falls")
"""Words of one token."""
LAYER, HEAD = 1, 0


def pairs_of(*sentences: tuple[str, str]) -> list[SentencePair]:
    return [SentencePair(good, bad, "u", "", "", f"line {i}") for i, (good, bad) in enumerate(sentences)]


def subjects() -> list[SentencePair]:
    """Pairs that differ in their noun."""
    nouns = list(zip(NOUNS, NOUNS[1:] + NOUNS[:1], strict=True))
    return pairs_of(
        *((f"{the} {a} {verb} .", f"{the} {b} {verb} .") for the in ("the", "a") for a, b in nouns for verb in VERBS)
    )


def with_one_head(model: LoadedModel) -> LoadedModel:
    """Only head HEAD of layer LAYER sends something to other tokens."""
    params = jax.tree.map(np.array, model.params)
    kernel = params["encoder"]["layers"]["attention_out"]["kernel"]
    of_head = kernel.reshape(LAYERS, model.config.num_heads, -1, kernel.shape[-1])
    kept = of_head[LAYER, HEAD].copy()
    of_head[:] = 0
    of_head[LAYER, HEAD] = kept
    params["encoder"]["layers"]["attention_out"]["kernel"] = of_head.reshape(kernel.shape)
    return LoadedModel(model.config, model.heads, params, model.tokenizer)


def measured(model, pairs):
    usable, _ = patching.encode_equal_lengths(pairs, model, 32)
    masked = [pair for pair in patching.mask_pairs(usable, model, False) if pair is not None]
    assert len(masked) > 1 and all(pair.effect > 0 for pair in masked)
    sides = range(len(masked)), patching.choose_donors(masked, 0)
    effects = [patching.measure(model, masked, [masked[i].clean for i in side], False, "") for side in sides]
    return masked, *effects


def test_a_planted_head_is_found():
    masked, restored, control = measured(with_one_head(small_model()), subjects())
    totals = np.array([pair.effect for pair in masked])
    found = patching.shares(restored.by_head, totals).value
    np.testing.assert_allclose(found, np.eye(LAYERS)[LAYER][:, None] * np.eye(2)[HEAD], atol=1e-4)
    by_role = {site: patching.shares(x, totals).value for site, x in restored.by_position.items()}
    differs, mask = ROLES.index("tokens that differ"), ROLES.index("masked token")
    np.testing.assert_allclose(by_role["hidden"][:, differs], [1, 0, 0], atol=1e-4)
    np.testing.assert_allclose(by_role["hidden"][:, mask], [0, 1, 1], atol=1e-4)
    np.testing.assert_allclose(by_role["attention.output"][LAYER, mask], 1, atol=1e-4)
    other = patching.shares(control.by_head, totals).value
    assert abs(other[LAYER, HEAD]) < 0.9 and np.abs(np.delete(other.ravel(), LAYER * 2 + HEAD)).max() < 1e-4
    test, heads = patching.best_head_items(restored.by_head, control.by_head, totals, [pair.item for pair in masked])
    assert heads == [[LAYER, HEAD]] * 2
    np.testing.assert_array_equal(test.scores["model"], restored.by_head[:, LAYER, HEAD])
    np.testing.assert_array_equal(test.scores["another_pair's_activation"], control.by_head[:, LAYER, HEAD])


NUMBERS = (("river", "stone", "the"), ("mountain", "dark", "a"))
"""Words of one token: their embeddings are made equal within a number."""


def with_number(model: LoadedModel) -> tuple[LoadedModel, list[MaskedPair]]:
    """Words carry their number alone, and only head HEAD of layer LAYER sends it on; pairs that differ in the number of
    their subject, with as many better sentences of one number as of the other.
    """
    ids = [[model.tokenizer.token_to_id(word) for word in words] for words in NUMBERS]
    params = jax.tree.map(np.array, with_one_head(model).params)
    for of_number in ids:
        params["encoder"]["embeddings"]["word"][of_number] = params["encoder"]["embeddings"]["word"][of_number[0]]
    model = LoadedModel(model.config, model.heads, params, model.tokenizer)

    def sentence(word):
        return np.array([model.tokenizer.cls_id, word, model.tokenizer.mask_id, model.tokenizer.sep_id], np.int32)

    rows = [row_of(sentence(of_number[0])) for of_number in ids]
    first, second = mask_log_probabilities(model, rows).astype(float)
    pairs = []
    for better, worse, difference in ((*ids, first - second), (*ids[::-1], second - first)):
        target = int(difference.argmax())  # as a verb in the right number
        for good, bad in itertools.product(better, worse):
            sides = sentence(good), sentence(bad)
            pairs.append(MaskedPair(*sides, 2, target, sides[0] != sides[1], float(difference[target]), f"{good}"))
    return model, pairs


def test_the_control_of_a_planted_number_is_at_chance():
    """The head that carries number restores everything; with another pair's activation, all where that pair's better
    sentence has the same number, and nothing where it has the other one. Other heads restore nothing either way.
    """
    model, pairs = with_number(small_model())
    totals, donors = np.array([pair.effect for pair in pairs]), patching.choose_donors(pairs, 0)
    same = np.array([pairs[donor].target == pair.target for donor, pair in zip(donors, pairs, strict=True)])
    sides = range(len(pairs)), donors
    own, control = (patching.measure(model, pairs, [pairs[i].clean for i in side], False, "") for side in sides)
    planted = np.zeros((LAYERS, 2))
    planted[LAYER, HEAD] = 1
    for effects, expected in ((own, 1.0), (control, (totals * same).sum() / totals.sum())):
        found = patching.shares(effects.by_head, totals).value
        np.testing.assert_allclose(found, expected * planted, atol=1e-4)
    best, heads = patching.best_head_items(own.by_head, control.by_head, totals, [pair.item for pair in pairs])
    assert heads == [[LAYER, HEAD]] * 2
    np.testing.assert_allclose(best.scores["model"], totals, atol=1e-4)
    # Of the 15 pairs with another better sentence, 6 have the same number.
    shares_of_same = [
        np.mean([pairs[donor].target == pair.target for donor, pair in zip(chosen, pairs, strict=True)])
        for chosen in (patching.choose_donors(pairs, seed) for seed in range(200))
    ]
    assert np.mean(shares_of_same) == pytest.approx(6 / 15, abs=0.03) and 0 < same.mean() < 1


def test_a_donor_has_another_better_sentence():
    model = small_model()
    pairs = with_number(model)[1]
    for seed in range(20):
        donors = patching.choose_donors(pairs, seed)
        assert sorted(donors) == list(range(len(pairs)))
        assert all((pairs[donor].better != pair.better).any() for donor, pair in zip(donors, pairs, strict=True))
    frequent = patching.choose_donors([*pairs[:3], pairs[3]], 0)  # three with one better sentence
    assert sorted(frequent) == [-1, -1, 0, 3] or sorted(frequent)[:2] == [-1, -1]
    assert patching.choose_donors(pairs[:3], 0) == [-1] * 3


def test_the_best_head_of_the_other_half_is_not_overestimated(monkeypatch):
    """Of 200 analyses, 144 heads that restore nothing: the largest of all is above 0, that of the other half not."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 1_000)
    rng, totals = np.random.default_rng(0), np.ones(60)
    found = []
    for _ in range(200):
        effects = rng.normal(0, 1, (2, 60, 12, 12))
        items, _ = patching.best_head_items(*effects, totals, [""] * 60)
        best = bootstrap.bootstrap_mean(items.scores["model"], None, totals)
        found.append((best.value, best.low <= 0 <= best.high))
    assert np.abs(np.mean(found, 0) - [0, 0.95]).max() < 0.035
    assert np.max(patching.shares(effects[0], totals).value) > 0.25


def test_the_last_hidden_state_restores_everything():
    """Also of a model whose vocabulary has rows without a token: total effect and patches have one softmax."""
    model = make_model(vocab_size=small_tokenizer().vocab_size + 40)
    bias = np.array(model.params["mlm"]["bias"])
    bias[small_tokenizer().vocab_size :] = 3
    model = with_bias(model, bias)
    masked, restored, _ = measured(model, subjects()[:6])
    last = restored.by_position["hidden"][:, -1, ROLES.index("masked token")]
    np.testing.assert_allclose(last, [pair.effect for pair in masked], atol=1e-5)


def with_bias(model: LoadedModel, bias: np.ndarray) -> LoadedModel:
    params = {**model.params, "mlm": {**model.params["mlm"], "bias": bias}}
    return LoadedModel(model.config, model.heads, params, model.tokenizer)


def test_each_patch_is_an_intervention():
    model = small_model()
    masked, restored, _ = measured(model, subjects()[:3])
    for i, pair in enumerate(masked):
        (batch,) = batches([row_of(pair.corrupted)], model.tokenizer.pad_id, 8)
        source = (tuple(pair.clean.tolist()),)
        positions = np.array([[pair.position]], np.int32)

        def score(*interventions):
            logits = capture(model, batch, ["mlm_logits"], interventions, positions=positions)["mlm_logits"][0, 0]  # noqa: B023
            return float(jax.nn.log_softmax(logits[: model.tokenizer.vocab_size])[pair.target])  # noqa: B023

        before = score()
        for layer in range(LAYERS):
            head = Intervention(f"layers.{layer}.{CONTEXT}", heads=(1,), source=source)
            assert score(head) - before == pytest.approx(restored.by_head[i, layer, 1], abs=1e-5)
            for r, chosen in enumerate(patching.roles(pair, len(pair.clean))):
                where = tuple(map(int, np.flatnonzero(chosen)))
                one = Intervention(f"layers.{layer}.hidden", positions=where, source=source)
                expected = score(one) - before if where else 0.0
                assert expected == pytest.approx(restored.by_position["hidden"][i, layer, r], abs=1e-5)
        assert np.abs(restored.by_head[i]).max() > 1e-3


def row_of(ids):
    return patching.TextRow(ids, np.zeros_like(ids), np.zeros_like(ids))


def test_pairs_that_cannot_be_patched():
    model = small_model()
    sentences = [("the river sings .", "the stone sings .")]
    sentences += [("the river .", "the river sings ."), ("river", "stone"), ("the stone .", "the stone .")]
    sentences += [("the " * 40, "a " * 40), ("The stone .", "the stone .")]
    usable, skipped = patching.encode_equal_lengths(pairs_of(*sentences), model, 32)
    assert len(usable) == 1
    assert {k: v for k, v in skipped.items() if v} == {
        "no_tokens_or_too_long": 1,
        "other_lengths": 1,
        "same_tokens": 2,
        "no_common_token": 1,
    }
    masked = patching.mask_pairs(usable, model, False)
    assert patching.choose_donors([*masked, *masked], 0) == [-1, -1] and patching.choose_donors(masked, 0) == [-1]


def write(tmp_path, *sentences) -> epath.Path:
    (tmp_path / "minimal_pairs").mkdir()
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in sentences]
    (tmp_path / "minimal_pairs" / "a.jsonl").write_text("\n".join(lines))
    return epath.Path(tmp_path)


@pytest.mark.slow
def test_suite(tmp_path):
    data = write(tmp_path, *((pair.good, pair.bad) for pair in subjects()), ("the river .", "a stone falls ."))
    inputs = SuiteInputs(small_model(), data, 0, False)
    assert PATCHING.obstacle(inputs, PatchingSettings()) is None
    result, _ = finish(PATCHING.run(inputs, PatchingSettings()), "patching")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["pairs"] + result["skipped"]["no_effect"], result["drawn"]) == (12, 13) and result["pairs"] > 3
    assert result["skipped"]["other_lengths"] == 1
    heads = result["model"][CONTEXT]
    assert (np.array(heads["low"]) <= heads["value"]).all() and (np.array(heads["value"]) <= heads["high"]).all()
    best = PATCHING.scalars(result)["restored by the best head (%)"]
    assert best.interval[0] <= best.value <= min(best.interval[1], 100 * np.max(heads["value"]) + 1e-3)
    parts = [np.array(result[part]["hidden"]["value"]) for part in ("model", "another_pair", "difference")]
    np.testing.assert_allclose(parts[0] - parts[1], parts[2], atol=1e-5)
    blocks = PATCHING.blocks(result)
    assert sum(isinstance(block, report.Heatmap) for block in blocks) == 8


def test_nothing_to_patch(tmp_path):
    inputs = SuiteInputs(small_model(), write(tmp_path, ("the river .", "a stone falls .")), 0, False)
    with pytest.raises(UnsuitedError, match=r"none of 1 minimal pairs can be patched \(other_lengths 1\)"):
        PATCHING.run(inputs, PatchingSettings())


@pytest.mark.slow
def test_torch_patches_the_same(tmp_path):
    """Against `transformers` with hooks of torch: outputs of layers by role, and heads, own and control."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = small_model()
    assert convert(write_native(model, tmp_path / "native"), tmp_path / "hf", "huggingface").passed
    twin = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    masked, restored, control = measured(model, subjects()[:4])
    donors, width = patching.choose_donors(masked, 0), model.config.hidden_size // model.config.num_heads
    modules = list(twin.base_model.encoder.layer)

    def first(output):
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def run(ids, module=None, change=None):
        def hook(_, __, output):
            value = change(first(output).clone())
            return (value, *output[1:]) if isinstance(output, tuple) else value

        handle = module.register_forward_hook(hook) if module else None
        logits = twin(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0]
        if handle:
            handle.remove()
        return logits

    for sources, effects in ((range(len(masked)), restored), (donors, control)):
        for i, pair in enumerate(masked):
            source = masked[sources[i]].clean

            def score(module=None, change=None):
                return float(run(pair.corrupted, module, change)[pair.position].log_softmax(-1)[pair.target])  # noqa: B023

            before = score()
            for layer, module in enumerate(modules):
                kept = {}
                for name, one in (("hidden", module), ("context", module.attention.self)):
                    run(source, one, lambda value, name=name: kept.setdefault(name, value))  # noqa: B023
                for r, chosen in enumerate(patching.roles(pair, len(source))):

                    def put(value):
                        value[0, chosen] = kept["hidden"][0, chosen]  # noqa: B023
                        return value

                    expected = effects.by_position["hidden"][i, layer, r]
                    assert score(module, put) - before == pytest.approx(expected, abs=1e-5)
                for head in range(2):

                    def put_head(value):
                        part = slice(head * width, (head + 1) * width)  # noqa: B023
                        value[..., part] = kept["context"][..., part]  # noqa: B023
                        return value

                    expected = effects.by_head[i, layer, head]
                    assert score(module.attention.self, put_head) - before == pytest.approx(expected, abs=1e-5)
