"""The two reference forward passes of the parity report compared with transformers' classes. Needs `parity`."""

import dataclasses

import numpy as np
import pytest

from bert_jax.convert.forward_types import ENCODER_PREFIXES, ForwardInputs, family_of
from bert_jax.convert.parity import numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.errors import UserError
from tests.golden.make_families import CLASSES, at_real, direct, form_of, goldens, make, sampled
from tests.live import zoo

pytestmark = [
    pytest.mark.slow,
    # Warnings inside torch and transformers are not errors here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CASES = [(name, size) for name in CLASSES for size in (0, 1)]


def parts(outputs) -> dict[str, np.ndarray]:
    states = {f"layer {i}": state for i, state in enumerate(outputs.hidden_states)}
    return states | outputs.logits | ({"pooled": outputs.pooled_BH} if outputs.pooled_BH is not None else {})


def close(found: np.ndarray, expected: np.ndarray, inputs: ForwardInputs, name: str) -> None:
    """To 1e-5 of the values, at real tokens."""
    assert found.shape == expected.shape and np.std(expected) > 0.05, name
    found, expected = (at_real(values, inputs.attention_mask_BS) for values in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()), err_msg=name)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_both_references_equal_transformers(name, size):
    model = make(name, size)
    hf_model = form_of(model)
    inputs = sample_inputs(hf_model, None)
    assert (inputs.attention_mask_BS == 0).any() and inputs.attention_mask_BS[0].sum() == 1
    expected = direct(model, inputs)
    heads = {part for part in expected if "layer" not in part}
    assert heads or name in ("DistilBertModel", "ElectraModel", "ModernBertModel")

    numpy_outputs, hf_outputs = numpy_forward.run(hf_model, inputs), transformers_forward.run(hf_model, inputs)
    assert numpy_outputs.unused_tensors == hf_outputs.unused_tensors == () and hf_outputs.task is numpy_outputs.task
    assert parts(hf_outputs).keys() == expected.keys()
    assert parts(numpy_outputs).keys() - expected.keys() <= {"pooled"}
    for part, values in expected.items():
        close(parts(numpy_outputs)[part], values, inputs, part)
        np.testing.assert_array_equal(parts(hf_outputs)[part], values)

    report = parity_report.compare(numpy_outputs, hf_outputs, inputs.attention_mask_BS, library="x")
    assert report.passed and all(share > 0.99 for share in report.agreement.values()), report.lines()


@pytest.mark.parametrize("name", CLASSES)
def test_every_tensor_counts(name):
    """With another tensor in its place the numpy outputs differ: none is read and then forgotten."""
    hf_model = form_of(make(name, 0))
    inputs = ForwardInputs(*(array[::6] for array in sample_inputs(hf_model, None)))
    before = parts(numpy_forward.run(hf_model, inputs))
    rng = np.random.default_rng(1)
    for key, tensor in hf_model.tensors.items():
        changed = tensor + rng.normal(0, 0.2, tensor.shape).astype(np.float32)
        after = parts(
            numpy_forward.run(dataclasses.replace(hf_model, tensors=hf_model.tensors | {key: changed}), inputs)
        )
        largest = max(np.abs(values - after[part]).max() for part, values in before.items())
        # A key's bias adds the same to every score of a query, and softmax does not see it.
        unseen = key.endswith(("key.bias", "k_lin.bias"))
        assert largest < 1e-4 if unseen else largest > 1e-3, key


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "ModernBertModel"])
def test_a_bare_encoder_with_the_prefix(name):
    """As another format may name it; transformers' own files have none."""
    model = make(name, 0)
    bare = form_of(model)
    prefix = ENCODER_PREFIXES[family_of(bare)]
    prefixed = dataclasses.replace(bare, tensors={prefix + key: tensor for key, tensor in bare.tensors.items()})
    inputs = sample_inputs(bare, None)
    for side in (numpy_forward, transformers_forward):
        one, other = side.run(bare, inputs), side.run(prefixed, inputs)
        assert other.unused_tensors == ()
        np.testing.assert_array_equal(one.hidden_states[-1], other.hidden_states[-1])


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "AlbertModel"])
def test_no_pooler(name):
    hf_model = form_of(make(name, 0))
    tensors = {key: tensor for key, tensor in hf_model.tensors.items() if "pooler" not in key}
    assert len(tensors) == len(hf_model.tensors) - 2
    hf_model = dataclasses.replace(hf_model, tensors=tensors)
    inputs = sample_inputs(hf_model, None)
    numpy_outputs, hf_outputs = numpy_forward.run(hf_model, inputs), transformers_forward.run(hf_model, inputs)
    assert numpy_outputs.pooled_BH is None and hf_outputs.pooled_BH is None
    assert parity_report.compare(numpy_outputs, hf_outputs, inputs.attention_mask_BS, library="x").passed


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "RobertaForMaskedLM", "AlbertForPreTraining", "DistilBertForMaskedLM",
             "ElectraForMaskedLM", "ModernBertForMaskedLM"]
)  # fmt: skip
def test_decoders_tied_doubled_and_of_their_own(name):
    model = make(name, 0)
    hf_model = form_of(model)
    inputs = sample_inputs(hf_model, None)
    expected = direct(model, inputs)["mlm"]
    doubled = dataclasses.replace(hf_model, tensors={key: value.numpy() for key, value in model.state_dict().items()})
    assert len(doubled.tensors) > len(hf_model.tensors)
    loose = form_of(make(name, 0, tie_word_embeddings=False))
    apart = direct(make(name, 0, tie_word_embeddings=False), inputs)["mlm"]
    assert np.abs(apart - expected).max() > 0.1
    # A stored decoder takes precedence over the config's tie_word_embeddings.
    told_tied = dataclasses.replace(loose, config=loose.config | {"tie_word_embeddings": True})
    for wanted, each in ((expected, doubled), (apart, loose), (apart, told_tied)):
        for side in (numpy_forward, transformers_forward):
            found = side.run(each, inputs)
            assert found.unused_tensors == ()
            close(found.logits["mlm"], wanted, inputs, side.__name__)


