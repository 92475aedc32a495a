"""Tokenizers travel with their models: files carried as they are, or made where a run has one tokenizer.json only."""

import json
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage import StoredPath
from bert_jax.tokenizers.sentencepiece_backend import FORMAT, unwrap
from bert_jax.tokenizers.tokenizer import Tokenizer

NAMES = (
    *("vocab.txt", "tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe"),
    *("spiece.model", "sentencepiece.bpe.model", "30k-clean.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""What Hugging Face directories, and the releases of GPT-2, RoBERTa and ALBERT, keep of a tokenizer."""
CLASSES = {
    "WordPiece": {"bert": "BertTokenizer", "distilbert": "DistilBertTokenizer", "electra": "ElectraTokenizer"},
    "byte-level BPE": {"roberta": "RobertaTokenizer"},
    "SentencePiece unigram": {"albert": "AlbertTokenizer"},
}
"""Class in transformers by kind of tokenizer and family of model; any other pair is a PreTrainedTokenizerFast."""
GENERAL = "PreTrainedTokenizerFast"


def carry(source: StoredPath, destination: StoredPath) -> list[str]:
    """Copy what a directory has of a tokenizer, byte for byte.

    Args:
      source: directory of a model.
      destination: directory that is there; files of these names in it are replaced.

    Returns:
      names of the copied files; none where the source has no tokenizer.
    """
    found = [name for name in NAMES if (source / name).exists()]
    for name in found:
        (destination / name).write_bytes((source / name).read_bytes())
    return found


def make(tokenizer: Tokenizer, destination: StoredPath, family: str, max_length: int) -> list[str]:
    """Write the files that transformers needs, from a tokenizer alone.

    Args:
      tokenizer: of any kind.
      destination: directory that is there.
      family: their model_type: bert, distilbert, electra, roberta, albert, ...
      max_length: most tokens of a text, special ones included.

    Returns:
      names of the files.

    Raises:
      UserError: a SentencePiece model of a family whose class in transformers reads no such file.
    """
    description = json.loads(tokenizer.to_json())
    name = CLASSES.get(tokenizer.kind, {}).get(family, GENERAL)
    contents: dict[str, bytes] = {}
    settings: dict[str, Any] = {"tokenizer_class": name, "model_max_length": max_length, **_special_names(tokenizer)}
    settings |= tokenizer.settings
    if description.get("format") == FORMAT:
        if name == GENERAL:
            raise UserError(
                f"a {tokenizer.kind} tokenizer cannot be written for model_type '{family}': transformers reads such "
                "files for albert (unigram models) only; export the model as that, or train with WordPiece or byte-bpe"
            )
        contents["spiece.model"], _ = unwrap(description, "the tokenizer")
    else:
        contents["tokenizer.json"] = tokenizer.to_json().encode()
    if tokenizer.kind == "WordPiece":
        contents["vocab.txt"] = "".join(f"{piece}\n" for piece in _pieces(tokenizer)).encode()
    if tokenizer.kind == "byte-level BPE":
        contents["vocab.json"] = json.dumps({piece: i for i, piece in enumerate(_pieces(tokenizer))}).encode()
        contents["merges.txt"] = _merges(description["model"]["merges"]).encode()
    contents["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    for file, content in contents.items():
        (destination / file).write_bytes(content)
    return list(contents)


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


def _special_names(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {
        "pad_token": tokenizer.pad_id,
        "unk_token": tokenizer.unk_id,
        "cls_token": tokenizer.cls_id,
        "sep_token": tokenizer.sep_id,
        "mask_token": tokenizer.mask_id,
    }
    return {role: tokenizer.id_to_token(i) for role, i in ids.items()}


def _merges(merges: list[list[str] | str]) -> str:
    """Text of merges.txt: GPT-2's first line, then a pair in each."""
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return "".join(f"{line}\n" for line in ["#version: 0.2", *lines])
