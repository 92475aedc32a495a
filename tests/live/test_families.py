"""Every family, head and size in three forward passes compared with transformers' classes, and converted back.

Needs the extra `parity`.
"""

import dataclasses
import json

import numpy as np
import pytest
from etils import epath

from bert_jax.convert.formats import huggingface
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.formats.tensor_files import open_tensors
from bert_jax.convert.forward_types import ENCODER_PREFIXES, ForwardInputs, family_of
from bert_jax.convert.parity import jax_forward, numpy_forward, parity_report, transformers_forward
from bert_jax.convert.parity.sample_texts import sample_inputs
from bert_jax.convert.translate import from_huggingface
from bert_jax.errors import UserError
from tests.golden import make_families
from tests.golden.make_families import CLASSES, PARTS, at_real, direct, form_of, goldens, make, sampled
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = [*BESIDE_TRANSFORMERS, pytest.mark.usefixtures("quick_compilation")]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LABELS = ("no", "perhaps", "yes")
OTHERS = ("BertLMHeadModel", "RobertaForCausalLM", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification",
          "CamembertModel", "CamembertForTokenClassification")  # fmt: skip
READABLE = {
    "Albert": {"inner_group_num": 1},
    "Electra": {"hidden_act": "gelu"},
    "ModernBert": dict.fromkeys(make_families.BIASED, False)
    | {"layer_types": None, "global_attn_every_n_layers": 2, "classifier_activation": "relu"},
}
"""By family: what bert_jax does not have in the larger size of `make_families`, changed."""


def readable(name: str, size: int):
    """A model of transformers that bert_jax can read."""
    changes = next((changes for family, changes in READABLE.items() if size and name.startswith(family)), {})
    causal = {"is_decoder": True} if name.endswith(("LMHeadModel", "CausalLM")) else {}
    labels = (
        {"id2label": dict(enumerate(LABELS))}
        if name.endswith(("SequenceClassification", "TokenClassification"))
        else {}
    )
    return make(name, size, **changes, **causal, **labels)


CASES = [(name, 0) for name in (*CLASSES, *OTHERS)]
CASES += [(name, 1) for name in CLASSES if not name.endswith(("QuestionAnswering", "NextSentencePrediction"))]
"""Heads without an activation of their own are the same in the second size."""


@pytest.mark.parametrize(("name", "size"), CASES)
def test_numbers_and_names(name, size, tmp_path):
    """Hidden states and logits at every real token; what we write is what they wrote, and they open it."""
    torch_model = readable(name, size)
    torch_model.save_pretrained(tmp_path / "torch")
    source_model = huggingface.read(epath.Path(tmp_path / "torch"), ReadOptions(), tmp_path)
    hf_model, inputs = source_model.hf_model, sample_inputs(source_model.hf_model, None)
    assert transformers_forward.class_name(hf_model) == name
    assert (inputs.attention_mask_BS == 0).any() and inputs.attention_mask_BS[0].sum() == 1
    # Its pooled vector is a function of large states, and rounding differs between CPUs: 3e-5 on an Intel Xeon.
    numpy_limit = 5e-5 if name == "MobileBertModel" else 1e-5
    sides = {
        1e-4: jax_forward.run(source_model.model, inputs),
        numpy_limit: numpy_forward.run(hf_model, inputs),
        0: transformers_forward.run(hf_model, inputs),
    }
    for part, values in direct(torch_model, inputs).items():
        expected = at_real(values, inputs.attention_mask_BS)
        assert np.std(expected) > 0.05  # or the limits would mean nothing
        for limit, outputs in sides.items():
            found = outputs[PARTS.get(part, part)].reshape(values.shape)
            bound = limit * max(1, np.abs(expected).max())
            found = at_real(found, inputs.attention_mask_BS)
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=f"{part}, {limit}")
    assert parity_report.compare_outputs(sides[1e-4], sides[0], inputs.attention_mask_BS, library="x").passed

    (tmp_path / "written").mkdir()
    huggingface.OUTPUT.write(source_model, tmp_path / "written")
    before, after = open_tensors(tmp_path / "torch"), open_tensors(tmp_path / "written")
    assert set(before) == set(after)
    for key in before:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    again, report = type(torch_model).from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    for key, tensor in torch_model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key
    described = json.loads((tmp_path / "written" / "config.json").read_text())
    assert described["architectures"] == [name]
    if name.endswith(("SequenceClassification", "TokenClassification")):
        assert again.config.id2label == torch_model.config.id2label