def test_refusals_and_leftovers():
    hf_model = form_of(make("BertForPreTraining", 0))
    inputs = sample_inputs(hf_model, None)
    with pytest.raises(UserError, match=r"decoder\.weight' is missing"):
        untied = hf_model.config | {"tie_word_embeddings": False}
        transformers_forward.run(dataclasses.replace(hf_model, config=untied), inputs)
    less = {key: tensor for key, tensor in hf_model.tensors.items() if key != "bert.encoder.layer.1.output.dense.bias"}
    for side in (numpy_forward, transformers_forward):
        with pytest.raises(UserError, match=r"^BertForPreTraining: .*layer\.1\.output\.dense\.bias' is missing"):
            side.run(dataclasses.replace(hf_model, tensors=less), inputs)
        shallow = dataclasses.replace(hf_model, config=hf_model.config | {"num_hidden_layers": 2})
        outputs = side.run(shallow, inputs)
        assert len(outputs.unused_tensors) == 16 and all("layer.2" in name for name in outputs.unused_tensors)
        report = parity_report.compare(outputs, outputs, inputs.attention_mask_BS, library="x")
        assert not report.passed and "layer.2" in report.failures[0]
    refused = {
        "intermediate_size": (57, "size mismatch"),
        "hidden_act": ("odd", "odd"),
        "hidden_size": ("x", "hidden_size"),
        "id2label": (5, "'int' object has no attribute"),
        "pad_token_id": (10**6, "Padding_idx must be within"),
        "torch_dtype": ("odd", "no attribute 'odd'"),
    }
    for name, (value, told) in refused.items():
        with pytest.raises(
            UserError, match=f"^BertForPreTraining: BertForPreTraining refuses this model.*{told}"
        ) as caught:
            transformers_forward.run(dataclasses.replace(hf_model, config=hf_model.config | {name: value}), inputs)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "head", "size"),
    [("bert", "LMHeadModel", "narrow"), ("bert", "LMHeadModel", "wide"), ("roberta", "ForCausalLM", "narrow")],
)
def test_decoders_look_back_alone(family, head, size):
    model = zoo.build(family, head, size)
    hf_model = form_of(model)
    assert hf_model.config["is_decoder"] is True
    assert transformers_forward.class_name(hf_model) == type(model).__name__
    inputs = ForwardInputs(*zoo.inputs(family, size).values())
    expected = direct(model, inputs)
    numpy_outputs, hf_outputs = numpy_forward.run(hf_model, inputs), transformers_forward.run(hf_model, inputs)
    assert numpy_outputs.unused_tensors == hf_outputs.unused_tensors == ()
    for part, values in expected.items():
        close(parts(numpy_outputs)[part], values, inputs, part)
        np.testing.assert_array_equal(parts(hf_outputs)[part], values)
    both_ways = numpy_forward.run(dataclasses.replace(hf_model, config=hf_model.config | {"is_decoder": False}), inputs)
    assert not parity_report.compare(both_ways, hf_outputs, inputs.attention_mask_BS, library="x").passed


def test_buffers_and_spare_poolers_go_unread():
    """As roberta-base and bert-base-uncased are published."""
    hf_model = form_of(make("RobertaForMaskedLM", 0))
    spare = {"roberta.embeddings.position_ids": np.arange(50)[None], "roberta.pooler.dense.weight": np.eye(32),
             "roberta.pooler.dense.bias": np.zeros(32)}  # fmt: skip
    hf_model = dataclasses.replace(hf_model, tensors=hf_model.tensors | spare)
    inputs = sample_inputs(hf_model, None)
    for side in (numpy_forward, transformers_forward):
        assert side.run(hf_model, inputs).unused_tensors == ()


def test_the_other_side_is_transformers_here():
    hf_model = form_of(make("ElectraForPreTraining", 0))
    hf_model = dataclasses.replace(
        hf_model, config=hf_model.config | {"chunk_size_feed_forward": 7}
    )  # changes no result
    inputs = sample_inputs(hf_model, None)
    outputs, library = parity_report.reference_forward(hf_model, inputs)
    assert library == f"transformers {transformers.__version__}"
    report = parity_report.compare(
        numpy_forward.run(hf_model, inputs), outputs, inputs.attention_mask_BS, library=library
    )
    assert report.passed and report.lines()[0].startswith("parity with transformers 5")


def test_goldens_are_what_the_reference_gives():
    for name, size in (("RobertaForMaskedLM", 1), ("ModernBertForSequenceClassification", 0)):
        golden = goldens()[f"{name} {size}"]
        for part, values in direct(make(name, size), golden["inputs"]).items():
            expected = sampled(values, golden["inputs"].attention_mask_BS)
            np.testing.assert_allclose(golden["values"][part], expected, rtol=0, atol=1e-5)


def test_labels_are_counted_in_the_tensors():
    hf_model = form_of(make("BertForTokenClassification", 0))
    silent = {key: value for key, value in hf_model.config.items() if key not in ("id2label", "label2id", "num_labels")}
    inputs = ForwardInputs(*(array[:2] for array in sample_inputs(hf_model, None)))
    found = transformers_forward.run(dataclasses.replace(hf_model, config=silent), inputs)
    assert found.logits["task"].shape[-1] == 3
