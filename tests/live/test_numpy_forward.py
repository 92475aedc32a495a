"""The two reference sides of the parity report beside transformers' own classes. Needs the extra `parity`."""

import dataclasses
import json

import numpy as np
import pytest

from bert_jax.convert import numpy_forward, parity, transformers_forward
from bert_jax.convert.form import Form
from bert_jax.convert.forward import PREFIXES, Inputs
from bert_jax.convert.sample_texts import sample_inputs
from bert_jax.errors import UserError

pytestmark = [
    pytest.mark.slow,
    # What torch and transformers warn about among themselves is theirs.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BERT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 50,
}
WIDE = BERT | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 30}
DISTIL = {"vocab_size": 97, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 50}
MODERN = BERT | {"num_hidden_layers": 5, "pad_token_id": 0, "local_attention": 12}
THETA = {"full_attention": 500.0, "sliding_attention": 30.0}
ROTARY = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETA.items()}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
BIASED = {f"{part}_bias": True for part in ("norm", "attention", "mlp", "classifier")}

SETTINGS = {
    "Bert": (BERT, WIDE | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "Roberta": (BERT | {"type_vocab_size": 1}, WIDE | {"hidden_act": "relu", "pad_token_id": 3}),
    "Albert": (
        BERT | {"embedding_size": 16, "num_hidden_groups": 3},
        WIDE | {"embedding_size": 64, "hidden_act": "gelu"},
    ),
    "DistilBert": (DISTIL, DISTIL | {"dim": 64, "n_layers": 2, "activation": "relu"}),
    "Electra": (BERT | {"embedding_size": 16}, WIDE | {"embedding_size": 64, "hidden_act": "silu"}),
    "ModernBert": (
        MODERN | {"global_rope_theta": 400.0, "local_rope_theta": 20.0, "classifier_pooling": "mean"},
        MODERN | {"rope_parameters": ROTARY, "layer_types": KINDS, "classifier_activation": "silu"} | BIASED,
    ),
}
"""Two sizes per family."""
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
MORE = ("BertForPreTraining", "BertForNextSentencePrediction", "AlbertForPreTraining", "ElectraForPreTraining")
CLASSES = [family + task for family in SETTINGS for task in TASKS] + list(MORE)
CASES = [(name, size) for name in CLASSES for size in (0, 1)]


def made(name: str, size: int, **changes):
    """A model of theirs, every tensor random, biases and scales too: a zero or a one would hide a swap."""
    family = next(family for family in SETTINGS if name.startswith(family))
    labels = {} if name.endswith(("QuestionAnswering", "PreTraining")) else {"num_labels": 3}
    config = getattr(transformers, f"{family}Config")(
        **(SETTINGS[family][size] | labels | changes), attn_implementation="eager"
    )
    model = getattr(transformers, name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            middle = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
            tensor.copy_(middle + 0.2 * torch.randn(tensor.shape, generator=generator))
    model.tie_weights()
    return model


def form_of(model) -> Form:
    """What they would save: the config as JSON has it, tied tensors once."""
    tied = model._tied_weights_keys or {}
    copies = tied if model.config.tie_word_embeddings else {}
    tensors = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items() if key not in copies}
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return Form(config, tensors, type(model).__name__)


def direct(model, inputs: Inputs):
    """Hidden states and outputs of their class, called as their users call it."""
    arguments = {"input_ids": inputs.input_ids_BS, "attention_mask": inputs.attention_mask_BS}
    if getattr(model.config, "type_vocab_size", 0):
        arguments["token_type_ids"] = inputs.token_type_ids_BS
    with torch.no_grad():
        found = model(
            **{key: torch.tensor(array).long() for key, array in arguments.items()}, output_hidden_states=True
        )
    name = type(model).__name__
    if name.endswith("QuestionAnswering"):
        logits = {"task": torch.stack([found.start_logits, found.end_logits], -1)}
    elif name == "BertForPreTraining":
        logits = {"mlm": found.prediction_logits, "pair": found.seq_relationship_logits}
    elif name == "AlbertForPreTraining":
        logits = {"mlm": found.prediction_logits, "pair": found.sop_logits}
    elif name.endswith("Model"):
        logits = {"pooled": found.pooler_output} if found.get("pooler_output") is not None else {}
    else:
        part = "mlm" if name.endswith("MaskedLM") else "pair" if name.endswith("NextSentencePrediction") else "task"
        logits = {part: found.logits}
    states = [state.numpy() for state in found.hidden_states]
    return states, {part: values.numpy() for part, values in logits.items()}


def parts(outputs) -> dict[str, np.ndarray]:
    return outputs.logits | ({"pooled": outputs.pooled_BH} if outputs.pooled_BH is not None else {})


def close(found: np.ndarray, expected: np.ndarray, inputs: Inputs, name: str) -> None:
    """To 1e-5 of the values, at real tokens."""
    assert found.shape == expected.shape and np.std(expected) > 0.05, name
    real = inputs.attention_mask_BS > 0
    if expected.ndim == 3 or expected.shape == real.shape:
        found, expected = found[real], expected[real]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()), err_msg=name)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_both_sides_are_theirs(name, size):
    model = made(name, size)
    form = form_of(model)
    inputs = sample_inputs(form, None)
    assert (inputs.attention_mask_BS == 0).any() and inputs.attention_mask_BS[0].sum() == 1
    states, expected = direct(model, inputs)
    assert expected or name in ("DistilBertModel", "ElectraModel", "ModernBertModel")

    ours = numpy_forward.run(form, inputs)
    assert ours.unread == ()
    assert len(ours.hidden_states) == len(states)
    for layer, state in enumerate(states):
        close(ours.hidden_states[layer], state, inputs, f"layer {layer}")
    for part, values in expected.items():
        close(parts(ours)[part], values, inputs, part)
    assert expected.keys() >= ours.logits.keys()

    theirs = transformers_forward.run(form, inputs)
    assert theirs.unread == () and (theirs.task is ours.task)
    assert parts(theirs).keys() == expected.keys()
    for found, state in zip(theirs.hidden_states, states, strict=True):
        np.testing.assert_array_equal(found, state)
    for part, values in expected.items():
        np.testing.assert_array_equal(parts(theirs)[part], values)

    report = parity.compare(dataclasses.replace(ours, unread=()), theirs, inputs.attention_mask_BS, library="x")
    assert report.passed and all(share > 0.99 for share in report.agreement.values()), report.lines()


