"""Reads RoBERTa checkpoints of fairseq: a ``model.pt`` with its settings, and ``dict.txt`` in its directory.

Names: facebookresearch/fairseq fairseq/models/roberta/model.py (commit 00d5b7a) and release 0.12.2, whose
`upgrade_state_dict_named` methods define the names of older versions: `decoder` was `encoder`, `emb_layer_norm` is
`layernorm_embedding`, `self_attn.in_proj_weight` was query, key and value in one tensor. The settings are an
argparse.Namespace in ``args``, or since 2020 a config in ``cfg``. Nothing of fairseq, hydra or omegaconf is imported.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.formats import fairseq_dictionary, torch_checkpoint
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import LazyTensor, LazyTensors, lazy_from_array, lazy_row_slice
from bert_jax.errors import UserError, require

ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
"""fairseq's names (utils.py, modules/gelu.py) -> transformers'. gelu_fast is the old name of gelu_accurate."""
ENCODER_PREFIX = "sentence_encoder."
RENAMED = (
    (r"^sentence_encoder\.embed_tokens\.", "roberta.embeddings.word_embeddings."),
    (r"^sentence_encoder\.embed_positions\.", "roberta.embeddings.position_embeddings."),
    (r"^sentence_encoder\.(layernorm_embedding|emb_layer_norm)\.", "roberta.embeddings.LayerNorm."),
    (r"^sentence_encoder\.layers\.", "roberta.encoder.layer."),
    (r"\.self_attn\.q_proj\.", ".attention.self.query."),
    (r"\.self_attn\.k_proj\.", ".attention.self.key."),
    (r"\.self_attn\.v_proj\.", ".attention.self.value."),
    (r"\.self_attn\.out_proj\.", ".attention.output.dense."),
    (r"\.self_attn_layer_norm\.", ".attention.output.LayerNorm."),
    (r"\.fc1\.", ".intermediate.dense."),
    (r"\.fc2\.", ".output.dense."),
    (r"\.final_layer_norm\.", ".output.LayerNorm."),
    (r"^lm_head\.weight$", "lm_head.decoder.weight"),
)
HF_NAMES = re.compile(r"^(roberta\.(embeddings\.(word|position)_embeddings\.weight|embeddings\.LayerNorm\.\w+"
                  r"|encoder\.layer\.\d+\.(attention\.(self|output)|intermediate|output)\.\w+\.(weight|bias))"
                  r"|lm_head\.(decoder\.weight|bias|(dense|layer_norm)\.(weight|bias)))$")  # fmt: skip
UNUSED = re.compile(r"\.version$|\.layers\.\d+\.((in|out)_proj|fc[12])_(weight|bias)$")
"""A format version; and tensors that fairseq 0.12 keeps in each layer for a fast path of torch: zeros during training,
filled in from the modules (`self_attn`, `fc1`, `fc2`) on loading (0.12.2 fairseq/modules/transformer_layer.py)."""


class FairseqCheckpoint(NamedTuple):
    """A checkpoint with the tokenizer files of its directory."""

    hf_model: HuggingFaceModel
    tokenizer_files: dict[str, bytes]
    """``vocab.json`` and ``merges.txt``; empty if the files for them are missing."""
    notes: list[str]
    """Sentences for the model card: what is missing, what was left out."""


def read(path: Path, head: str | None = None) -> FairseqCheckpoint:
    """Read a RoBERTa checkpoint; weights keep their dtype.

    Args:
      path: on disk; its tokenizer needs ``dict.txt``, ``encoder.json`` and ``vocab.bpe`` in the same directory.
      head: name of the classification head to read; None: the only one, if there is exactly one.

    Raises:
      UserError: as torch_checkpoint.load; or it is not a post-norm RoBERTa, lacks settings or the head, or dict.txt
        belongs to another model.
    """
    content = torch_checkpoint.load(path, placeholders=True)
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        raise UserError(f"{path}: has no 'model' with a state dict: it is not a checkpoint of fairseq")
    settings = _settings(content, path)
    fairseq_tensors = {
        re.sub(r"^(encoder|decoder)\.", "", name): tensor for name, tensor in _split_qkv(content["model"], path)
    }
    notes: list[str] = []
    heads, classifier = _heads(fairseq_tensors), {}
    chosen = head if head is not None else next(iter(heads)) if len(heads) == 1 else None
    require(chosen is None or chosen in heads, f"{path}: has no head '{chosen}', but {', '.join(heads) or 'none'}")
    if chosen is not None:
        classifier = {f"classifier.{name}": tensor for name, tensor in heads[chosen].items()}
        notes.append(f"tensors classifier.* are fairseq's classification head '{chosen}'")
    if others := [name for name in heads if name != chosen]:
        notes.append(f"left out: classification heads {', '.join(others)}")
    tensors = _renamed(fairseq_tensors, path)
    config = _config(settings, tensors, classifier, path)
    files, more = fairseq_dictionary.convert_tokenizer_files(path.parent, config["vocab_size"])
    hf_model = HuggingFaceModel(config, LazyTensors(tensors | classifier), str(path))
    return FairseqCheckpoint(hf_model, files, notes + more)


def _settings(content: Mapping, path: Path) -> dict[str, Any]:
    """Settings of the model: ``args``, or the part `model` of ``cfg``."""
    args, cfg = (torch_checkpoint.to_plain(content.get(key)) for key in ("args", "cfg"))
    settings = args if isinstance(args, dict) else (cfg or {}).get("model") if isinstance(cfg, dict) else None
    require(isinstance(settings, dict), f"{path}: has no settings of a model in 'args' or 'cfg': it is incomplete")
    return settings


def _split_qkv(model: Mapping, path: Path) -> list[tuple[str, LazyTensor]]:
    """The tensors, with query, key and value as separate tensors."""
    tensors = []
    for name, tensor in torch_checkpoint.lazy_state_dict(model, path).lazy_tensors.items():
        fused = re.search(r"\.self_attn\.in_proj_(weight|bias)$", name)
        if UNUSED.search(name):
            continue
        if fused is None:
            tensors.append((name, tensor))
            continue
        require(bool(tensor.shape), f"{path}: tensor '{name}' has no axes: it is not part of a RoBERTa")
        width = tensor.shape[0] // 3
        for part, letter in enumerate("qkv"):
            part_name = f"{name[: fused.start()]}.self_attn.{letter}_proj.{fused[1]}"
            tensors.append((part_name, lazy_row_slice(tensor, part * width, (part + 1) * width)))
    return tensors


def _heads(fairseq_tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Head -> name of the tensor in the head -> tensor."""
    heads: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in fairseq_tensors.items():
        if name.startswith("classification_heads."):
            head, _, inside = name.removeprefix("classification_heads.").partition(".")
            heads.setdefault(head, {})[inside] = tensor
    return heads


