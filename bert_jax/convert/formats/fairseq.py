"""RoBERTa as fairseq saved it: a ``model.pt`` with its settings, and ``dict.txt`` beside it.

Names: facebookresearch/fairseq fairseq/models/roberta/model.py (commit 00d5b7a) and release 0.12.2, with what its
`upgrade_state_dict_named` methods say of older versions: `decoder` was `encoder`, `emb_layer_norm` is
`layernorm_embedding`, `self_attn.in_proj_weight` was query, key and value in one. The settings are an
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
"""Theirs (fairseq/utils.py, modules/gelu.py) -> transformers'. gelu_fast is the old name of gelu_accurate."""
BODY = "sentence_encoder."
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
OURS = re.compile(r"^(roberta\.(embeddings\.(word_embeddings|position_embeddings)\.weight|embeddings\.LayerNorm\.\w+"
                  r"|encoder\.layer\.\d+\.(attention\.(self|output)|intermediate|output)\.\w+\.(weight|bias))"
                  r"|lm_head\.(decoder\.weight|bias|(dense|layer_norm)\.(weight|bias)))$")  # fmt: skip
UNUSED = re.compile(r"\.version$|\.layers\.\d+\.((in|out)_proj|fc[12])_(weight|bias)$")
"""A format number; and what fairseq 0.12 keeps in each layer for a fast path of torch's: zeros while it trains,
filled in from the modules (`self_attn`, `fc1`, `fc2`) on loading (0.12.2 fairseq/modules/transformer_layer.py)."""


class Read(NamedTuple):
    """What a checkpoint and the files beside it gave."""

    hf_model: HuggingFaceModel
    tokenizer_files: dict[str, bytes]
    """``vocab.json`` and ``merges.txt``; empty if the files for them are not there."""
    notes: list[str]
    """Lines for the user: what is missing, what was left out."""


def read(path: Path, head: str | None = None) -> Read:
    """A RoBERTa checkpoint; half-precision weights stay so.

    Args:
      path: on disk, with ``dict.txt``, ``encoder.json`` and ``vocab.bpe`` beside it if its tokenizer is wanted.
      head: name of the classification head to take, of several; None: the only one, if there is one.

    Raises:
      UserError: as torch_checkpoint.load; it is not a RoBERTa with norms after its blocks, or lacks settings; there is
        no such head; dict.txt is of another model.
    """
    content = torch_checkpoint.load(path, stand_ins=True)
    if not isinstance(content, Mapping) or not isinstance(content.get("model"), Mapping):
        raise UserError(f"{path}: has no 'model' with a state dict: it is not a checkpoint of fairseq")
    settings = _settings(content, path)
    theirs = {re.sub(r"^(encoder|decoder)\.", "", name): tensor for name, tensor in _split(content["model"], path)}
    notes: list[str] = []
    heads, classifier = _heads(theirs), {}
    chosen = head if head is not None else next(iter(heads)) if len(heads) == 1 else None
    require(chosen is None or chosen in heads, f"{path}: has no head '{chosen}', but {', '.join(heads) or 'none'}")
    if chosen is not None:
        classifier = {f"classifier.{name}": tensor for name, tensor in heads[chosen].items()}
        notes.append(f"tensors classifier.* are fairseq's classification head '{chosen}'")
    if others := [name for name in heads if name != chosen]:
        notes.append(f"left out: classification heads {', '.join(others)}")
    tensors = _renamed(theirs, path)
    config = _config(settings, tensors, classifier, path)
    files, more = fairseq_dictionary.beside(path.parent, config["vocab_size"])
    hf_model = HuggingFaceModel(config, LazyTensors(tensors | classifier), str(path))
    return Read(hf_model, files, notes + more)


def _settings(content: Mapping, path: Path) -> dict[str, Any]:
    """Settings of the model: ``args``, or the part `model` of ``cfg``."""
    args, cfg = (torch_checkpoint.plain(content.get(key)) for key in ("args", "cfg"))
    settings = args if isinstance(args, dict) else (cfg or {}).get("model") if isinstance(cfg, dict) else None
    require(isinstance(settings, dict), f"{path}: has no settings of a model in 'args' or 'cfg': it is incomplete")
    return settings