@pytest.mark.parametrize("name", CLASSES)
def test_every_tensor_counts(name):
    """With another tensor in its place the numpy outputs differ: none is read and then forgotten."""
    form = form_of(made(name, 0))
    inputs = Inputs(*(array[::6] for array in sample_inputs(form, None)))
    before = numpy_forward.run(form, inputs)
    rng = np.random.default_rng(1)
    for key, tensor in form.tensors.items():
        changed = tensor + rng.normal(0, 0.2, tensor.shape).astype(np.float32)
        after = numpy_forward.run(dataclasses.replace(form, tensors=form.tensors | {key: changed}), inputs)
        values = [*zip(before.hidden_states, after.hidden_states, strict=True)]
        values += [(each, parts(after)[part]) for part, each in parts(before).items()]
        largest = max(np.abs(old - new).max() for old, new in values)
        # A key's bias adds the same to every score of a query, and softmax does not see it.
        unseen = key.endswith(("key.bias", "k_lin.bias"))
        assert largest < 1e-4 if unseen else largest > 1e-3, key


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "ModernBertModel"])
def test_a_bare_encoder_with_the_prefix(name):
    """As another format may name it; transformers' own files have none."""
    model = made(name, 0)
    bare = form_of(model)
    prefix = PREFIXES[bare.config["model_type"]]
    prefixed = dataclasses.replace(bare, tensors={prefix + key: tensor for key, tensor in bare.tensors.items()})
    inputs = sample_inputs(bare, None)
    for side in (numpy_forward, transformers_forward):
        one, other = side.run(bare, inputs), side.run(prefixed, inputs)
        assert other.unread == ()
        np.testing.assert_array_equal(one.hidden_states[-1], other.hidden_states[-1])


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "AlbertModel"])
def test_no_pooler(name):
    form = form_of(made(name, 0))
    tensors = {key: tensor for key, tensor in form.tensors.items() if "pooler" not in key}
    assert len(tensors) == len(form.tensors) - 2
    form = dataclasses.replace(form, tensors=tensors)
    inputs = sample_inputs(form, None)
    ours, theirs = numpy_forward.run(form, inputs), transformers_forward.run(form, inputs)
    assert ours.pooled_BH is None and theirs.pooled_BH is None
    assert parity.compare(ours, theirs, inputs.attention_mask_BS, library="x").passed


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "RobertaForMaskedLM", "AlbertForPreTraining", "DistilBertForMaskedLM",
             "ElectraForMaskedLM", "ModernBertForMaskedLM"]
)  # fmt: skip
def test_decoders_tied_doubled_and_of_their_own(name):
    model = made(name, 0)
    form = form_of(model)
    inputs = sample_inputs(form, None)
    expected = direct(model, inputs)[1]["mlm"]
    doubled = dataclasses.replace(form, tensors={key: value.numpy() for key, value in model.state_dict().items()})
    assert len(doubled.tensors) > len(form.tensors)
    loose = form_of(made(name, 0, tie_word_embeddings=False))
    apart = direct(made(name, 0, tie_word_embeddings=False), inputs)[1]["mlm"]
    assert np.abs(apart - expected).max() > 0.1
    for wanted, each in ((expected, doubled), (apart, loose)):
        for side in (numpy_forward, transformers_forward):
            found = side.run(each, inputs)
            assert found.unread == ()
            close(found.logits["mlm"], wanted, inputs, side.__name__)


