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

from bert_jax.convert.families.family import HuggingFaceConfig
from bert_jax.convert.families.hf_config_validation import validate_hf_config
from bert_jax.convert.formats import torch_checkpoint
from bert_jax.convert.formats.format import ReadOptions, to_source_model, trim_vocabulary
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import LazyStateDict
from bert_jax.errors import require
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file

CONFIG = "bert_config.json"
SETTINGS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size"),
    *("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range"),
)
"""The fields of NVIDIA's BertConfig; the last line has the defaults of transformers."""
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


def matches_content(content: object) -> bool:
    """Whether the content of a file is a checkpoint of NVIDIA, or of another trainer without settings."""
    return isinstance(content, Mapping) and isinstance(content.get("model"), Mapping)


def read(content: Mapping, source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a checkpoint, without the padding rows of its vocabulary.

    Raises:
      UserError: the config is missing, incomplete, or has a larger vocabulary.
    """
    tensors = torch_checkpoint.as_lazy_state_dict(content["model"], source).lazy_tensors
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    require(len(renamed) == len(tensors), f"{source}: two of its tensors have the same name in transformers")
    file = source.parent / CONFIG
    given = read_json_object(file, f"copy the model's {CONFIG} there")
    config = {"model_type": "bert", **{name: given.get(name) for name in SETTINGS}, "layer_norm_eps": 1e-12}
    config = validate_hf_config(config | {"tie_word_embeddings": True}, str(file))
    if renamed.keys() & {"cls.predictions.bias", "cls.predictions.decoder.bias"}:
        pair = "cls.seq_relationship.weight" in renamed
        config["architectures"] = ["BertForPreTraining" if pair else "BertForMaskedLM"]
    rows = HuggingFaceConfig(config, str(file)).required_size("vocab_size")
    hf_model = trim_vocabulary(HuggingFaceModel(config, LazyStateDict(renamed), str(source)), rows)
    return to_source_model("nvidia", hf_model, find_tokenizer_file(source.parent), options)


def rename(name: str) -> str:
    """The name of a tensor in transformers."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name