def _split(model: Mapping, path: Path) -> list[tuple[str, LazyTensor]]:
    """The tensors, with query, key and value apart."""
    found = []
    for name, tensor in torch_checkpoint.open_state(model, path).lazy_tensors.items():
        fused = re.search(r"\.self_attn\.in_proj_(weight|bias)$", name)
        if UNUSED.search(name):
            continue
        if fused is None:
            found.append((name, tensor))
            continue
        require(bool(tensor.shape), f"{path}: tensor '{name}' has no axes: it belongs to no RoBERTa")
        width = tensor.shape[0] // 3
        for part, letter in enumerate("qkv"):
            apart = f"{name[: fused.start()]}.self_attn.{letter}_proj.{fused[1]}"
            found.append((apart, lazy_row_slice(tensor, part * width, (part + 1) * width)))
    return found


def _heads(theirs: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Head -> tensor's name inside it -> tensor."""
    heads: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in theirs.items():
        if name.startswith("classification_heads."):
            head, _, inside = name.removeprefix("classification_heads.").partition(".")
            heads.setdefault(head, {})[inside] = tensor
    return heads


def _renamed(theirs: Mapping[str, LazyTensor], path: Path) -> dict[str, LazyTensor]:
    norms = {f"{BODY}{name}.weight" for name in ("layernorm_embedding", "emb_layer_norm")}
    if f"{BODY}layer_norm.weight" in theirs or not norms & set(theirs):
        raise UserError(
            f"{path}: its norms stand before the blocks (encoder_normalize_before): no RoBERTa of transformers does so"
        )
    tensors = {}
    for name, tensor in theirs.items():
        if name.startswith("classification_heads."):
            continue
        ours = name
        for pattern, replacement in RENAMED:
            ours = re.sub(pattern, replacement, ours)
        require(bool(OURS.match(ours)), f"{path}: tensor '{name}' belongs to no RoBERTa: it cannot be converted")
        tensors[ours] = tensor
    for needed in ("word", "position"):
        name = f"roberta.embeddings.{needed}_embeddings.weight"
        table = name in tensors and len(tensors[name].shape) == 2
        require(table, f"{path}: has no table of {needed} embeddings: it is not a fairseq RoBERTa")
    # RoBERTa has one kind of tokens and no table for it; transformers' adds a row, which is 0.
    width = tensors["roberta.embeddings.word_embeddings.weight"].shape[1]
    zeros = np.zeros((1, width), np.float32)
    tensors["roberta.embeddings.token_type_embeddings.weight"] = lazy_from_array(zeros)
    return tensors


def _config(
    settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor], classifier: Mapping[str, LazyTensor], path: Path
) -> dict[str, Any]:
    """From shapes what they tell, the rest from the settings."""
    vocab_size, width = tensors["roberta.embeddings.word_embeddings.weight"].shape
    layers = {int(found[1]) for name in tensors if (found := re.match(r"roberta\.encoder\.layer\.(\d+)\.", name))}
    whole = bool(layers) and layers == set(range(len(layers)))
    require(whole, f"{path}: of its layers only {sorted(layers)} are there: fetch it again")
    heads = settings.get("encoder_attention_heads")
    require(isinstance(heads, int), f"{path}: its settings do not say encoder_attention_heads: it is incomplete")
    activation = settings.get("activation_fn", "gelu")
    require(
        activation in [*ACTIVATIONS], f"{path}: activation_fn '{activation}' is not one of {', '.join(ACTIVATIONS)}"
    )
    if classifier:
        pooler = settings.get("pooler_activation_fn", "tanh")
        require(pooler == "tanh", f"{path}: pooler_activation_fn '{pooler}' cannot be kept: only tanh is known")
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
        # Their positions count from padding_idx + 1 = 2: a table for 512 tokens has 514 rows.
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
    """Outputs of a dense layer, by its weight."""
    tensor = tensors.get(name)
    require(tensor is not None and len(tensor.shape) == 2, f"{path}: has no '{name}': it is not a fairseq RoBERTa")
    return tensor.shape[0]
