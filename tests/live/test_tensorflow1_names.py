"""Google's TensorFlow 1 checkpoints compared with models of transformers: names and shapes. Needs `parity`."""

from pathlib import Path

import numpy as np
import pytest

from bert_jax.convert.formats import input_formats, tensorflow1
from bert_jax.convert.formats.format import ReadOptions, to_source_model
from bert_jax.convert.hf_model import HuggingFaceModel

pytestmark = [
    pytest.mark.slow,
    # Warnings inside torch and transformers are not errors here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GOLDEN = Path(__file__).parent.parent / "golden" / "tensor_bundle"


@pytest.mark.parametrize("family", ["bert", "albert"])
def test_a_form_is_what_transformers_has(family):
    with input_formats.open_model(GOLDEN / family) as source_model:
        hf_model = source_model.hf_model
    config = getattr(transformers, f"{family.capitalize()}Config")(**hf_model.config)
    model = getattr(transformers, hf_model.config["architectures"][0])(config)
    hf_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".decoder." not in name}
    assert {name: array.shape for name, array in hf_model.tensors.items()} == hf_shapes
    assert config.hidden_act == {"bert": "gelu", "albert": "gelu_new"}[family]


@pytest.mark.parametrize("family", ["Bert", "Albert"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForQuestionAnswering", "ForMaskedLM", "ForPreTraining"])
def test_what_transformers_has_can_be_written_and_read(tmp_path, family, head):
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 10, "max_position_embeddings": 6}
    if family == "Albert":
        sizes |= {"embedding_size": 5, "num_hidden_groups": 2}
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(getattr(transformers, f"{family}Config")(**sizes, num_labels=2))
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    source_model = to_source_model("test", HuggingFaceModel(config, tensors, "transformers"), None, ReadOptions())
    tensorflow1.write(source_model, tmp_path)
    with input_formats.open_model(tmp_path) as source_model:
        back = source_model.hf_model
    assert set(back.tensors) == {name for name in tensors if ".decoder." not in name}
    for name, array in back.tensors.items():
        np.testing.assert_array_equal(array, tensors[name], err_msg=name)
    assert {name: back.config[name] for name in sizes} == sizes
    assert (back.config["hidden_act"], back.config["architectures"]) == (config["hidden_act"], [family + head])
