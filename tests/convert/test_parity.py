"""The parity report: what it lets pass, and that each kind of mistake in a conversion fails where it was made."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.parity_report import TokenizerAgreement, compare_outputs
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import from_huggingface
from tests.golden import recipe

HF_CONFIG = recipe.SETTINGS | {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0}
HF_MODEL = HuggingFaceModel(HF_CONFIG, recipe.make_weights(recipe.SETTINGS, 3), "recipe")
INPUTS = sample_inputs(HF_MODEL, None)
QUERY, KEY = (f"bert.encoder.layer.1.attention.self.{name}.weight" for name in ("query", "key"))
OUT, POOLER = "bert.encoder.layer.2.attention.output.dense.weight", "bert.pooler.dense.weight"


@functools.cache
def reference() -> ForwardOutputs:
    return numpy_forward.run(HF_MODEL, INPUTS)


def report_on(changed: dict[str, np.ndarray]) -> parity_report.ParityReport:
    """Of a conversion that got these tensors wrong."""
    model = from_huggingface(dataclasses.replace(HF_MODEL, tensors=HF_MODEL.tensors | changed))
    return compare_outputs(jax_forward.run(model, INPUTS), reference(), INPUTS.attention_mask_BS, library="numpy")


def test_a_right_conversion_passes():
    report = report_on({})
    assert report.passed and report.failures == ()
    layers = ["embeddings", "layer 1", "layer 2", "layer 3"]
    assert {part.name for part in report.differences} == {*layers, "mlm logits", "pair logits", "pooled vector"}
    assert [part.name for part in report.differences[:4]] == layers
    assert report.tokens == INPUTS.attention_mask_BS.sum() and report.rows == len(INPUTS.input_ids_BS)
    assert 0 < max(part.value for part in report.differences) < 2e-5
    assert all(part.limit >= parity_report.LIMIT for part in report.differences)
    lines = report.lines()
    assert lines[0].startswith(f"parity with numpy, {report.rows} rows of {report.tokens} tokens")
    assert any(line.startswith("  layer 2") for line in lines) and lines[-1] == "parity: passed"
    assert not any("FAIL" in line for line in lines)


def off_by_a_hundredth(name: str) -> dict[str, np.ndarray]:
    """A change of one value: of all values together, LayerNorm would take it off again."""
    off = HF_MODEL.tensors[name].copy()
    off.flat[5 % off.size] += 0.01
    return {name: off}


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        ("layer 2", off_by_a_hundredth("bert.encoder.layer.1.intermediate.dense.weight")),
        ("embeddings", off_by_a_hundredth("bert.embeddings.position_embeddings.weight")),
        ("mlm logits", off_by_a_hundredth("cls.predictions.bias")),
        ("pair logits", off_by_a_hundredth("cls.seq_relationship.bias")),
        ("layer 2", {QUERY: HF_MODEL.tensors[KEY], KEY: HF_MODEL.tensors[QUERY]}),
        ("layer 3", {OUT: HF_MODEL.tensors[OUT].T}),
        ("pooled vector", {POOLER: HF_MODEL.tensors[POOLER].T}),
    ],
)
def test_a_mistake_fails_where_it_was_made(place, changed):
    """One wrong value, two tensors swapped, a square matrix transposed."""
    report = report_on(changed)
    assert not report.passed and re.match(r"(.*) differs by ", report.failures[0])[1] == place
    assert any(line.startswith(f"  {place}") and line.endswith("<- FAILS") for line in report.lines())
    assert report.lines()[-1].startswith(f"parity: FAILED, {place} differs by")


def test_not_a_number():
    """A file with one is refused before; the computation may make one."""
    model = from_huggingface(HF_MODEL)
    params = jax.tree.map(np.array, model.params)
    params["encoder"]["layers"]["down"]["bias"][0, 3] = np.nan
    actual = jax_forward.run(model._replace(params=params), INPUTS)
    report = compare_outputs(actual, reference(), INPUTS.attention_mask_BS, library="numpy")
    assert "  layer 1        not a number (1.0e-04)  <- FAILS" in report.lines()
    described = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert described["differences"]["layer 1"]["largest"] is None and not described["passed"]


def judge(actual: ForwardOutputs, expected: ForwardOutputs, **options) -> parity_report.ParityReport:
    """Of two rows, with two tokens and one."""
    return compare_outputs(actual, expected, np.array([[1, 1, 0], [1, 0, 0]]), library="x", **options)


@pytest.mark.parametrize(("size", "passes"), [(1.0, False), (0.1, False), (100.0, True)])
def test_large_values_may_differ_by_more(size, passes):
    state = np.full((2, 3, 4), size, np.float32)
    report = judge({"layer 1": state + np.float32(1e-3)}, {"layer 1": state})
    assert report.passed is passes
    (layer,) = report.differences
    assert layer.limit == pytest.approx(1e-4 * max(1, size)) and layer.value == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("name", ["layer 1", "task logits"])
def test_padding_is_left_out_but_not_what_is_no_number(name):
    state = np.zeros((2, 3, 4), np.float32)
    padded, real = state.copy(), state.copy()
    padded[0, 2, 1], real[0, 1, 1] = 7, 7
    assert judge({name: padded}, {name: state}).passed
    assert not judge({name: real}, {name: state}).passed
    for value in (np.nan, np.inf):
        padded[0, 2, 1] = value
        assert not judge({name: padded}, {name: state}).passed
        assert not judge({name: state}, {name: padded}).passed
        assert not judge({name: padded}, {name: padded}).passed


def test_classes_of_whole_rows_have_no_padding():
    """As many classes as positions: no mask may be taken for them."""
    logits = np.zeros((2, 3), np.float32)
    last = logits.copy()
    last[1, 2] = 1
    assert not judge({"task logits": last}, {"task logits": logits}).passed


def test_what_cannot_be_compared_fails():
    state, pair = np.zeros((2, 3, 4), np.float32), np.zeros((2, 2))
    cases = {
        "only the converted model has 'layer 1'": ({"embeddings": state, "layer 1": state}, {"embeddings": state}),
        "only the reference model has 'pair logits'": ({}, {"pair logits": pair}),
        "pair logits: shape [2, 3], the reference has [2, 2]": (
            {"pair logits": np.zeros((2, 3))},
            {"pair logits": pair},
        ),
    }
    for problem, (actual, expected) in cases.items():
        report = judge(actual, expected)
        assert report.failures == (problem,) and not report.passed
        assert f"  {problem}" in report.lines()
    assert judge({"pooled vector": pair}, {}).passed  # most classes of transformers do not return it


def test_tokenizers():
    report = judge({}, {}, tokenizer=TokenizerAgreement(2, 3, "Three", "one", "two"))
    assert not report.passed and report.failures == ("the tokenizers give different ids for 'Three'",)
    line = "  tokenizer: 2 of 3 texts equal, first not 'Three'; source read by one, written files by two"
    assert line in report.lines()
    assert report.to_dict()["tokenizer"]["source_library"] == "one"
    assert judge({}, {}, tokenizer=TokenizerAgreement(3, 3, None, "one", "two")).passed


def test_numpy_is_the_other_side_where_there_is_no_transformers(monkeypatch):
    monkeypatch.setattr(transformers_forward.importlib.util, "find_spec", lambda name: None)
    assert not transformers_forward.available()
    few = ForwardInputs(*(array[:2] for array in INPUTS))
    outputs, library = parity_report.reference_forward(HF_MODEL, few)
    assert library == "numpy"
    np.testing.assert_array_equal(outputs["pair logits"], numpy_forward.run(HF_MODEL, few)["pair logits"])


@pytest.mark.parametrize(("version", "good"), [("4.57.1", False), ("5.23.0", True)])
def test_only_transformers_5_is_taken(monkeypatch, version, good):
    monkeypatch.setattr(transformers_forward.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(transformers_forward.importlib.metadata, "version", lambda name: version)
    assert transformers_forward.available() is good
    assert transformers_forward.library_version() == f"transformers {version}"
