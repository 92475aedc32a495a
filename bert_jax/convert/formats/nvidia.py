"""Reads checkpoints of NVIDIA's PyTorch BERT: DeepLearningExamples (``ckpt_*.pt``), MLPerf (``model.ckpt-28252.pt``).

A file is ``{"model": state dict, "optimizer": ..., ...}``; names are those of `transformers`, except in fused layers:

- NVIDIA/DeepLearningExamples PyTorch/LanguageModeling/BERT/modeling.py (commit 1d4211f): `dense_act` is a dense layer
  with its activation, in the feed-forward layer, the pooler and the MLM head. GELU is the exact one.
- mlcommons/training_results_v0.7 NVIDIA/benchmarks/bert/implementations/pytorch/convert_tf_checkpoint.py and
  run_pretraining.py (commit c664061), training_results_v2.0 modeling.py (commit a6ae3e1): Apex's attention
  (`multi_head_attention`), two dense layers in one (`weight1`, `weight2`), and a model in two segments.

Both pad the vocabulary to a multiple of 8. The weights are those of ``model``, not the optimizer's float32 copies.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_jax.convert.families.hf_config import normalize_hf_config
from bert_jax.convert.formats import torch_checkpoint
from bert_jax.convert.formats.format import ReadOptions, TrainerFormat, to_source_model, trim_vocabulary
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import LazyTensors
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, read_json_object
from bert_jax.tokenizers.files import find_tokenizer_file

CONFIG = "bert_config.json"
SETTINGS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
OPTIONAL = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}
"""Fields that may be missing, with the defaults of NVIDIA's BertConfig."""
RENAMED = (
    (r"^(module\.|bert_model_segment\.|heads_only_segment\.)+", ""),
    (r"\.dense_act\.", ".dense."),
    (r"\.attention\.multi_head_attention\.q_", ".attention.self.query."),
    (r"\.attention\.multi_head_attention\.k_", ".attention.self.key."),
    (r"\.attention\.multi_head_attention\.v_", ".attention.self.value."),
    (r"\.attention\.multi_head_attention\.out_proj_", ".attention.output.dense."),
    (r"\.attention\.layer_norm\.", ".attention.output.LayerNorm."),
    (r"\.intermediate\.dense\.(weight|bias)1$", r".intermediate.dense.\1"),
    (r"\.intermediate\.dense\.(weight|bias)2$", r".output.dense.\1"),
    (r"\bgamma$", "weight"),
    (r"\bbeta$", "bias"),
)
"""(pattern in the checkpoint's name, replacement), applied in this order."""


def matches(content: object) -> bool:
    """Whether the content of a file is a checkpoint of NVIDIA, or of another trainer without settings."""
    return isinstance(content, Mapping) and isinstance(content.get("model"), Mapping)


def read(content: Mapping, source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a checkpoint, without the padding rows of its vocabulary.

    Raises:
      UserError: the config is missing, incomplete, or has a larger vocabulary.
    """
    return to_source_model("nvidia", read_hf_model(content, source), find_tokenizer_file(source.parent), options)


def read_hf_model(content: Mapping, path: StoredPath) -> HuggingFaceModel:
    """The model with the names of transformers."""
    tensors = torch_checkpoint.lazy_state_dict(content["model"], path)
    renamed = {rename(name): tensor for name, tensor in tensors.lazy_tensors.items()}
    if len(renamed) != len(tensors):
        raise UserError(f"{path}: two tensors are the same one under the names of different versions")
    settings = _settings(path.parent / CONFIG)
    pretraining = {"cls.predictions.bias", "cls.predictions.decoder.bias"} & set(renamed)
    if pretraining and "cls.seq_relationship.weight" in renamed:
        settings["architectures"] = ["BertForPreTraining"]
    elif pretraining:
        settings["architectures"] = ["BertForMaskedLM"]
    return trim_vocabulary(HuggingFaceModel(settings, LazyTensors(renamed), str(path)), settings["vocab_size"])


def rename(name: str) -> str:
    """The name of a tensor in transformers."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _settings(path: StoredPath) -> dict[str, Any]:
    source_config = read_json_object(path, f"copy the model's {CONFIG} there")
    missing = [name for name in SETTINGS if name not in source_config]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}: copy the model's {CONFIG} there")
    known = {name: source_config[name] for name in SETTINGS}
    known |= {name: source_config.get(name, default) for name, default in OPTIONAL.items()}
    return normalize_hf_config(
        {"model_type": "bert", **known, "layer_norm_eps": 1e-12, "tie_word_embeddings": True}, str(path)
    )


INPUT = TrainerFormat(matches, read)
