"""NVIDIA's names (from its sources, see nvidia.py) and those of transformers; files written by torch.save."""

import json

import numpy as np
import pytest

from bert_jax.convert.formats import input_formats, nvidia
from bert_jax.errors import UserError
from tests.golden import recipe

CONFIG = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 10,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


def examples_name(name: str) -> str:
    """transformers' name -> DeepLearningExamples' (commit 1d4211f), whose LinearActivation is called dense_act."""
    for owner in ("intermediate", "bert.pooler", "transform"):
        name = name.replace(f"{owner}.dense.", f"{owner}.dense_act.")
    return name


def mlperf_name(name: str) -> str:
    """As remap_attn_parameters and remap_segmented_model_parameters of MLPerf's run_pretraining.py (v0.7 to v2.0)."""
    attention = {
        "self.query.": "multi_head_attention.q_",
        "self.key.": "multi_head_attention.k_",
        "self.value.": "multi_head_attention.v_",
        "output.dense.": "multi_head_attention.out_proj_",
        "output.LayerNorm.": "layer_norm.",
    }
    for nvidia_name, fused in attention.items():
        name = name.replace(f"attention.{nvidia_name}", f"attention.{fused}")
    if ".intermediate.dense." in name:
        name = f"{name}1"
    elif ".output.dense." in name:
        name = f"{name.replace('.output.', '.intermediate.')}2"
    return ("bert_model_segment." if name.startswith("bert.") else "heads_only_segment.") + name


def test_names():
    """Of every tensor; DistributedDataParallel adds `module.`."""
    names = [*recipe.tensor_shapes(recipe.SETTINGS), "cls.predictions.decoder.weight"]
    for naming in (examples_name, mlperf_name):
        changed = [naming(name) for name in names]
        assert changed != names and [nvidia.rename(name) for name in changed] == names
        assert [nvidia.rename(f"module.{name}") for name in changed] == names
    layer = "bert.encoder.layer.3."
    assert nvidia.rename(f"{layer}intermediate.dense.weight1") == f"{layer}intermediate.dense.weight"
    assert nvidia.rename(f"{layer}intermediate.dense.bias2") == f"{layer}output.dense.bias"
    assert nvidia.rename(f"{layer}attention.multi_head_attention.q_weight") == f"{layer}attention.self.query.weight"
    assert nvidia.rename("bert.embeddings.LayerNorm.gamma") == "bert.embeddings.LayerNorm.weight"
    assert nvidia.rename("bert.embeddings.LayerNorm.beta") == "bert.embeddings.LayerNorm.bias"


@pytest.fixture
def model():
    """transformers' own model of 32 rows, for 31 tokens, with every tensor different."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**CONFIG | {"vocab_size": 32}))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    return model.eval()


@pytest.fixture
def opens(tmp_path):
    """Reads a checkpoint with a content and a bert_config.json."""

    def read(content, config=CONFIG, new: bool = True) -> input_formats.SourceModel:
        import torch

        torch.save(content, tmp_path / "ckpt_8601.pt", _use_new_zipfile_serialization=new)
        (tmp_path / "bert_config.json").write_text(json.dumps(config))
        with input_formats.open_model(tmp_path / "ckpt_8601.pt") as source_model:
            return source_model

    return read


def untied(state: dict) -> dict:
    return {name: tensor for name, tensor in state.items() if not name.endswith("decoder.bias")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("naming", "new"), [(examples_name, True), (mlperf_name, False)], ids=["zip", "legacy"])
def test_checkpoint(opens, model, naming, new):
    import torch

    model.tie_weights()
    expected = {name: tensor.numpy() for name, tensor in untied(model.state_dict()).items()}
    state = {naming(name): tensor for name, tensor in untied(model.state_dict()).items()}
    assert not set(state) <= set(model.state_dict())
    loader = torch.utils.data.DataLoader([np.zeros(2), np.ones(2)], batch_size=2)
    content = {"model": state, "optimizer": {"state": {}}, "epoch": 3, "data_loader": loader, "loss": np.float64(0.5)}
    source_model = opens(content, CONFIG | {"unknown": 3}, new)
    assert source_model.format == "nvidia" and source_model.model.heads.pair
    assert source_model.hf_config == CONFIG | {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    }
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.bias"):
        expected[name] = expected[name][:31]
    assert set(source_model.hf_model.tensors) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(source_model.hf_model.tensors[name], array)
    headless = {name: tensor for name, tensor in untied(model.state_dict()).items() if not name.startswith("cls.seq")}
    assert opens({"model": headless}).hf_config["architectures"] == ["BertForMaskedLM"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 31}, "lacks 'hidden_size'"),
        (CONFIG | {"vocab_size": 40}, "shape [32, 8], the config says [40, 8]: the vocabulary has another size"),
        ([], "bert_config.json is not a JSON object"),
    ],
)
def test_what_is_wrong(opens, model, config, words):
    model.tie_weights()
    with pytest.raises(UserError) as caught:
        opens({"model": model.state_dict()}, config)
    assert words in str(caught.value) and "\n" not in str(caught.value)
