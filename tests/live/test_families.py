"""Every family, head and size compared with transformers' classes, and converted back bit for bit. Needs `parity`."""

import dataclasses
import json

import numpy as np
import pytest
from etils import epath

from bert_jax.convert.formats import huggingface
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.formats.tensor_files import open_tensors
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.translate import from_huggingface, to_huggingface
from tests.live import zoo

pytestmark = [
    pytest.mark.slow,
    # Warnings inside torch and transformers are not errors here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("size", zoo.SIZES)
@pytest.mark.parametrize(("family", "head"), zoo.CASES, ids=lambda part: part)
def test_numbers_and_names(family, head, size, tmp_path):
    """Hidden states and logits within 1e-4 at every real token; what we write is what they wrote, and they open it."""
    torch_model = zoo.build(family, head, size)
    torch_model.save_pretrained(tmp_path / "torch")
    source_model = huggingface.read(epath.Path(tmp_path / "torch"), ReadOptions(), tmp_path)
    model = source_model.model
    assert model.family == family
    arrays = zoo.inputs(family, size)
    real = arrays["attention_mask"] > 0
    outputs = jax_forward.run(model, ForwardInputs(*arrays.values()))
    with torch.no_grad():
        given = {name: torch.tensor(array).long() for name, array in arrays.items()}
        if family in ("distilbert", "modernbert"):
            del given["token_type_ids"]
        output = torch_model(**given, output_hidden_states=True)
    assert len(outputs.hidden_states) == len(output.hidden_states)
    for layer, (actual, expected) in enumerate(zip(outputs.hidden_states, output.hidden_states, strict=True)):
        assert expected.numpy()[real].std() > 0.3  # or the tolerance would mean nothing
        np.testing.assert_allclose(actual[real], expected.numpy()[real], rtol=0, atol=1e-4, err_msg=f"layer {layer}")
    compare_logits(outputs, output, model.heads, real)

    (tmp_path / "written").mkdir()
    huggingface.OUTPUT.write(source_model, tmp_path / "written")
    before, after = open_tensors(tmp_path / "torch"), open_tensors(tmp_path / "written")
    assert set(before) == set(after)
    for name in before:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    again, report = type(torch_model).from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    for name, tensor in torch_model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    described = json.loads((tmp_path / "written" / "config.json").read_text())
    assert described["architectures"] == [zoo.PREFIXES[family] + head]
    if head in zoo.TASKS[:2]:
        assert tuple(again.config.id2label.values()) == zoo.LABELS


def compare_logits(outputs, output, heads, real):
    if heads.task is not None:
        logits = (
            torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits
        )
        actual, expected = outputs.logits["task"], logits.numpy()
        if heads.task.kind != "classification":
            actual, expected = actual[real], expected[real]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    elif heads.mlm:
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        np.testing.assert_allclose(outputs.logits["mlm"][real], logits.numpy()[real], rtol=0, atol=1e-4)
    if heads.pair:
        pairs = output.sop_logits if "sop_logits" in output else output.seq_relationship_logits
        np.testing.assert_allclose(outputs.logits["pair"], pairs.numpy(), rtol=0, atol=1e-4)
    if "pooler_output" in output and output.pooler_output is not None:
        np.testing.assert_allclose(outputs.pooled_BH, output.pooler_output.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", zoo.PREFIXES)
def test_every_tensor_counts(family):
    """A changed tensor changes what comes out: none is read from the wrong place, or left at its start value."""
    head = "ForPreTraining" if family in ("bert", "albert", "electra") else "ForMaskedLM"
    torch_model = zoo.build(family, head)
    hf_model = form_of(torch_model)
    arrays = ForwardInputs(*zoo.inputs(family, "narrow").values())
    usual = jax_forward.run(from_huggingface(hf_model), arrays)
    rng = np.random.default_rng(0)
    for name in to_huggingface(from_huggingface(hf_model), "here").tensors:
        changed = hf_model.tensors[name] + rng.normal(0, 0.1, hf_model.tensors[name].shape).astype(np.float32)
        copies = {name: changed} | {
            copy: changed for copy in hf_model.tensors if hf_model.tensors[copy] is hf_model.tensors[name]
        }
        found = jax_forward.run(
            from_huggingface(dataclasses.replace(hf_model, tensors=hf_model.tensors | copies)), arrays
        )
        pairs = [*zip(usual.hidden_states, found.hidden_states, strict=True)]
        pairs += [(usual.logits[part], found.logits[part]) for part in usual.logits]
        real = arrays.attention_mask_BS > 0
        difference = max(float(np.abs(a - b)[real if a.shape[:2] == real.shape else ...].max()) for a, b in pairs)
        # A key's bias adds the same to every score of a query, and softmax does not see it.
        key_bias = name.endswith((".key.bias", ".k_lin.bias"))
        assert difference < 1e-4 if key_bias else difference > 1e-3, name


def form_of(model):
    """The form of a model that was not saved."""
    from bert_jax.convert.hf_model import HuggingFaceModel

    described = model.config.to_dict() | {"architectures": [type(model).__name__]}
    kept = {}
    seen = {}
    for name, tensor in model.state_dict().items():
        kept[name] = seen.setdefault(tensor.data_ptr(), tensor.numpy())
    return HuggingFaceModel(described, kept, "a model in memory")