def with_prefix(hf_model):
    """As another format may name a bare encoder; transformers' own files have no prefix."""
    prefix = ENCODER_PREFIXES[family_of(hf_model)]
    return dataclasses.replace(hf_model, tensors={prefix + key: tensor for key, tensor in hf_model.tensors.items()})


def without_pooler(hf_model):
    tensors = {key: tensor for key, tensor in hf_model.tensors.items() if "pooler" not in key}
    assert len(tensors) == len(hf_model.tensors) - 2
    return dataclasses.replace(hf_model, tensors=tensors)


def with_spare_pooler(hf_model):
    """With buffers too, as roberta-base is published."""
    spare = {"roberta.embeddings.position_ids": np.arange(50)[None], "roberta.pooler.dense.weight": np.eye(32),
             "roberta.pooler.dense.bias": np.zeros(32)}  # fmt: skip
    return dataclasses.replace(hf_model, tensors=hf_model.tensors | spare)


def with_all_copies(hf_model):
    """The decoder as a tensor of its own, equal to the word embeddings."""
    model = make(hf_model.source, 0)
    tensors = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    assert len(tensors) > len(hf_model.tensors)
    return dataclasses.replace(hf_model, tensors=tensors)


def without_labels(hf_model):
    """Their number is that of the classifier's rows."""
    names = ("id2label", "label2id", "num_labels")
    return dataclasses.replace(hf_model, config={k: v for k, v in hf_model.config.items() if k not in names})


def with_chunks(hf_model):
    """A setting that changes no result."""
    return dataclasses.replace(hf_model, config=hf_model.config | {"chunk_size_feed_forward": 7})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (with_prefix, ("BertModel", "RobertaModel", "ModernBertModel")),
        (without_pooler, ("BertModel", "RobertaModel", "AlbertModel")),
        (with_spare_pooler, ("RobertaForMaskedLM",)),
        (with_all_copies, [name for name in CLASSES if name.endswith("ForMaskedLM")]),
        (without_labels, ("BertForTokenClassification",)),
        (with_chunks, ("ElectraForPreTraining",)),
    ],
)
def test_other_files_of_the_same_model(change, names):
    """The outputs stay the same on each side, and transformers is the other side here."""
    for name in names:
        hf_model = form_of(make(name, 0))
        changed, inputs = change(hf_model), sample_inputs(hf_model, None)
        expected, library = parity_report.reference_forward(hf_model, inputs)
        assert library == f"transformers {transformers.__version__}"
        if change is without_pooler:
            del expected["pooled vector"]
        found = [side.run(changed, inputs) for side in (transformers_forward, numpy_forward)]
        found.append(jax_forward.run(from_huggingface(changed), inputs))
        for outputs in found:
            report = parity_report.compare_outputs(outputs, expected, inputs.attention_mask_BS, library=library)
            assert report.passed, (name, report.lines())
            assert change is not without_pooler or "pooled vector" not in outputs


def test_what_transformers_refuses():
    hf_model = form_of(make("BertForPreTraining", 0))
    inputs = ForwardInputs(*(array[:2] for array in sample_inputs(hf_model, None)))
    less = {key: tensor for key, tensor in hf_model.tensors.items() if key != "bert.encoder.layer.1.output.dense.bias"}
    classifier = {"qa_outputs.weight": np.zeros((2, 32)), "qa_outputs.bias": np.zeros(2)}
    for changes, message in (
        ({"tensors": less}, r"tensor 'bert\.encoder\.layer\.1\.output\.dense\.bias' is missing"),
        ({"tensors": hf_model.tensors | classifier}, "both pretraining heads and QuestionAnswering: leave one out"),
        ({"config": hf_model.config | {"torch_dtype": "odd"}}, "BertForPreTraining refuses .*no attribute 'odd'"),
        ({"config": hf_model.config | {"hidden_size": "x"}}, "BertForPreTraining refuses .*hidden_size"),
    ):
        with pytest.raises(UserError, match=f"^BertForPreTraining: .*{message}") as caught:
            transformers_forward.run(dataclasses.replace(hf_model, **changes), inputs)
        assert "\n" not in str(caught.value)


def test_goldens_are_what_the_reference_gives():
    for name, size in (("RobertaForMaskedLM", 1), ("ModernBertForSequenceClassification", 0)):
        golden = goldens()[f"{name} {size}"]
        for part, values in direct(make(name, size), golden["inputs"]).items():
            expected = sampled(values, golden["inputs"].attention_mask_BS)
            np.testing.assert_allclose(golden["values"][part], expected, rtol=0, atol=1e-5)
