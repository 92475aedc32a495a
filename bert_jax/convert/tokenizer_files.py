"""Tokenizer files of a converted model: copied from the source, or written from a run's tokenizer.json."""

import json
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.kinds import ROLE_NAMES
from bert_jax.tokenizers.sentencepiece_backend import FORMAT, model_bytes_from_json
from bert_jax.tokenizers.tokenizer import Tokenizer

NAMES = (
    *("vocab.txt", "tokenizer.json", "vocab.json", "merges.txt", "encoder.json", "vocab.bpe"),
    *("spiece.model", "sentencepiece.bpe.model", "30k-clean.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""Tokenizer files of Hugging Face directories and of the releases of GPT-2, RoBERTa and ALBERT."""
CLASSES = {
    "WordPiece": {
        "bert": "BertTokenizer",
        "distilbert": "DistilBertTokenizer",
        "electra": "ElectraTokenizer",
        "mobilebert": "MobileBertTokenizer",
    },
    "byte-level BPE": {"roberta": "RobertaTokenizer"},
    "SentencePiece unigram": {"albert": "AlbertTokenizer"},
}
"""Class in transformers by kind of tokenizer and model family; GENERIC_CLASS for every other pair."""
GENERIC_CLASS = "PreTrainedTokenizerFast"
_NORMALIZERS = {"WordPiece": "BertNormalizer", "byte-level BPE": None}
"""The normalizer that the classes of a kind make by themselves; GENERIC_CLASS reads any other from tokenizer.json."""


def copy_tokenizer_files(source: StoredPath, destination: StoredPath) -> list[str]:
    """Copy the tokenizer files of a directory, byte for byte.

    Args:
      source: directory of a model.
      destination: existing directory; files of the same name are replaced.

    Returns:
      names of the copied files; empty if the source has no tokenizer.
    """
    names = [name for name in NAMES if (source / name).exists()]
    for name in names:
        (destination / name).write_bytes((source / name).read_bytes())
    return names


def write_tokenizer_files(tokenizer: Tokenizer, destination: StoredPath, family: str, max_length: int) -> list[str]:
    """Write the files that transformers needs to load a tokenizer; existing files are kept.

    Args:
      tokenizer: of any kind.
      destination: existing directory.
      family: model_type in transformers: bert, distilbert, electra, roberta, albert, ...
      max_length: maximum number of tokens of a text, special ones included.

    Returns:
      names of the files, written or kept.

    Raises:
      UserError: a SentencePiece model, and a family whose class in transformers does not read one.
    """
    description = json.loads(tokenizer.to_json())
    name = CLASSES.get(tokenizer.kind, {}).get(family, GENERIC_CLASS)
    steps = description.get("normalizer")
    if tokenizer.kind in _NORMALIZERS and (steps and steps["type"]) != _NORMALIZERS[tokenizer.kind]:
        name = GENERIC_CLASS
    file_contents: dict[str, bytes] = {}
    settings: dict[str, Any] = {"tokenizer_class": name, "model_max_length": max_length}
    for role in ROLE_NAMES:
        settings[f"{role}_token"] = tokenizer.id_to_token(getattr(tokenizer, f"{role}_id"))
    settings |= tokenizer.settings
    if description.get("format") == FORMAT:
        if name == GENERIC_CLASS:
            raise UserError(
                f"a {tokenizer.kind} tokenizer cannot be written for model_type '{family}': transformers reads such "
                "files for albert (unigram models) only; export it as albert, or train with WordPiece or byte-bpe"
            )
        file_contents["spiece.model"], _ = model_bytes_from_json(description, "the tokenizer")
    else:
        file_contents["tokenizer.json"] = tokenizer.to_json().encode()
    if tokenizer.kind == "WordPiece":
        file_contents["vocab.txt"] = "".join(f"{piece}\n" for piece in _pieces(tokenizer)).encode()
    if tokenizer.kind == "byte-level BPE":
        file_contents["vocab.json"] = json.dumps({piece: i for i, piece in enumerate(_pieces(tokenizer))}).encode()
        file_contents["merges.txt"] = _merges(description["model"]["merges"]).encode()
    file_contents["tokenizer_config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    for file, content in file_contents.items():
        if not (destination / file).exists():
            (destination / file).write_bytes(content)
    return list(file_contents)


def _pieces(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


def _merges(merges: list[list[str] | str]) -> str:
    """The text of merges.txt: a version line, then one pair per line."""
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return "".join(f"{line}\n" for line in ["#version: 0.2", *lines])