def test_refusals_and_leftovers():
    form = form_of(made("BertForPreTraining", 0))
    inputs = sample_inputs(form, None)
    less = {key: tensor for key, tensor in form.tensors.items() if key != "bert.encoder.layer.1.output.dense.bias"}
    for side in (numpy_forward, transformers_forward):
        with pytest.raises(UserError, match=r"^BertForPreTraining: .*layer\.1\.output\.dense\.bias' is missing"):
            side.run(dataclasses.replace(form, tensors=less), inputs)
        shallow = dataclasses.replace(form, config=form.config | {"num_hidden_layers": 2})
        outputs = side.run(shallow, inputs)
        assert len(outputs.unread) == 16 and all("layer.2" in name for name in outputs.unread)
        report = parity.compare(outputs, outputs, inputs.attention_mask_BS, library="x")
        assert not report.passed and "layer.2" in report.failures[0]
    with pytest.raises(UserError, match=r"refuses this model.*size mismatch") as caught:
        transformers_forward.run(dataclasses.replace(form, config=form.config | {"intermediate_size": 57}), inputs)
    assert "\n" not in str(caught.value)


def test_buffers_and_spare_poolers_go_unread():
    """As roberta-base and bert-base-uncased are published."""
    form = form_of(made("RobertaForMaskedLM", 0))
    spare = {"roberta.embeddings.position_ids": np.arange(50)[None], "roberta.pooler.dense.weight": np.eye(32),
             "roberta.pooler.dense.bias": np.zeros(32)}  # fmt: skip
    form = dataclasses.replace(form, tensors=form.tensors | spare)
    inputs = sample_inputs(form, None)
    for side in (numpy_forward, transformers_forward):
        assert side.run(form, inputs).unread == ()


def test_the_other_side_is_transformers_here():
    form = form_of(made("ElectraForPreTraining", 0))
    inputs = sample_inputs(form, None)
    outputs, library = parity.other_side(form, inputs)
    assert library == f"transformers {transformers.__version__}"
    report = parity.compare(numpy_forward.run(form, inputs), outputs, inputs.attention_mask_BS, library=library)
    assert report.passed and report.lines()[0].startswith("parity with transformers 5")
