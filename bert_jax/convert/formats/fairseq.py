"""Reads RoBERTa checkpoints of fairseq: a ``model.pt`` with its settings, and ``dict.txt`` in its directory.

Names: facebookresearch/fairseq fairseq/models/roberta/model.py (commit 00d5b7a) and release 0.12.2, whose
`upgrade_state_dict_named` methods define the names of older versions: `decoder` was `encoder`, `emb_layer_norm` is
`layernorm_embedding`, `self_attn.in_proj_weight` was query, key and value in one tensor. The settings are an
argparse.Namespace in ``args``, or since 2020 a config in ``cfg``. Nothing of fairseq, hydra or omegaconf is imported.

``dict.txt`` renumbers GPT-2's ids by frequency, the most frequent first. (0.12.2 fairseq/data/dictionary.py,
data/encoders/gpt2_bpe.py, tasks/masked_lm.py: four special tokens, then the lines of the file in their order, and the
task adds ``<mask>``.)
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bert_jax.convert.families.family import default_labels
from bert_jax.convert.formats import torch_checkpoint
from bert_jax.convert.formats.format import ReadOptions, to_source_model
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.tensors import LazyStateDict, LazyTensor, lazy_from_array, lazy_row_slice
from bert_jax.errors import UserError, require
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.readers import find_tokenizer_file

ACTIVATIONS = {"gelu": "gelu", "gelu_accurate": "gelu_new", "gelu_fast": "gelu_new", "relu": "relu"}
"""fairseq's names (utils.py, modules/gelu.py) -> transformers'. gelu_fast is the old name of gelu_accurate."""
DICTIONARY, ENCODER, MERGES = "dict.txt", "encoder.json", "vocab.bpe"
SPECIALS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
MASK = "<mask>"
OVERWRITE = " #fairseq:overwrite"
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
UNUSED = re.compile(r"\.version$|\.layers\.\d+\.((in|out)_proj|fc[12])_(weight|bias)$")
"""A format version; and tensors that fairseq 0.12 keeps in each layer for a fast path of torch: zeros during training,
filled in from the modules (`self_attn`, `fc1`, `fc2`) on loading (0.12.2 fairseq/modules/transformer_layer.py)."""


def matches_content(content: object) -> bool:
    """Whether the content of a file is a checkpoint of fairseq: a state dict with settings."""
    has_model = isinstance(content, Mapping) and isinstance(content.get("model"), Mapping)
    return has_model and bool({"args", "cfg"} & content.keys())


def read(content: Mapping, source: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read a RoBERTa checkpoint; its tokenizer needs ``dict.txt``, ``encoder.json`` and ``vocab.bpe`` beside it.

    Weights keep their dtype.

    Raises:
      UserError: it is not a post-norm RoBERTa, lacks settings, or dict.txt belongs to another model.
    """
    tensors, heads = _tensors(content["model"], source)
    notes, classifier = [], {}
    if len(heads) == 1:
        ((name, head),) = heads.items()
        classifier = {f"classifier.{inside}": tensor for inside, tensor in head.items()}
        notes.append(f"tensors classifier.* are fairseq's classification head '{name}'")
    elif heads:
        notes.append(f"left out: classification heads {', '.join(heads)}")
    config = _config(_settings(content, source), tensors, classifier, source)
    hf_model = HuggingFaceModel(config, LazyStateDict(tensors | classifier), str(source))
    missing = [name for name in (DICTIONARY, ENCODER, MERGES) if not (source.parent / name).exists()]
    if missing:
        notes.append(f"no tokenizer files, because {', '.join(missing)} is not in the checkpoint's directory")
        # vocab.bpe alone is not enough: without dict.txt its ids are GPT-2's.
        tokenizer = source.parent / "tokenizer.json"
        return to_source_model("fairseq", hf_model, tokenizer if tokenizer.exists() else None, options, tuple(notes))
    for name, file in convert_dictionary(source.parent, config["vocab_size"]).items():
        (scratch / name).write_bytes(file)
    return to_source_model("fairseq", hf_model, find_tokenizer_file(epath.Path(scratch)), options, tuple(notes))


def _settings(content: Mapping, path: StoredPath) -> dict[str, Any]:
    """Settings of the model: ``args``, or the part `model` of ``cfg``."""
    args, cfg = (torch_checkpoint.to_plain(content.get(key)) for key in ("args", "cfg"))
    settings = args if isinstance(args, dict) else (cfg or {}).get("model") if isinstance(cfg, dict) else None
    require(isinstance(settings, dict), f"{path}: has no settings of a model in 'args' or 'cfg': it is incomplete")
    return settings


