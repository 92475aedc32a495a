"""Every family, head and size compared with transformers' classes, and converted back bit for bit. Needs `parity`."""

import functools
import json

import jax
import numpy as np
import pytest
from etils import epath

from bert_jax.convert.formats import huggingface
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.formats.tensor_files import open_tensors
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import jax_forward
from bert_jax.convert.translate import from_huggingface, to_huggingface
from tests.live import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_compilation"),
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


@pytest.mark.parametrize("family", ["bert", "roberta", "albert", "distilbert", "electra", "modernbert"])
def test_every_tensor_counts(family):
    """A changed tensor changes the outputs: none is read from the wrong place, or left at its initial value."""
    hf_model = form_of(zoo.build(family, "ForPreTraining" if "ForPreTraining" in zoo.HEADS[family] else "ForMaskedLM"))
    arrays = zoo.inputs(family, "narrow")
    native = from_huggingface(hf_model)
    forward = jax.jit(functools.partial(jax_forward.forward, native.config, native.heads, hidden_states=True))

    def run(tensors):
        params = from_huggingface(HuggingFaceModel(hf_model.config, tensors, "changed")).params
        return jax.tree.map(np.asarray, forward(params, *arrays.values()))

    usual, real, rng = run(hf_model.tensors), arrays["attention_mask"] > 0, np.random.default_rng(0)
    for name in to_huggingface(native, "here").tensors:
        tensor = hf_model.tensors[name]
        changed = tensor + rng.normal(0, 0.1, tensor.shape).astype(np.float32)
        outputs = run({key: changed if other is tensor else other for key, other in hf_model.tensors.items()})
        differences = {part: np.abs(outputs[part] - usual[part]) for part in usual}
        tokens = {"hidden": (slice(None), real), "mlm": real, "task": real if usual.get("task", real).ndim > 1 else ...}
        largest = max(float(array[tokens.get(part, ...)].max()) for part, array in differences.items())
        # A key's bias adds the same to every score of a query, and softmax does not see it.
        key_bias = name.endswith((".key.bias", ".k_lin.bias"))
        assert largest < 1e-4 if key_bias else largest > 1e-3, name


def form_of(model) -> HuggingFaceModel:
    """The form of a model that was not saved."""
    kept, tensors = {}, {}
    for name, tensor in model.state_dict().items():
        kept[name] = tensors.setdefault(tensor.data_ptr(), tensor.numpy())
    return HuggingFaceModel(
        model.config.to_dict() | {"architectures": [type(model).__name__]}, kept, "a model in memory"
    )
