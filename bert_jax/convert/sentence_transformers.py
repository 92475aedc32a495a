"""Reads and writes the files of sentence-transformers: ``modules.json`` and the configs of its modules.

Supported are a Transformer in the directory itself, one Pooling, and an optional Normalize after it.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, parse_json, read_json_object

MODULES, SETTINGS, TOKENIZER = "modules.json", "config_sentence_transformers.json", "tokenizer_config.json"
FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
ENCODER = tuple(f"sentence_{family}_config.json" for family in FAMILIES)
"""File names of the Transformer module's config; all but the first are from before version 1."""
POOLING = "1_Pooling"
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens")
LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Before version 6 each mode had a boolean of its own; vectors of several modes are concatenated in this order."""
WIDTHS = ("word_embedding_dimension", "embedding_dimension")
"""Names of the hidden size in the config of Pooling; version 6 uses the second."""
MODULE = re.compile(r"\w[\w.-]*")
SHORTEST = 3
"""Smallest maximum length in tokens: [CLS], one token and [SEP]."""


@dataclasses.dataclass(frozen=True)
class SentenceEmbedding:
    """How the token vectors of a text are pooled into one vector."""

    pooling: tuple[str, ...] = ("mean",)
    """One or several of POOLINGS; the vectors of several are concatenated."""
    normalize: bool = False
    """Whether vectors are divided by their length."""
    max_length: int | None = None
    """Longer texts are truncated to this many tokens, special ones included; None: the model's positions."""
    lowercase: bool = False
    """Whether texts are lower-cased before tokenization."""
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prefixes for texts, by name."""
    default_prompt: str | None = None
    """The prompt that is used by default."""
    include_prompt: bool = True
    """Whether pooling includes [CLS] and the prompt's tokens."""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Contents of the files, by path inside the directory."""


def resolve_pooling(pooling: str | Sequence[str], direction: str) -> tuple[str, ...]:
    """Check one or several pooling modes for a model of this attention direction; returns a tuple.

    Raises:
      UserError: no mode, an unknown mode, or 'cls' with a causal model.
    """
    modes = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    for mode in modes or (pooling,):
        if mode not in POOLINGS:
            raise UserError(f"pooling '{mode}' is not one of {', '.join(POOLINGS)}")
    if "cls" in modes and direction == "causal":
        raise UserError("pooling 'cls': in a causal model [CLS] attends to no token of the text: use 'mean'")
    return modes


def read_sentence_embedding(directory: StoredPath, hidden_size: int) -> SentenceEmbedding | None:
    """The sentence embeddings that a directory describes; None if it has no modules.json.

    Args:
      directory: of the model.
      hidden_size: of the model.

    Raises:
      UserError: a file is damaged, contradicts the model, or needs a feature that `LoadedModel.encode` lacks.
    """
    if not (directory / MODULES).exists():
        return None
    files = {MODULES: (directory / MODULES).read_bytes()}

    def read_config(name: str) -> dict[str, Any]:
        if (directory / name).exists():
            files[name] = (directory / name).read_bytes()
        return parse_json(files.get(name, b"{}"), directory / name, _AGAIN)

    folders = _module_folders(directory / MODULES, parse_json(files[MODULES], directory / MODULES, _AGAIN, list))
    where = directory / folders["Pooling"] / "config.json"
    if not where.exists():
        raise UserError(f"{where} is missing: {_AGAIN}")
    pooling, settings = read_config(f"{folders['Pooling']}/config.json"), read_config(SETTINGS)
    encoder = next((config for name in ENCODER if (config := read_config(name))), {})
    normalize = read_config(f"{folders['Normalize']}/config.json") if "Normalize" in folders else {}
    unsupported = {
        f"truncate_dim in {SETTINGS}": settings.get("truncate_dim") is not None,
        f"transformer_task in {ENCODER[0]}": encoder.get("transformer_task", "feature-extraction")
        != "feature-extraction",
        "module_input_name of Normalize": normalize.get("module_input_name", "sentence_embedding")
        != "sentence_embedding",
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise UserError(f"{directory}: {name} is not supported: {_ENCODER_ALONE}")
    modes = _modes(where, pooling, hidden_size)
    prompts, default = _prompts(directory / SETTINGS, settings)
    length = _value(directory / ENCODER[0], encoder, "max_seq_length", int)
    if length is None and (directory / TOKENIZER).exists():  # version 6 and later store it there
        maximum = read_json_object(directory / TOKENIZER, _AGAIN).get("model_max_length")
        length = int(maximum) if isinstance(maximum, int | float) and maximum < 2**31 else None
    if length is not None and length < SHORTEST:
        names = f"max_seq_length of {ENCODER[0]}, else model_max_length of {TOKENIZER},"
        raise UserError(f"{directory}: {names} is {length}: it must be at least {SHORTEST}")
    include = _value(where, pooling, "include_prompt", bool)
    return SentenceEmbedding(
        modes,
        "Normalize" in folders,
        length,
        bool(_value(directory / ENCODER[0], encoder, "do_lower_case", bool)),
        prompts,
        default,
        True if include is None else include,
        files,
    )


_AGAIN = "download the model again"
_ENCODER_ALONE = f"remove {MODULES} to read the encoder alone"


def _module_folders(path: StoredPath, modules: list[Any]) -> dict[str, str]:
    """Folder of each module, by the last part of its type."""
    try:
        kinds = [module["type"] for module in modules]
        folders = {kind.rpartition(".")[2]: module["path"] for kind, module in zip(kinds, modules, strict=True)}
        known = all(kind.startswith("sentence_transformers.") for kind in kinds) and len(folders) == len(modules)
        damaged = not all(MODULE.fullmatch(folder) for folder in list(folders.values())[1:])
    except (KeyError, TypeError, AttributeError):
        damaged = True
    if damaged:
        raise UserError(f"{path} is damaged: each module needs a type, and a path inside the directory")
    if not known or list(folders) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path}: the modules {', '.join(kinds)} are not supported: only Transformer, Pooling and Normalize in "
            f"this order are; {_ENCODER_ALONE}"
        )
    if folders["Transformer"]:
        raise UserError(
            f"{path}: the Transformer in {folders['Transformer']} is not supported: only one in the directory of "
            f"{MODULES} is; save the model again with a newer sentence-transformers"
        )
    return folders


