"""Pseudo-log-likelihoods equal those of a loop that masks one position per forward pass; minimal pairs."""

import json

import numpy as np
import pytest
from etils import epath

from bert_jax.analysis.cloze import minimal_pairs
from bert_jax.analysis.cloze.pll import VARIANTS, pseudo_log_likelihoods, token_scores
from bert_jax.analysis.cloze.predictions import Shape, plan_shapes
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import batches, encode_sentences
from tests.interventions.models import small_model

SENTENCES = ["The river sings.", "a crab falls over the dark stone .", "the cat don't sing", "Stone", "the the"]


def context_free(bias: np.ndarray) -> LoadedModel:
    """A model whose logits are the bias of the MLM head, whatever the context."""
    model = small_model()
    norm = {name: np.zeros_like(value) for name, value in model.params["mlm"]["norm"].items()}
    head = {**model.params["mlm"], "norm": norm, "bias": np.asarray(bias, np.float32)}
    return LoadedModel(model.config, model.heads, {**model.params, "mlm": head}, model.tokenizer)


def one_by_one(model: LoadedModel, row, variant: str) -> list[float]:
    """Log-probability of each token, one forward pass with logits at all positions for each."""
    scores = []
    for position in range(1, len(row.input_ids) - 1):
        ids = row.input_ids.copy()
        for other in range(1, len(ids) - 1):
            same_word = row.word_ids[other] == row.word_ids[position]
            later = {"original": False, "within_word_l2r": other > position, "whole_word": True}[variant]
            if other == position or (same_word and later):
                ids[other] = model.tokenizer.mask_id
        (batch,) = batches([row._replace(input_ids=ids)], model.tokenizer.pad_id, 1)
        logits = capture(model, batch, ["mlm_logits"])["mlm_logits"][0, position].astype(float)
        scores.append(logits[row.input_ids[position]] - np.log(np.exp(logits).sum()))
    return scores


def test_pll_equals_a_loop():
    model = small_model()
    rows = encode_sentences(SENTENCES, model.tokenizer, 64)
    found = token_scores(model, rows)
    for variant in VARIANTS:
        for row, scores in zip(rows, found[variant], strict=True):
            np.testing.assert_allclose(scores, one_by_one(model, row, variant), atol=1e-5)
    # The variants differ where a word has several tokens, and only there.
    crab = rows[1].word_ids[1:-1] == 1
    original, left_to_right, whole = (found[variant][1] for variant in VARIANTS)
    assert (np.abs(original - whole)[crab] > 1e-4).all() and crab.sum() == 4
    assert (np.abs(left_to_right - whole)[crab] > 1e-4).tolist() == [False, True, True, True]
    assert (original == left_to_right)[~crab].all() and (original == whole)[~crab].all()


def test_pll_is_a_sum_and_independent_of_other_sentences():
    model = small_model()
    rows = encode_sentences(SENTENCES, model.tokenizer, 64)
    found = pseudo_log_likelihoods(model, rows)
    alone = pseudo_log_likelihoods(model, rows[1:2], ["whole_word"])
    np.testing.assert_allclose(alone["whole_word"], found["whole_word"][1:2], atol=1e-5)
    np.testing.assert_allclose(found["original"][1], sum(one_by_one(model, rows[1], "original")), atol=1e-4)


def test_shapes_have_all_rows_once():
    lengths = np.array([3, 8, 9, 17, 40, 5] * 300 + [33])
    shapes = plan_shapes(lengths, tokens_per_batch=256)
    seen = np.concatenate([shape.indices for shape in shapes])
    assert sorted(seen.tolist()) == list(range(len(lengths)))
    assert [(shape.length, shape.rows_per_pass) for shape in shapes] == [(16, 16), (40, 6)]
    assert all((lengths[shape.indices] <= shape.length).all() for shape in shapes)
    assert plan_shapes(np.array([], int)) == []
    passes = list(Shape(8, 4, np.array([5, 6, 7, 8, 9])).passes())
    assert [(chosen.tolist(), count) for chosen, count in passes] == [([5, 6, 7, 8], 4), ([9, 9, 9, 9], 1)]


def write_pairs(path, pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs) + "\n")
    return [epath.Path(path)]


