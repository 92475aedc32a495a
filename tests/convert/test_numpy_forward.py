"""The numpy forward pass, the JAX model and golden values; live/test_numpy_forward.py has every family."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.convert.forward_types import ForwardInputs, TaskKind, heads_of, prefix_of
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import NativeModel, family_of, from_huggingface, to_huggingface
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from tests.golden import make_families, recipe

pytestmark = pytest.mark.usefixtures("quick_compilation")

HF_CONFIG = recipe.SETTINGS | {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0}


def recipe_form(seed: int = 3, **changes) -> HuggingFaceModel:
    return HuggingFaceModel(HF_CONFIG | changes, recipe.make_weights(recipe.SETTINGS, seed), "recipe")


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


@pytest.mark.parametrize("case", GOLDENS)
def test_families(case):
    """Recorded outputs of transformers: every hidden state and head, JAX to 1e-4, numpy to 1e-5."""
    golden, hf_model = GOLDENS[case], golden_model(case)
    outputs = numpy_forward.run(hf_model, golden["inputs"])
    assert outputs.unused_tensors == ()
    found = {f"layer {i}": state for i, state in enumerate(outputs.hidden_states)} | outputs.logits
    assert found.keys() == golden["values"].keys() - {"pooled"}
    refusal = next((refusal for name, refusal in REFUSED.items() if re.fullmatch(name, case)), None)
    if refusal is not None:
        with pytest.raises(UserError, match=refusal):
            from_huggingface(hf_model)
    jax_outputs = jax_forward.run(from_huggingface(hf_model), golden["inputs"]) if refusal is None else outputs
    by_us = {f"layer {i}": state for i, state in enumerate(jax_outputs.hidden_states)} | jax_outputs.logits
    assert by_us.keys() == found.keys()
    for part, expected in golden["values"].items():
        actual = jax_outputs.pooled_BH if part == "pooled" else by_us[part]
        actual = make_families.sampled(actual, golden["inputs"].attention_mask_BS)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4, err_msg=f"jax, {part}")
        values = outputs.pooled_BH if part == "pooled" else found[part]
        values = make_families.sampled(values, golden["inputs"].attention_mask_BS)
        limit = 1e-5 * max(1, np.abs(expected).max())
        np.testing.assert_allclose(values, expected, rtol=0, atol=limit, err_msg=part)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("ElectraForMaskedLM 0", {"hidden_act": "gelu_new"}),
        ("RobertaForMaskedLM 0", {"hidden_act": "gelu_fast"}),
        ("ModernBertForMaskedLM 0", {"hidden_activation": "relu"}),
        ("ModernBertForMaskedLM 0", {"classifier_activation": "relu"}),
        ("ModernBertForSequenceClassification 0", {"hidden_activation": "gelu_new"}),
    ],
)
def test_the_activation_of_the_layers_is_not_that_of_the_head(case, changes):
    """Logits are those of the reference, and what is written again is the same model; a wrong head would be seen."""
    hf_model, inputs = golden_model(case, **changes), GOLDENS[case]["inputs"]
    model, expected = from_huggingface(hf_model), numpy_forward.run(hf_model, inputs).logits
    written, found = to_huggingface(model, case), jax_forward.run(model, inputs).logits
    assert found.keys() == expected.keys()
    for name in expected:
        real = inputs.attention_mask_BS > 0 if found[name].ndim == 3 else ...
        np.testing.assert_allclose(found[name][real], expected[name][real], rtol=0, atol=1e-4)
    assert from_huggingface(written)[1:3] == model[1:3]


def test_an_activation_that_a_family_does_not_have():
    model = from_huggingface(golden_model("RobertaForMaskedLM 1"))
    assert model.config.activation == "relu" and model.heads.mlm_activation == "gelu"
    with pytest.raises(UserError, match="an MLM head with relu cannot be written as roberta, whose head has gelu"):
        to_huggingface(model._replace(heads=dataclasses.replace(model.heads, mlm_activation=None)), "here")


def test_goldens_are_of_every_family_and_head():
    assert len(GOLDENS) == 2 * len(make_families.CLASSES) == 68
    assert {case.split("For")[0].removesuffix("Model 0").removesuffix("Model 1") for case in GOLDENS} == {
        *make_families.SETTINGS
    }
    assert all(np.std(values) > 0.02 for golden in GOLDENS.values() for values in golden["values"].values())


@pytest.mark.parametrize("pair", [True, False])
def test_the_jax_model_gives_the_same(pair):
    """Every state and logit to 1e-5, in spite of a lower compute dtype; the name map converts the parameters."""
    tensors = dict(recipe_form().tensors)
    if not pair:
        tensors = {name: tensor for name, tensor in tensors.items() if "pooler" not in name and "relation" not in name}
    settings = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}
    model = from_huggingface(HuggingFaceModel(HF_CONFIG | settings, tensors, "recipe"))
    assert model.heads == Heads(pair=pair, pooler=pair)
    model = model._replace(config=dataclasses.replace(model.config, compute_dtype="bfloat16"))
    hf_model = to_huggingface(model, "native model")
    inputs = sample_inputs(hf_model, None)
    jax_outputs, found = jax_forward.run(model, inputs), numpy_forward.run(hf_model, inputs)
    assert found.unused_tensors == ()
    assert jax_outputs.logits.keys() == found.logits.keys() == ({"mlm", "pair"} if pair else {"mlm"})
    report = parity_report.compare(jax_outputs, found, inputs.attention_mask_BS, library="x", limit=1e-5)
    assert report.passed and len(report.heads) == (3 if pair else 1), report.lines()


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
    hf_model = to_huggingface(NativeModel(family_of(config, heads), config, heads, params), "native model")
    assert hf_model.config["architectures"] == [{"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM"}[family]]
    inputs = sample_inputs(hf_model, None)
    assert transformers_forward.class_name(hf_model) == hf_model.config["architectures"][0]
    found, jax_outputs = numpy_forward.run(hf_model, inputs), jax_forward.run(from_huggingface(hf_model), inputs)
    assert parity_report.compare(jax_outputs, found, inputs.attention_mask_BS, library="x").passed
    both_ways = numpy_forward.run(with_config(hf_model, is_decoder=False), inputs)
    assert not parity_report.compare(jax_outputs, both_ways, inputs.attention_mask_BS, library="x").passed
    row = int(inputs.attention_mask_BS.sum(1).argmax())
    last = int(inputs.attention_mask_BS[row].sum()) - 1
    changed = inputs.input_ids_BS.copy()
    changed[row, last] = 5 if changed[row, last] != 5 else 6
    after = numpy_forward.run(hf_model, inputs._replace(input_ids_BS=changed)).logits["mlm"][row]
    before = found.logits["mlm"][row]
    np.testing.assert_array_equal(after[:last], before[:last])
    assert np.abs(after[last] - before[last]).max() > 1e-3


@pytest.mark.parametrize("family", ["albert", "distilbert", "electra", "modernbert"])
def test_no_decoders_in_other_families(family):
    """Theirs would look both ways in spite of the setting."""
    case = next(case for case, golden in GOLDENS.items() if golden["config"]["model_type"] == family)
    from_huggingface(golden_model(case))
    with pytest.raises(UserError, match=f"{case}: is_decoder is True: {family} has no causal model"):
        from_huggingface(golden_model(case, is_decoder=True))


def test_half_precision_tensors_are_taken_as_they_are():
    import ml_dtypes

    hf_model = recipe_form()
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in hf_model.tensors.items()}
    lifted = {name: array.astype(np.float32) for name, array in rounded.items()}
    inputs = ForwardInputs(*(array[:4] for array in sample_inputs(hf_model, None)))
    found, expected = (
        numpy_forward.run(dataclasses.replace(hf_model, tensors=tensors), inputs).logits["mlm"]
        for tensors in (rounded, lifted)
    )
    np.testing.assert_array_equal(found, expected)


def without(hf_model: HuggingFaceModel, *names: str) -> HuggingFaceModel:
    return dataclasses.replace(
        hf_model, tensors={name: array for name, array in hf_model.tensors.items() if name not in names}
    )


def with_config(hf_model: HuggingFaceModel, **changes) -> HuggingFaceModel:
    return dataclasses.replace(hf_model, config=hf_model.config | changes)


def test_refusals():
    hf_model = recipe_form()
    inputs = ForwardInputs(*(array[:2] for array in sample_inputs(hf_model, None)))
    refused = {
        "model_type 'gpt2' is not one of bert": with_config(hf_model, model_type="gpt2"),
        "is_decoder is set: only bert and roberta": with_config(hf_model, model_type="electra", is_decoder=True),
        "position_embedding_type 'relative_key'": with_config(hf_model, position_embedding_type="relative_key"),
        "activation 'gelu_10' is not one of": with_config(hf_model, hidden_act="gelu_10"),
        "'bert.embeddings.word_embeddings.weight' is missing": without(
            hf_model, "bert.embeddings.word_embeddings.weight"
        ),
        "'bert.pooler.dense.weight' is missing": without(hf_model, "bert.pooler.dense.weight"),
        "'bert.encoder.layer.2.output.dense.bias' is missing": without(
            hf_model, "bert.encoder.layer.2.output.dense.bias"
        ),
        "'cls.predictions.bias' is missing": without(hf_model, "cls.predictions.bias"),
        "'cls.predictions.decoder.weight' is missing": with_config(hf_model, tie_word_embeddings=False),
        "tensors and config do not match": with_config(hf_model, num_attention_heads=5),
        "the config has no 'num_attention_heads'": dataclasses.replace(
            hf_model, config={name: value for name, value in hf_model.config.items() if name != "num_attention_heads"}
        ),
    }
    for message, each in refused.items():
        with pytest.raises(UserError, match=f"^recipe: .*{message}"):
            numpy_forward.run(each, inputs)
    beyond = inputs._replace(input_ids_BS=inputs.input_ids_BS + 151)
    with pytest.raises(UserError, match=r"is outside 'bert\.embeddings\.word_embeddings\.weight', which has 151 rows"):
        numpy_forward.run(hf_model, beyond)


def test_rotary_positions_that_are_scaled_are_refused():
    scaled = {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}
    hf_model = HuggingFaceModel({"model_type": "modernbert", "rope_parameters": scaled}, {}, "here")
    with pytest.raises(UserError, match="here: rope_type 'yarn' is not supported"):
        numpy_forward._window_and_rotary_base(hf_model, 0)
    assert numpy_forward._window_and_rotary_base(hf_model, 1) == (64, 10000.0)
    older = HuggingFaceModel(
        {"model_type": "modernbert", "global_attn_every_n_layers": 2, "global_rope_theta": 5}, {}, "here"
    )
    assert [numpy_forward._window_and_rotary_base(older, layer)[0] for layer in range(4)] == [None, 64, None, 64]
    assert numpy_forward._window_and_rotary_base(older, 2)[1] == 5.0


def named(family: str, names: str, architecture: str = "") -> HuggingFaceModel:
    table = {name: np.zeros(0, np.float32) for name in names.split()}
    return HuggingFaceModel(
        {"model_type": family, "architectures": [architecture] if architecture else None}, table, "here"
    )


WORDS = "embeddings.word_embeddings.weight"


HEADS = [  # family, tensors ("~": the encoder's prefix), architecture, expected heads
    ("bert", f"{WORDS}", "", (False, False, None)),
    ("bert", "cls.seq_relationship.weight", "", (False, True, None)),
    ("bert", f"~{WORDS} classifier.weight ~pooler.dense.weight", "", (False, False, TaskKind.SEQUENCE)),
    ("bert", f"~{WORDS} classifier.weight", "", (False, False, TaskKind.TOKENS)),
    (
        *("bert", f"~{WORDS} classifier.weight ~pooler.dense.weight", "BertForTokenClassification"),
        (False, False, TaskKind.TOKENS),
    ),
    ("albert", f"~{WORDS} classifier.weight ~pooler.weight", "", (False, False, TaskKind.SEQUENCE)),
    ("roberta", "classifier.out_proj.weight", "", (False, False, TaskKind.SEQUENCE)),
    ("roberta", f"~{WORDS} classifier.weight", "", (False, False, TaskKind.TOKENS)),
    ("distilbert", "pre_classifier.weight classifier.weight", "", (False, False, TaskKind.SEQUENCE)),
    ("electra", "discriminator_predictions.dense.weight", "", (False, False, TaskKind.REPLACED)),
    ("electra", "generator_predictions.dense.weight", "", (True, False, None)),
    ("modernbert", "head.dense.weight decoder.bias", "", (True, False, None)),
    (
        *("modernbert", "head.dense.weight classifier.weight", "ModernBertForQuestionAnswering"),
        (False, False, TaskKind.SPAN),
    ),
]


def test_heads_are_read_off_the_tensors():
    for family, names, architecture, heads in HEADS:
        assert heads_of(named(family, names.replace("~", f"{family}."), architecture)) == heads, (family, names)


def test_a_classifier_whose_kind_is_unknown():
    for hf_model in (
        named("modernbert", "head.dense.weight classifier.weight"),
        named("bert", f"bert.{WORDS} classifier.weight bert.pooler.dense.weight", "BertForMultipleChoice"),
    ):
        with pytest.raises(UserError, match="does not say"):
            heads_of(hf_model)


def test_prefixes():
    assert prefix_of(named("bert", f"bert.{WORDS}")) == "bert."
    assert prefix_of(named("bert", WORDS)) == ""
    assert prefix_of(named("modernbert", "model.embeddings.tok_embeddings.weight")) == "model."


def test_tensors_without_a_part_are_told():
    hf_model = recipe_form()
    spare = {"bert.embeddings.position_ids": np.arange(40)[None], "bert.encoder.layer.3.output.dense.bias": np.ones(64)}
    inputs = ForwardInputs(*(array[:2] for array in sample_inputs(hf_model, None)))
    more = dataclasses.replace(hf_model, tensors=hf_model.tensors | spare)
    assert numpy_forward.run(more, inputs).unused_tensors == ("bert.encoder.layer.3.output.dense.bias",)
    assert len(numpy_forward.run(with_config(hf_model, num_hidden_layers=2), inputs).unused_tensors) == 16
    # A pooler that no head asks for, as roberta-base is published.
    assert (
        numpy_forward.run(
            without(hf_model, "cls.seq_relationship.weight", "cls.seq_relationship.bias"), inputs
        ).unused_tensors
        == ()
    )
