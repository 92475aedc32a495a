"""NVIDIA's names (from its sources, see nvidia.py) and those of transformers; files written by torch.save."""

import json

import numpy as np
import pytest

from bert_jax.convert.formats import fairseq, nvidia, torch_checkpoint
from bert_jax.convert.translate import from_huggingface
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


def read(path):
    content = torch_checkpoint.load(path, placeholders=True)
    assert nvidia.matches(content) and not fairseq.matches(content)
    return nvidia.read_hf_model(content, path)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("naming", [examples_name, mlperf_name, lambda name: f"module.{examples_name(name)}"])
def test_checkpoint(tmp_path, model, naming, new):
    import torch

    state = {naming(name): tensor for name, tensor in model.state_dict().items() if not name.endswith("decoder.bias")}
    assert not set(state) <= set(model.state_dict())
    loader = torch.utils.data.DataLoader([np.zeros(2), np.ones(2)], batch_size=2)
    content = {"model": state, "optimizer": {"state": {}}, "epoch": 3, "data_loader": loader, "loss": np.float64(0.5)}
    path = tmp_path / "ckpt_8601.pt"
    torch.save(content, path, _use_new_zipfile_serialization=new)
    (tmp_path / "bert_config.json").write_text(json.dumps(CONFIG))
    hf_model = read(path)
    assert hf_model.config == CONFIG | {
        "model_type": "bert",
        "architectures": ["BertForPreTraining"],
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    }
    expected = {name: t.numpy() for name, t in model.state_dict().items() if not name.endswith("decoder.bias")}
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.bias"):
        expected[name] = expected[name][:31]
    assert set(hf_model.tensors) == set(expected)
    assert from_huggingface(hf_model).heads.pair
    for name, array in expected.items():
        np.testing.assert_array_equal(hf_model.tensors[name], array)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_is_wrong(tmp_path, model):
    import torch

    path, config = tmp_path / "ckpt_1.pt", tmp_path / "bert_config.json"

    def fails(*words):
        with pytest.raises(UserError) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)

    state = model.state_dict()
    torch.save({"model": state}, path)
    fails(str(config), "is missing")
    config.write_text(json.dumps({"vocab_size": 31}))
    fails(str(config), "lacks hidden_size")
    config.write_text(json.dumps(CONFIG | {"vocab_size": 40}))
    fails(str(path), "32 rows", "40 tokens")
    config.write_text(json.dumps(CONFIG))
    twice = {"bert.pooler.dense_act.bias": state["bert.pooler.dense.bias"]}
    torch.save({"model": state | twice}, path)
    fails(str(path), "two tensors")
    headless = {name: tensor for name, tensor in state.items() if not name.startswith("cls.seq")}
    torch.save({"model": headless}, path)
    assert read(path).config["architectures"] == ["BertForMaskedLM"]