def _tensors(model: Mapping, path: StoredPath) -> tuple[dict[str, LazyTensor], dict[str, dict[str, LazyTensor]]]:
    """The encoder and the MLM head with the names of transformers; and by head, the tensors of classification heads."""
    tensors: dict[str, LazyTensor] = {}
    heads: dict[str, dict[str, LazyTensor]] = {}
    for full_name, tensor in torch_checkpoint.as_lazy_state_dict(model, path).lazy_tensors.items():
        name = re.sub(r"^(encoder|decoder)\.", "", full_name)
        if UNUSED.search(name):
            continue
        if name.startswith(("sentence_encoder.layer_norm.", "roberta.")):
            raise UserError(
                f"{path}: '{full_name}' is not part of a post-norm RoBERTa of fairseq: pre-norm models "
                "(encoder_normalize_before) are not supported"
            )
        if name.startswith("classification_heads."):
            head, _, inside = name.removeprefix("classification_heads.").partition(".")
            heads.setdefault(head, {})[inside] = tensor
        elif ".self_attn.in_proj_" in name and tensor.shape:  # query, key and value in one tensor
            width = tensor.shape[0] // 3
            for part, letter in enumerate("qkv"):
                part_name = name.replace("in_proj_", f"{letter}_proj.")
                tensors[_rename(part_name)] = lazy_row_slice(tensor, part * width, (part + 1) * width)
        else:
            tensors[_rename(name)] = tensor
    return tensors, heads


def _rename(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _config(
    settings: Mapping[str, Any],
    tensors: dict[str, LazyTensor],
    classifier: Mapping[str, LazyTensor],
    path: StoredPath,
) -> dict[str, Any]:
    """The config of transformers: sizes from tensor shapes, the rest from the settings. Adds the table of types."""

    def shape(name: str) -> tuple[int, ...]:
        known = (tensors | classifier).get(name)
        require(known is not None and len(known.shape) == 2, f"{path}: has no '{name}': it is not a fairseq RoBERTa")
        return known.shape

    vocab_size, width = shape("roberta.embeddings.word_embeddings.weight")
    # RoBERTa has no token types; transformers' RoBERTa has a table with one row, which is 0.
    zeros = np.zeros((1, width), np.float32)
    tensors["roberta.embeddings.token_type_embeddings.weight"] = lazy_from_array(zeros)
    layers = [int(match[1]) for name in tensors if (match := re.match(r"roberta\.encoder\.layer\.(\d+)\.", name))]
    pooler, activation = settings.get("pooler_activation_fn", "tanh"), settings.get("activation_fn", "gelu")
    require(
        pooler == "tanh" or not classifier, f"{path}: pooler_activation_fn '{pooler}' is not supported: only tanh is"
    )
    config = {
        "architectures": ["RobertaForSequenceClassification" if classifier else "RobertaForMaskedLM"],
        "model_type": "roberta",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": max(layers, default=-1) + 1,
        "num_attention_heads": settings.get("encoder_attention_heads"),
        "intermediate_size": shape("roberta.encoder.layer.0.intermediate.dense.weight")[0],
        "hidden_act": ACTIVATIONS.get(str(activation), str(activation)),
        "hidden_dropout_prob": settings.get("dropout", 0.1),
        "attention_probs_dropout_prob": settings.get("attention_dropout", 0.1),
        # fairseq's positions begin at padding_idx + 1 = 2: a table for 512 tokens has 514 rows.
        "max_position_embeddings": shape("roberta.embeddings.position_embeddings.weight")[0],
        "type_vocab_size": 1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "bos_token_id": SPECIALS["<s>"],
        "pad_token_id": SPECIALS["<pad>"],
        "eos_token_id": SPECIALS["</s>"],
        "tie_word_embeddings": not settings.get("untie_weights_roberta", False),
    }
    if classifier:
        labels = default_labels(shape("classifier.out_proj.weight")[0])
        config["id2label"] = {str(i): label for i, label in enumerate(labels)}
        config["label2id"] = {label: i for i, label in enumerate(labels)}
    return config


def convert_dictionary(directory: StoredPath, rows: int) -> dict[str, bytes]:
    """The files of a byte-level BPE tokenizer with the ids of a model of fairseq: ``vocab.json``, ``merges.txt``.

    Args:
      directory: has ``dict.txt`` (lines of a GPT-2 id and its count; words that are not a number, such as
        madeupword0000, are tokens themselves), ``encoder.json`` (GPT-2's token -> id) and ``vocab.bpe`` (GPT-2's
        merges, used unchanged).
      rows: number of rows of the model's word embeddings.

    Raises:
      UserError: a file is damaged, a line is not an id of GPT-2, or the number of tokens is not that of the rows.
    """
    dict_txt, encoder_json = directory / DICTIONARY, directory / ENCODER
    numbers = read_json_object(encoder_json, "fetch GPT-2's again")
    tokens = {str(number): token for token, number in numbers.items()}
    ids, count = dict(SPECIALS), len(SPECIALS)
    lines = dict_txt.read_bytes().decode(errors="replace").split("\n")
    for line in lines[:-1] if not lines[-1] else lines:
        word, _, frequency = line.rstrip().removesuffix(OVERWRITE).rpartition(" ")
        if not word or not frequency.isdigit() or (word.isdigit() and word not in tokens):
            raise UserError(
                f"{dict_txt}: '{line[:60]}' is not a token of {encoder_json} and its count: fetch both again"
            )
        ids[tokens.get(word, word)] = count
        count += 1
    if MASK not in ids:
        ids[MASK] = count
        count += 1
    if rows != count:
        raise UserError(
            f"{dict_txt}: has {count} tokens, special ones included, the model {rows} rows: it belongs to another model"
        )
    return {
        "vocab.json": json.dumps(ids, ensure_ascii=False).encode(),
        "merges.txt": (directory / MERGES).read_bytes(),
    }
