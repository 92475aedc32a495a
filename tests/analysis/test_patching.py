"""Activation patching: a planted head is found, each patch is that of an intervention, and the suite runs."""

import json

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax import report
from bert_jax.analysis.cloze import PATCHING, patching
from bert_jax.analysis.cloze.minimal_pairs import SentencePair
from bert_jax.analysis.cloze.patching import CONTEXT, ROLES, PatchingSettings
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.intervention import Intervention
from bert_jax.interventions.rows import batches
from tests.interventions.models import LAYERS, small_model

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
    found = np.array(patching.shares(restored.by_head, totals, 0)["restored"])
    np.testing.assert_allclose(found, np.eye(LAYERS)[LAYER][:, None] * np.eye(2)[HEAD], atol=1e-4)
    by_role = {site: np.array(patching.shares(x, totals, 0)["restored"]) for site, x in restored.by_position.items()}
    differs, mask = ROLES.index("tokens that differ"), ROLES.index("masked token")
    np.testing.assert_allclose(by_role["hidden"][:, differs], [1, 0, 0], atol=1e-4)
    np.testing.assert_allclose(by_role["hidden"][:, mask], [0, 1, 1], atol=1e-4)
    np.testing.assert_allclose(by_role["attention.output"][LAYER, mask], 1, atol=1e-4)
    other = np.array(patching.shares(control.by_head, totals, 0)["restored"])
    assert abs(other[LAYER, HEAD]) < 0.9 and np.abs(np.delete(other.ravel(), LAYER * 2 + HEAD)).max() < 1e-4


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
    sentences += [("the " * 40, "a " * 40)]
    usable, skipped = patching.encode_equal_lengths(pairs_of(*sentences), model, 32)
    assert len(usable) == 1
    assert {k: v for k, v in skipped.items() if v} == {"too_long": 1, "other_lengths": 1, "no_common_token": 2}
    masked = patching.mask_pairs(usable, model, False)
    assert patching.choose_donors([*masked, *masked], 0) == [1, 0] and patching.choose_donors(masked, 0) == [-1]


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
    result = json.loads(json.dumps(PATCHING.run(inputs, PatchingSettings()), allow_nan=False))
    assert (result["pairs"] + result["skipped"]["no_effect"], result["drawn"]) == (12, 13) and result["pairs"] > 3
    assert result["skipped"]["other_lengths"] == 1
    heads = result["model"][CONTEXT]
    assert (np.array(heads["low"]) <= heads["restored"]).all() and (np.array(heads["restored"]) <= heads["high"]).all()
    best = PATCHING.scalars(result)["restored by the best head (%)"]
    assert best.value == pytest.approx(100 * np.max(heads["restored"])) and best.interval[0] <= best.value
    blocks = PATCHING.blocks(result)
    assert sum(isinstance(block, report.Heatmap) for block in blocks) == 8


def test_nothing_to_patch(tmp_path):
    inputs = SuiteInputs(small_model(), write(tmp_path, ("the river .", "a stone falls .")), 0, False)
    message = r"none of 1 minimal pairs can be patched \(other_lengths 1\)"
    assert PATCHING.obstacle(inputs, PatchingSettings()).startswith("none of 1 minimal pairs can be patched")
    with pytest.raises(UserError, match=message):
        PATCHING.run(inputs, PatchingSettings())
