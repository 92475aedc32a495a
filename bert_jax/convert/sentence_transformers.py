"""Reads and writes the files of sentence-transformers: ``modules.json`` and the configs of its modules.

Supported are a Transformer in the directory itself, one Pooling, and an optional Normalize after it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from bert_jax import field_validation
from bert_jax.errors import UserError, short_repr
from bert_jax.field_validation import Interval
from bert_jax.storage.json_files import parse_json, read_json_object
from bert_jax.storage.paths import StoredPath

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
_AGAIN = "download the model again"
_ENCODER_ALONE = f"remove {MODULES} to read the encoder alone"


class _Module(TypedDict):
    type: str
    path: str


class _Settings(TypedDict, total=False):
    """Of the directory."""

    truncate_dim: None
    prompts: dict[str, str] | None
    default_prompt_name: str | None


class _Encoder(TypedDict, total=False):
    """Of the Transformer module."""

    max_seq_length: Annotated[int | None, Interval("[3, 2e9]")]
    do_lower_case: bool | None
    transformer_task: Literal["feature-extraction"]


class _Normalize(TypedDict, total=False):
    module_input_name: Literal["sentence_embedding"]


_WIDTHS = ("word_embedding_dimension", "embedding_dimension")  # the hidden size; version 6 uses the second
_POOLING_TYPES = dict.fromkeys(_WIDTHS, int) | dict.fromkeys((*LEGACY_POOLINGS, "include_prompt"), bool)
_Pooling = TypedDict("_Pooling", _POOLING_TYPES | {"pooling_mode": Any}, total=False)
"""All settings of the Pooling module; a `pooling_mode` is a name, or a list of names."""


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


def validate_pooling(pooling: str | Sequence[str], direction: str) -> tuple[str, ...]:
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
    files: dict[str, bytes] = {}

    def read(name: str, kind: Any) -> Any:
        """A file of this kind; a missing one has the defaults."""
        path = directory / name
        if path.exists():
            files[name] = path.read_bytes()
        value = parse_json(files.get(name, b"{}"), path, _AGAIN, list if kind is list else dict)
        return value if kind is list else field_validation.from_json(kind, value, path, _ENCODER_ALONE)

    folders = _module_folders(directory / MODULES, read(MODULES, list))
    where = directory / folders["Pooling"] / "config.json"
    if not where.exists():
        raise UserError(f"{where} is missing: {_AGAIN}")
    pooling, settings = read(f"{folders['Pooling']}/config.json", _Pooling), read(SETTINGS, _Settings)
    encoder = next((config for name in ENCODER if (config := read(name, _Encoder))), {})
    if "Normalize" in folders:
        read(f"{folders['Normalize']}/config.json", _Normalize)
    if unknown := pooling.keys() - _Pooling.__annotations__:
        raise UserError(f"{where}: the setting '{min(unknown)}' is unknown: {_ENCODER_ALONE}")
    for name in pooling.keys() & _WIDTHS:
        if pooling[name] != hidden_size:
            raise UserError(f"{where}: {name} is {pooling[name]}, but the model's hidden size is {hidden_size}")
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise UserError(f"{directory / SETTINGS}: default_prompt_name '{default}' is not one of its prompts")
    length = encoder.get("max_seq_length")
    if length is None and (directory / TOKENIZER).exists():  # version 6 and later store it there
        maximum = read_json_object(directory / TOKENIZER, _AGAIN).get("model_max_length")
        length = int(maximum) if isinstance(maximum, int | float) and maximum < 2**31 else None
    return SentenceEmbedding(
        _modes(where, pooling),
        "Normalize" in folders,
        length,
        bool(encoder.get("do_lower_case")),
        prompts,
        prompts.get(default),
        pooling.get("include_prompt", True),
        files,
    )


def _module_folders(path: StoredPath, described: list[Any]) -> dict[str, str]:
    """Folder of each module, by the last part of its type."""
    modules = field_validation.from_json(list[_Module], described, path, _AGAIN)
    kinds, paths = [module["type"] for module in modules], [module["path"] for module in modules]
    names = [kind.rpartition(".")[2] for kind in kinds]
    known = all(kind.startswith("sentence_transformers.") for kind in kinds)
    if not known or names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path}: the modules {', '.join(kinds)} are not supported: only Transformer, Pooling and Normalize in "
            f"this order are; {_ENCODER_ALONE}"
        )
    if paths[0] or not all(path in field_validation.FILE_NAME for path in paths[1:]):
        folders = ", ".join(map(short_repr, paths))
        raise UserError(
            f"{path}: the folders {folders} are not supported: the Transformer must be in the "
            f"directory of {MODULES}, and the others below it; save the model again with a newer sentence-transformers"
        )
    return dict(zip(names, paths, strict=True))


def _modes(path: StoredPath, pooling: Mapping[str, Any]) -> tuple[str, ...]:
    modes = pooling.get("pooling_mode")
    if modes is None:
        flags = {mode: pooling[name] for name, mode in LEGACY_POOLINGS.items() if name in pooling}
        modes = [mode for mode, enabled in flags.items() if enabled] if flags else "mean"
    modes = modes if isinstance(modes, list) else [modes]
    if not modes or not all(mode in POOLINGS for mode in modes):
        raise UserError(f"{path}: pooling mode {modes} is not supported: use one or several of {', '.join(POOLINGS)}")
    return tuple(modes)


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