def test_minimal_pairs_of_a_model_without_context(tmp_path):
    """Its score is the sum of the biases, so that the right answers are known, and the lone mask gives the same."""
    tokenizer = small_model().tokenizer
    bias = np.zeros(tokenizer.vocab_size)
    bias[[tokenizer.token_to_id("sings"), tokenizer.token_to_id("falls")]] = 2, 1
    model = context_free(bias)
    sentences = [
        ("the river sings", "the river falls", "verb", "one"),
        ("the river falls", "the river sings", "verb", "one"),
        ("a stone sings", "a stone runs", "verb", "two"),
        ("the river sings", "river the sings", "order", "two"),
        ("The river", "the river", "case", None),
        ("the " * 70, "the", "length", None),
    ]
    pairs = [
        {
            "sentence_good": a,
            "sentence_bad": b,
            "UID": uid,
            "field": "f",
            **({"linguistics_term": term} if term else {}),
        }
        for a, b, uid, term in sentences
    ]
    files = write_pairs(tmp_path / "p.jsonl", pairs)
    found = minimal_pairs.run(files, {"model": model, "random_weights": small_model()}, 0, 0, False)[0]
    assert (found["pairs"], found["pairs_in_files"], found["skipped_too_long"], found["not_drawn"]) == (5, 6, 1, 0)
    for name in (*VARIANTS, "lone_mask"):
        verb, order, case = (found["by_uid"][uid][name] for uid in ("verb", "order", "case"))
        np.testing.assert_allclose(verb["accuracy"], 2 / 3)
        for one in (case, order) if name == "lone_mask" else (case,):
            assert (one["accuracy"], one["items"], one["ties"]) == (0.5, 1, 1)
    assert found["by_uid"]["verb"]["fewer_tokens"]["ties"] == 2
    assert list(found["by_phenomenon"]) == ["one", "two"] and found["by_field"]["f"]["original"]["items"] == 5
    by_uid = [one["whole_word"]["accuracy"] for one in found["by_uid"].values()]
    np.testing.assert_allclose(found["mean_of_uids"]["whole_word"], np.mean(by_uid))
    low, high = found["mean_of_uids"]["whole_word_interval"]
    assert 0 <= low < np.mean(by_uid) < high <= 1
    np.testing.assert_allclose(found["all_pairs"]["whole_word"]["accuracy"], (2 + by_uid[1] + 0.5) / 5)


def test_pairs_are_drawn_by_uid(tmp_path):
    pairs = [{"sentence_good": f"a {i}", "sentence_bad": "b", "UID": "x" if i < 9 else "y"} for i in range(12)]
    read = minimal_pairs.read_pairs(write_pairs(tmp_path / "p.jsonl", pairs))
    drawn = [minimal_pairs.draw_pairs(read, 9, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and [pair.uid for pair in drawn[0]] == ["x"] * 4 + ["y"] * 3
    assert minimal_pairs.draw_pairs(read, 0, 0) == read


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"bad.jsonl: the file is empty: write one JSON object per line"),
        ('{"sentence_good": "a", "sentence_bad": "b"}\n\n{"sentence', r"bad.jsonl, line 3 is not JSON \(.*\)"),
        ("[1]", r"bad.jsonl, line 1 is not a JSON object, but \[1\]"),
        ('{"sentence_good": "a"}', r"bad.jsonl, line 1: no key 'sentence_bad': there are sentence_good"),
        ('{"sentence_good": "a", "sentence_bad": 3}', r"line 1: 'sentence_bad' is 3: it must be a text"),
        ('{"sentence_good": "a", "sentence_bad": " "}', r"line 1: 'sentence_bad' is ' ': it must be a text"),
    ],
)
def test_malformed_pairs(content, message, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        minimal_pairs.read_pairs([epath.Path(tmp_path / "bad.jsonl")])


def test_no_pair_fits(tmp_path):
    files = write_pairs(tmp_path / "p.jsonl", [{"sentence_good": "the " * 70, "sentence_bad": "the"}])
    with pytest.raises(UserError, match="no pair has 1 to 62 tokens in both sentences"):
        minimal_pairs.run(files, {"model": small_model()}, 0, 0, False)