def _modes(path: StoredPath, config: dict[str, Any], hidden_size: int) -> tuple[str, ...]:
    for name in config:
        if name not in (*LEGACY_POOLINGS, *WIDTHS, "pooling_mode", "include_prompt"):
            raise UserError(f"{path}: the setting '{name}' is unknown: {_ENCODER_ALONE}")
        if name in WIDTHS and config[name] != hidden_size:
            raise UserError(f"{path}: {name} is {config[name]!r}, but the model's hidden size is {hidden_size}")
    modes = config.get("pooling_mode")
    if modes is None:
        flags = {mode: _value(path, config, key, bool) for key, mode in LEGACY_POOLINGS.items() if key in config}
        modes = [mode for mode, enabled in flags.items() if enabled] if flags else "mean"
        if not modes:
            raise UserError(f"{path}: every pooling mode is false: set one of {', '.join(POOLINGS)}")
    modes = [modes] if isinstance(modes, str) else modes
    for mode in modes if isinstance(modes, list) and modes else [modes]:
        if mode not in POOLINGS:
            raise UserError(f"{path}: pooling mode {mode!r} is not supported: only {', '.join(POOLINGS)} are")
    return tuple(modes)


def _prompts(path: StoredPath, settings: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the default one."""
    prompts = _value(path, settings, "prompts", dict) or {}
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise UserError(f"{path}: prompts must be strings")
    default = _value(path, settings, "default_prompt_name", str)
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name '{default}' is not one of its prompts")
    return prompts, None if default is None else prompts[default]


def _value(path: StoredPath, config: dict[str, Any], name: str, kind: type) -> Any:
    value = config.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise UserError(f"{path}: {name} is {value!r}: it must be of type {kind.__name__}")
    return value


def make(pooling: str, hidden_size: int, max_length: int) -> SentenceEmbedding:
    """The files with which sentence-transformers pools a model's tokens this way (verified with version 6.2)."""
    modules = {"Transformer": "", "Pooling": POOLING}
    contents = {
        MODULES: [
            {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{name}"}
            for i, (name, folder) in enumerate(modules.items())
        ],
        f"{POOLING}/config.json": {
            "word_embedding_dimension": hidden_size,
            **{key: mode == pooling for key, mode in LEGACY_POOLINGS.items() if mode in POOLINGS},
        },
        ENCODER[0]: {"max_seq_length": max_length, "do_lower_case": False},
    }
    files = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
    return SentenceEmbedding((pooling,), max_length=max_length, files=files)


def write(directory: Path, embedding: SentenceEmbedding) -> None:
    """Write the files of an embedding into an existing directory."""
    for name, content in embedding.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
