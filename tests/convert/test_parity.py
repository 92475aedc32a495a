"""The parity report: what it lets pass, and that each kind of mistake in a conversion fails where it was made."""

import dataclasses
import functools
import json
import re

import jax
import numpy as np
import pytest

from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs, TaskKind
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.parity_report import TokenizerAgreement, compare, tokenizer_agreement
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import from_huggingface
from tests.convert.test_numpy_forward import recipe_form

FORM = recipe_form()
INPUTS = sample_inputs(FORM, None)
QUERY, KEY = (f"bert.encoder.layer.1.attention.self.{name}.weight" for name in ("query", "key"))


@functools.cache
def reference() -> ForwardOutputs:
    return numpy_forward.run(FORM, INPUTS)


def report_on(changed: dict[str, np.ndarray]) -> parity_report.ParityReport:
    """Of a conversion that got these tensors wrong."""
    model = from_huggingface(dataclasses.replace(FORM, tensors=FORM.tensors | changed))
    return compare(jax_forward.run(model, INPUTS), reference(), INPUTS.attention_mask_BS, library="numpy")


def first_failure(report: parity_report.ParityReport) -> str:
    assert not report.passed
    return re.match(r"(.*) differs by ", report.failures[0]).group(1)


def test_a_right_conversion_passes():
    report = report_on({})
    assert report.passed and report.failures == ()
    assert [part.name for part in report.layers] == ["embeddings", "layer 1", "layer 2", "layer 3"]
    assert [part.name for part in report.heads] == ["mlm logits", "pair logits", "pooled vector"]
    assert report.tokens == INPUTS.attention_mask_BS.sum() and report.rows == len(INPUTS.input_ids_BS)
    assert report.agreement == {"mlm": 1.0, "pair": 1.0}
    assert 0 < max(part.largest for part in report.layers) < 2e-5
    assert all(part.limit >= parity_report.LIMIT for part in report.layers)
    lines = report.lines()
    assert lines[0].startswith(f"parity with numpy, {report.rows} rows of {report.tokens} tokens")
    assert any(line.startswith("  layer 2") for line in lines) and lines[-1] == "parity: passed"
    assert not any("FAIL" in line for line in lines)


