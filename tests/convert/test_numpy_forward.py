"""The numpy forward pass, the JAX model and golden values; live/test_families.py has every family."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.convert.forward_types import SEQUENCE, SPAN, TOKENS, heads_of
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import NativeModel, from_huggingface, infer_model_type, to_huggingface
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from tests.golden import make_families

pytestmark = pytest.mark.usefixtures("quick_compilation")

GOLDENS = make_families.goldens()
REFUSED = {
    "Albert.* 1": "inner_group_num is 2",
    "Electra.* 1": "hidden_act 'silu' is not one of",
    "ModernBert.* 1": "norm_bias is True",
}
"""Configs that the numpy forward pass supports and bert_jax does not; no published model uses them."""


def golden_model(case: str, **changes) -> HuggingFaceModel:
    """The model of a golden; `changes` are of its config."""
    golden = GOLDENS[case]
    tensors = {key: make_families.drawn(key, tuple(shape)) for key, shape in golden["shapes"].items()}
    return HuggingFaceModel(golden["config"] | changes, tensors, case)


def test_goldens_are_of_every_family_and_head():
    assert len(GOLDENS) == 2 * len(make_families.CLASSES) == 96
    assert {re.match("(.*?)(For|Model )", case)[1] for case in GOLDENS} == {*make_families.SETTINGS}
    assert all(np.std(values) > 0.02 for golden in GOLDENS.values() for values in golden["values"].values())


CASES = [case for case in GOLDENS if case.endswith((" 0", "ForMaskedLM 1"))] + ["ModernBertForSequenceClassification 1"]
"""live/test_families.py has the other heads in the second size."""


@pytest.mark.parametrize("case", CASES)
def test_families(case):
    """Recorded outputs of transformers: every hidden state and head, JAX to 1e-4, numpy to 1e-5."""
    golden, hf_model = GOLDENS[case], golden_model(case)
    mask_BS = golden["inputs"].attention_mask_BS
    expected = {make_families.PARTS.get(part, part): values for part, values in golden["values"].items()}
    sides = {1e-5: numpy_forward.run(hf_model, golden["inputs"])}
    refusal = next((refusal for name, refusal in REFUSED.items() if re.fullmatch(name, case)), None)
    if refusal is None:
        model = from_huggingface(hf_model)
        assert to_huggingface(model, case).config["architectures"] == [case.partition(" ")[0]]
        sides[1e-4] = jax_forward.run(model, golden["inputs"])
    else:
        with pytest.raises(UserError, match=refusal):
            from_huggingface(hf_model)
    for limit, outputs in sides.items():
        assert outputs.keys() - expected.keys() <= {"pooled vector"} and expected.keys() <= outputs.keys()
        for part, values in expected.items():
            found, bound = make_families.sampled(outputs[part], mask_BS), limit * max(1, np.abs(values).max())
            np.testing.assert_allclose(found, values, rtol=0, atol=bound, err_msg=f"{part}, {limit}")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("ElectraForMaskedLM 0", {"hidden_act": "gelu_new"}),
        ("ElectraForPreTraining 0", {"hidden_act": "gelu_new"}),
        ("RobertaForMaskedLM 0", {"hidden_act": "gelu_fast"}),
        ("ModernBertForMaskedLM 0", {"hidden_activation": "relu", "global_attn_every_n_layers": 2}),
        ("ModernBertForMaskedLM 0", {"classifier_activation": "relu"}),
        ("ModernBertForSequenceClassification 0", {"hidden_activation": "gelu_new"}),
    ],
)
def test_the_activation_of_the_layers_is_not_that_of_the_head(case, changes):
    """Both sides agree, and what is written again is the same model; a wrong head would be seen."""
    hf_model, inputs = golden_model(case, **changes), GOLDENS[case]["inputs"]
    model, expected = from_huggingface(hf_model), numpy_forward.run(hf_model, inputs)
    report = parity_report.compare_outputs(
        jax_forward.run(model, inputs), expected, inputs.attention_mask_BS, library="numpy"
    )
    assert report.passed, report.lines()
    assert from_huggingface(to_huggingface(model, case))[1:3] == model[1:3]


def test_an_activation_that_a_family_does_not_have():
    model = from_huggingface(golden_model("RobertaForMaskedLM 1"))
    assert model.config.activation == "relu" and model.heads.mlm_activation == "gelu"
    with pytest.raises(UserError, match="an MLM head with relu cannot be written as roberta, whose head has gelu"):
        to_huggingface(model._replace(heads=dataclasses.replace(model.heads, mlm_activation=None)), "here")


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_causal_models(family):
    """A native model converted to transformers: every state and logit, without attention to later tokens."""
    config = ModelConfig(
        vocab_size=211,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        max_positions=40,
        position_offset=0 if family == "bert" else 2,
        direction="causal",
    )
    heads = Heads()
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(leaf.size).normal(0.1, 0.3, leaf.shape).astype(np.float32),
        bert.shapes(config, heads),
    )
    hf_model = to_huggingface(NativeModel(infer_model_type(config, heads), config, heads, params), "native model")
    assert hf_model.config["architectures"] == [{"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM"}[family]]
    inputs = sample_inputs(hf_model, None)
    assert transformers_forward.class_name(hf_model) == hf_model.config["architectures"][0]
    found, jax_outputs = numpy_forward.run(hf_model, inputs), jax_forward.run(from_huggingface(hf_model), inputs)
    assert parity_report.compare_outputs(jax_outputs, found, inputs.attention_mask_BS, library="x").passed
    both_ways = dataclasses.replace(hf_model, config=hf_model.config | {"is_decoder": False})
    both_ways = numpy_forward.run(both_ways, inputs)
    assert not parity_report.compare_outputs(jax_outputs, both_ways, inputs.attention_mask_BS, library="x").passed
    row = int(inputs.attention_mask_BS.sum(1).argmax())
    last = int(inputs.attention_mask_BS[row].sum()) - 1
    changed = inputs.input_ids_BS.copy()
    changed[row, last] = 5 if changed[row, last] != 5 else 6
    after = numpy_forward.run(hf_model, inputs._replace(input_ids_BS=changed))["mlm logits"][row]
    before = found["mlm logits"][row]
    np.testing.assert_array_equal(after[:last], before[:last])
    assert np.abs(after[last] - before[last]).max() > 1e-3


@pytest.mark.parametrize("family", ["albert", "distilbert", "electra", "mobilebert", "modernbert"])
def test_no_decoders_in_other_families(family):
    """Theirs would look both ways in spite of the setting."""
    case = next(case for case, golden in GOLDENS.items() if golden["config"]["model_type"] == family)
    from_huggingface(golden_model(case))
    with pytest.raises(UserError, match=f"{case}: is_decoder is True: {family} has no causal model"):
        from_huggingface(golden_model(case, is_decoder=True))


def named(family: str, names: str, architecture: str = "") -> HuggingFaceModel:
    table = {name: np.zeros(0, np.float32) for name in names.split()}
    return HuggingFaceModel(
        {"model_type": family, "architectures": [architecture] if architecture else None}, table, "here"
    )


WORDS = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("family", "names", "architecture", "task"),
    [
        ("bert", f"bert.{WORDS} classifier.weight bert.pooler.dense.weight", "", SEQUENCE),
        ("bert", f"bert.{WORDS} classifier.weight", "", TOKENS),
        ("bert", f"bert.{WORDS} classifier.weight bert.pooler.dense.weight", "BertForTokenClassification", TOKENS),
        ("albert", f"albert.{WORDS} classifier.weight albert.pooler.weight", "", SEQUENCE),
        ("roberta", f"roberta.{WORDS} classifier.weight", "", TOKENS),
        ("modernbert", "head.dense.weight classifier.weight", "ModernBertForQuestionAnswering", SPAN),
    ],
)
def test_the_kind_of_a_classifier(family, names, architecture, task):
    """By `architectures`, else by the pooler; goldens have every other head."""
    assert heads_of(named(family, names, architecture)) == (False, False, task)


def test_a_classifier_whose_kind_is_unknown():
    with pytest.raises(UserError, match="'' in architectures does not say what its classifier reads"):
        heads_of(named("modernbert", "head.dense.weight classifier.weight"))
