"""NVIDIA's names (from its sources, see nvidia.py) and those of transformers; files written by torch.save."""

import json

import numpy as np
import pytest

from bert_jax.convert.formats import input_formats, nvidia
from bert_jax.errors import UserError

LAYER, OURS = "bert.encoder.layer.3.", "bert.encoder.layer.3."
EXAMPLES = {
    "bert.embeddings.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.LayerNorm.gamma": "bert.embeddings.LayerNorm.weight",
    "bert.embeddings.LayerNorm.beta": "bert.embeddings.LayerNorm.bias",
    LAYER + "attention.self.query.weight": OURS + "attention.self.query.weight",
    LAYER + "attention.output.LayerNorm.weight": OURS + "attention.output.LayerNorm.weight",
    LAYER + "intermediate.dense_act.weight": OURS + "intermediate.dense.weight",
    LAYER + "output.dense.bias": OURS + "output.dense.bias",
    "bert.pooler.dense_act.bias": "bert.pooler.dense.bias",
    "cls.predictions.bias": "cls.predictions.bias",
    "cls.predictions.transform.dense_act.weight": "cls.predictions.transform.dense.weight",
    "cls.predictions.decoder.weight": "cls.predictions.decoder.weight",
    "cls.seq_relationship.weight": "cls.seq_relationship.weight",
    "module.bert.pooler.dense_act.weight": "bert.pooler.dense.weight",
}
"""DeepLearningExamples, commit 1d4211f; DistributedDataParallel adds `module.`."""
MLPERF = {
    LAYER + "attention.multi_head_attention.q_weight": OURS + "attention.self.query.weight",
    LAYER + "attention.multi_head_attention.k_bias": OURS + "attention.self.key.bias",
    LAYER + "attention.multi_head_attention.v_weight": OURS + "attention.self.value.weight",
    LAYER + "attention.multi_head_attention.out_proj_weight": OURS + "attention.output.dense.weight",
    LAYER + "attention.multi_head_attention.out_proj_bias": OURS + "attention.output.dense.bias",
    LAYER + "attention.layer_norm.weight": OURS + "attention.output.LayerNorm.weight",
    LAYER + "intermediate.dense.weight1": OURS + "intermediate.dense.weight",
    LAYER + "intermediate.dense.bias1": OURS + "intermediate.dense.bias",
    LAYER + "intermediate.dense.weight2": OURS + "output.dense.weight",
    LAYER + "intermediate.dense.bias2": OURS + "output.dense.bias",
    LAYER + "output.LayerNorm.bias": OURS + "output.LayerNorm.bias",
    "cls.predictions.decoder.bias": "cls.predictions.decoder.bias",
}
"""MLPerf training v0.7 to v2.0."""


def test_names():
    for nvidia_name, hf_name in (EXAMPLES | MLPERF).items():
        segment = "heads_only_segment." if nvidia_name.startswith("cls") else "bert_model_segment."
        for prefix in ("", "module.", segment, "module." + segment):
            assert nvidia.rename(prefix + nvidia_name) == hf_name


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


@pytest.fixture
def model():
    """transformers' own model of 32 rows, for 31 tokens, with every tensor different."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**CONFIG | {"vocab_size": 32}))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    return model.eval()


def examples_name(name: str) -> str:
    """transformers' name -> that of DeepLearningExamples, whose LinearActivation is called dense_act."""
    for owner in ("intermediate", "bert.pooler", "transform"):
        name = name.replace(f"{owner}.dense.", f"{owner}.dense_act.")
    return name


def mlperf_name(name: str) -> str:
    """As remap_attn_parameters and remap_segmented_model_parameters of MLPerf's run_pretraining.py rename them."""
    attention = {
        "self.query.": "multi_head_attention.q_",
        "self.key.": "multi_head_attention.k_",
        "self.value.": "multi_head_attention.v_",
        "output.dense.": "multi_head_attention.out_proj_",
        "output.LayerNorm.": "layer_norm.",
    }
    for nvidia_name, fused in attention.items():
        name = name.replace(f"attention.{nvidia_name}", f"attention.{fused}")
    if name.startswith("bert.encoder"):
        for part in ("weight", "bias"):
            name = name.replace(f".output.dense.{part}", f".intermediate.dense.{part}2")
            name = name.removesuffix("1") if not name.endswith(f"intermediate.dense.{part}") else f"{name}1"
    return ("bert_model_segment." if name.startswith("bert.") else "heads_only_segment.") + name


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
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("naming", [examples_name, mlperf_name, lambda name: f"module.{examples_name(name)}"])
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