MISTAKES = {
    "one weight": ("layer 2", "bert.encoder.layer.1.intermediate.dense.weight"),
    "embeddings": ("embeddings", "bert.embeddings.position_embeddings.weight"),
    "mlm head": ("mlm logits", "cls.predictions.bias"),
    "pair head": ("pair logits", "cls.seq_relationship.bias"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_value_that_is_off_by_a_hundredth(mistake):
    place, name = MISTAKES[mistake]
    off = FORM.tensors[name].copy()
    off.flat[5 % off.size] += 0.01  # of all values together, LayerNorm would take it off again
    report = report_on({name: off})
    assert first_failure(report) == place
    assert any(line.startswith(f"  {place}") and line.endswith("<- FAILS") for line in report.lines())
    assert report.lines()[-1].startswith(f"parity: FAILED, {place} differs by")


def test_swapped_query_and_key():
    assert first_failure(report_on({QUERY: FORM.tensors[KEY], KEY: FORM.tensors[QUERY]})) == "layer 2"


def test_a_square_matrix_the_wrong_way_round():
    name = "bert.encoder.layer.2.attention.output.dense.weight"
    assert first_failure(report_on({name: FORM.tensors[name].T})) == "layer 3"
    pooler = "bert.pooler.dense.weight"
    assert first_failure(report_on({pooler: FORM.tensors[pooler].T})) == "pair logits"


def test_not_a_number():
    """A file with one is refused before; the computation may make one."""
    model = from_huggingface(FORM)
    params = jax.tree.map(np.array, model.params)
    params["encoder"]["layers"]["down"]["bias"][0, 3] = np.nan
    actual = jax_forward.run(model._replace(params=params), INPUTS)
    report = compare(actual, reference(), INPUTS.attention_mask_BS, library="numpy")
    assert first_failure(report) == "layer 1"
    assert "  layer 1        not a number (1.0e-04)  <- FAILS" in report.lines()
    report_lines = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert report_lines["layers"]["layer 1"]["largest"] is None and not report_lines["passed"]


def outputs(hidden=None, task=None, **logits) -> ForwardOutputs:
    states = [np.zeros((2, 3, 4), np.float32)] if hidden is None else hidden
    return ForwardOutputs(states, {name: np.asarray(values, np.float32) for name, values in logits.items()}, task)


MASK = np.array([[1, 1, 0], [1, 0, 0]])


def judge(actual: ForwardOutputs, expected: ForwardOutputs, **options) -> parity_report.ParityReport:
    return compare(actual, expected, MASK, library="x", **options)


@pytest.mark.parametrize(("size", "passes"), [(1.0, False), (0.1, False), (100.0, True)])
def test_large_values_may_differ_by_more(size, passes):
    state = np.full((2, 3, 4), size, np.float32)
    report = judge(outputs([state + np.float32(1e-3)]), outputs([state]))
    assert report.passed is passes
    (layer,) = report.layers
    assert layer.size == pytest.approx(size) and layer.limit == pytest.approx(1e-4 * max(1, size))
    assert layer.largest == pytest.approx(1e-3, rel=0.1)
    assert judge(outputs([state + np.float32(1e-3)]), outputs([state]), limit=2e-3).passed


def test_padding_is_left_out_but_not_what_is_no_number():
    state = np.zeros((2, 3, 4), np.float32)
    padded, real = state.copy(), state.copy()
    padded[0, 2, 1], real[0, 1, 1] = 7, 7
    assert judge(outputs([padded]), outputs([state])).passed
    assert not judge(outputs([real]), outputs([state])).passed
    for value in (np.nan, np.inf):
        padded[0, 2, 1] = value
        assert not judge(outputs([padded]), outputs([state])).passed
        assert not judge(outputs([state]), outputs([padded])).passed
        assert not judge(outputs([padded]), outputs([padded])).passed


def test_top_1():
    """Only at the three real tokens."""
    expected = np.zeros((2, 3, 4))
    expected[..., 2] = 1
    actual = expected.copy()
    actual[0, 1, 3] = 1.5  # real
    actual[0, 2, 3] = actual[1, 1, 3] = actual[1, 2, 3] = 1.5  # padding
    report = judge(outputs(mlm=actual), outputs(mlm=expected))
    assert report.agreement == {"mlm": pytest.approx(2 / 3)} and not report.passed
    assert "  top-1 of mlm: 66.66 % equal" in report.lines()
    near = expected.copy()
    near[0, 1, 3] = 1 + 1e-5
    report = judge(outputs(mlm=near), outputs(mlm=expected))
    assert not report.passed  # 1 away, tied or not
    expected[0, 1, 3] = 1
    report = judge(outputs(mlm=near), outputs(mlm=expected))
    assert report.passed and report.agreement["mlm"] < 1  # all but tied: shown, not failed


def test_top_1_of_pairs_and_tasks():
    flip, same = [[0.0, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]
    assert judge(outputs(pair=flip), outputs(pair=same)).agreement == {"pair": 0.5}
    rows = [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]  # as wide as the batch is long: no mask may be taken for it
    other = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    assert task_agreement(rows, other, TaskKind.SEQUENCE) == 0.5
    assert task_agreement([[3.0], [1.0]], [[1.0], [2.0]], TaskKind.SEQUENCE) is None  # a regression
    # Real: (0, 0), (0, 1), (1, 0).
    assert task_agreement([[1, -1, 1], [1, 1, 1]], [[1, 1, -1], [1, -1, -1]], TaskKind.REPLACED) == pytest.approx(2 / 3)
    tokens = np.zeros((2, 3, 2))
    tokens[:, :, 1] = 1
    assert task_agreement(np.zeros((2, 3, 2)), tokens, TaskKind.TOKENS) == 0
    # Starts differ in row 0, all else is the same; the highest scores of all stand at padding, which answers nothing.
    start, moved = np.zeros((2, 3, 2)), np.zeros((2, 3, 2))
    start[0, 0, 0] = moved[0, 1, 0] = 1
    start[:, 2], moved[0, 2] = 9, 8
    assert task_agreement(start, moved, TaskKind.SPAN) == 0.75


def task_agreement(actual, expected, task: TaskKind) -> float | None:
    return judge(
        ForwardOutputs([], {"task": np.asarray(actual, np.float32)}),
        ForwardOutputs([], {"task": np.asarray(expected, np.float32)}, task),
    ).agreement.get("task")


def test_what_cannot_be_compared_fails():
    state, pair = np.zeros((2, 3, 4), np.float32), np.zeros((2, 2))
    cases = {
        "the converted model has 1 layers, the reference 0": (outputs([state, state]), outputs([state])),
        "only the converted model has a head 'pair'": (outputs(pair=pair), outputs()),
        "only the reference model has a head 'pair'": (outputs(), outputs(pair=pair)),
        "pair logits: shape [2, 3], the reference has [2, 2]": (outputs(pair=np.zeros((2, 3))), outputs(pair=pair)),
        "tensor 'spare' is not used by the model of x": (
            outputs(),
            dataclasses.replace(outputs(), unused_tensors=("spare",)),
        ),
    }
    for problem, (actual, expected) in cases.items():
        report = judge(actual, expected)
        assert report.failures == (problem,) and not report.passed
        assert f"  {problem}" in report.lines()


def test_tokenizers():
    def whole(text):
        return [len(word) for word in text.split()]

    texts = ("one two", "Three", "four")
    assert tokenizer_agreement([whole, whole], texts, "a library") == (3, 3, None, "a library")
    differing = [whole, whole, lambda text: tuple(whole(text)) if text.islower() else [0]]
    found = tokenizer_agreement(differing, texts, "a library")
    assert found == TokenizerAgreement(2, 3, "Three", "a library")
    report = judge(outputs(), outputs(), tokenizer=found)
    assert not report.passed and report.failures == ("the tokenizers give different ids for 'Three'",)
    assert "  tokenizer: 2 of 3 texts equal to a library, first not 'Three'" in report.lines()
    assert report.to_dict()["tokenizer"]["library"] == "a library"
    assert judge(outputs(), outputs(), tokenizer=found._replace(equal=3, first_difference=None)).passed


def test_numpy_is_the_other_side_where_there_is_no_transformers(monkeypatch):
    monkeypatch.setattr(transformers_forward.importlib.util, "find_spec", lambda name: None)
    assert not transformers_forward.available()
    few = ForwardInputs(*(array[:2] for array in INPUTS))
    outputs, library = parity_report.reference_forward(FORM, few)
    assert library == "numpy"
    np.testing.assert_array_equal(outputs.logits["pair"], numpy_forward.run(FORM, few).logits["pair"])


@pytest.mark.parametrize(("version", "good"), [("4.57.1", False), ("5.23.0", True)])
def test_only_transformers_5_is_taken(monkeypatch, version, good):
    monkeypatch.setattr(transformers_forward.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(transformers_forward.importlib.metadata, "version", lambda name: version)
    assert transformers_forward.available() is good
    assert transformers_forward.library_version() == f"transformers {version}"