def _renamed(fairseq_tensors: Mapping[str, LazyTensor], path: Path) -> dict[str, LazyTensor]:
    norms = {f"{ENCODER_PREFIX}{name}.weight" for name in ("layernorm_embedding", "emb_layer_norm")}
    if f"{ENCODER_PREFIX}layer_norm.weight" in fairseq_tensors or not norms & set(fairseq_tensors):
        raise UserError(
            f"{path}: it is a pre-norm model (encoder_normalize_before), which RoBERTa in transformers does not support"
        )
    tensors = {}
    for name, tensor in fairseq_tensors.items():
        if name.startswith("classification_heads."):
            continue
        hf_name = name
        for pattern, replacement in RENAMED:
            hf_name = re.sub(pattern, replacement, hf_name)
        require(
            bool(HF_NAMES.match(hf_name)), f"{path}: tensor '{name}' is not part of a RoBERTa: it cannot be converted"
        )
        tensors[hf_name] = tensor
    for needed in ("word", "position"):
        name = f"roberta.embeddings.{needed}_embeddings.weight"
        table = name in tensors and len(tensors[name].shape) == 2
        require(table, f"{path}: has no table of {needed} embeddings: it is not a fairseq RoBERTa")
    # RoBERTa has no token types; transformers' RoBERTa has a table with one row, which is 0.
    width = tensors["roberta.embeddings.word_embeddings.weight"].shape[1]
    zeros = np.zeros((1, width), np.float32)
    tensors["roberta.embeddings.token_type_embeddings.weight"] = lazy_from_array(zeros)
    return tensors


def _config(
    settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor], classifier: Mapping[str, LazyTensor], path: Path
) -> dict[str, Any]:
    """The config of transformers: sizes from tensor shapes, the rest from the settings."""
    vocab_size, width = tensors["roberta.embeddings.word_embeddings.weight"].shape
    layers = {int(match[1]) for name in tensors if (match := re.match(r"roberta\.encoder\.layer\.(\d+)\.", name))}
    whole = bool(layers) and layers == set(range(len(layers)))
    require(whole, f"{path}: it has only the layers {sorted(layers)}: fetch it again")
    heads = settings.get("encoder_attention_heads")
    require(isinstance(heads, int), f"{path}: its settings lack encoder_attention_heads: it is incomplete")
    activation = settings.get("activation_fn", "gelu")
    require(
        activation in [*ACTIVATIONS], f"{path}: activation_fn '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    )
    if classifier:
        pooler = settings.get("pooler_activation_fn", "tanh")
        require(pooler == "tanh", f"{path}: pooler_activation_fn '{pooler}' is not supported: only tanh is")
    config = {
        "architectures": ["RobertaForSequenceClassification" if classifier else "RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "intermediate_size": _outputs(tensors, "roberta.encoder.layer.0.intermediate.dense.weight", path),
        "hidden_act": ACTIVATIONS[activation],
        "hidden_dropout_prob": settings.get("dropout", 0.1),
        "attention_probs_dropout_prob": settings.get("attention_dropout", 0.1),
        # fairseq's positions begin at padding_idx + 1 = 2: a table for 512 tokens has 514 rows.
        "max_position_embeddings": tensors["roberta.embeddings.position_embeddings.weight"].shape[0],
        "type_vocab_size": 1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "bos_token_id": fairseq_dictionary.SPECIALS["<s>"],
        "pad_token_id": fairseq_dictionary.SPECIALS["<pad>"],
        "eos_token_id": fairseq_dictionary.SPECIALS["</s>"],
        "tie_word_embeddings": not settings.get("untie_weights_roberta", False),
    }
    if classifier:
        labels = range(_outputs(classifier, "classifier.out_proj.weight", path))
        config["id2label"] = {str(label): f"LABEL_{label}" for label in labels}
        config["label2id"] = {f"LABEL_{label}": label for label in labels}
    return config


def _outputs(tensors: Mapping[str, LazyTensor], name: str, path: Path) -> int:
    """Number of outputs of a dense layer, from the shape of its weight."""
    tensor = tensors.get(name)
    require(tensor is not None and len(tensor.shape) == 2, f"{path}: has no '{name}': it is not a fairseq RoBERTa")
    return tensor.shape[0]
