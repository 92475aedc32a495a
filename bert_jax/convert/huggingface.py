"""BERT in Hugging Face form: one table of names, a directory out, a directory in.

A directory holds ``config.json``, ``model.safetensors``, ``vocab.txt``, ``tokenizer.json`` and
``tokenizer_config.json``; it is a BertForPreTraining if the model has a pair head, else a BertForMaskedLM.
"""

import enum
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.storage import StoredPath, copy_tree, is_remote
from bert_jax.tokenizer import Tokenizer

Params = dict[str, Any]
ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Kind(enum.Enum):
    """How one tensor of ours becomes one of theirs."""

    TABLE = "as it is"
    VECTOR = "flattened"
    KERNEL = "ours is [inputs..., outputs...], theirs [outputs, inputs]"


class Entry(NamedTuple):
    """One tensor of theirs, and where it lies in ours."""

    theirs: str
    ours: str
    kind: Kind
    layer: int | None = None
    part: int | None = None
    """0, 1, 2 for query, key, value, which we keep in one array."""


_OUTSIDE = (
    ("bert.embeddings.word_embeddings.weight", "encoder/embeddings/word", Kind.TABLE),
    ("bert.embeddings.position_embeddings.weight", "encoder/embeddings/position", Kind.TABLE),
    ("bert.embeddings.token_type_embeddings.weight", "encoder/embeddings/token_type", Kind.TABLE),
    ("bert.embeddings.LayerNorm", "encoder/embeddings/norm", None),
    ("cls.predictions.transform.dense", "mlm/transform", Kind.KERNEL),
    ("cls.predictions.transform.LayerNorm", "mlm/norm", None),
    ("cls.predictions.bias", "mlm/bias", Kind.VECTOR),
)
_PAIR = (
    ("bert.pooler.dense", "encoder/pooler", Kind.KERNEL),
    ("cls.seq_relationship", "pair/dense", Kind.KERNEL),
)
_LAYER = (
    ("attention.output.dense", "projection", Kind.KERNEL),
    ("attention.output.LayerNorm", "attention_norm", None),
    ("intermediate.dense", "rise", Kind.KERNEL),
    ("output.dense", "fall", Kind.KERNEL),
    ("output.LayerNorm", "feed_forward_norm", None),
)


def entries(num_layers: int, *, pair: bool) -> Iterator[Entry]:
    """Every tensor of a BERT with heads (names: transformers modeling_bert.py)."""
    for theirs, ours, kind in _OUTSIDE + (_PAIR if pair else ()):
        if kind in (Kind.TABLE, Kind.VECTOR):
            yield Entry(theirs, ours, kind)
        else:
            yield from _weight_and_bias(theirs, ours, kind)
    for layer in range(num_layers):
        prefix = f"bert.encoder.layer.{layer}."
        for part, name in enumerate(("query", "key", "value")):
            own = f"{prefix}attention.self.{name}"
            yield from _weight_and_bias(own, "encoder/layers/qkv", Kind.KERNEL, layer, part)
        for theirs, ours, kind in _LAYER:
            yield from _weight_and_bias(prefix + theirs, f"encoder/layers/{ours}", kind, layer)


def _weight_and_bias(
    theirs: str, ours: str, kind: Kind | None, layer: int | None = None, part: int | None = None
) -> Iterator[Entry]:
    """A dense layer, or (kind None) a LayerNorm."""
    weight = "kernel" if kind is Kind.KERNEL else "scale"
    yield Entry(f"{theirs}.weight", f"{ours}/{weight}", kind or Kind.VECTOR, layer, part)
    yield Entry(f"{theirs}.bias", f"{ours}/bias", Kind.VECTOR, layer, part)


def _view(params: Params, entry: Entry) -> np.ndarray:
    """The logical tensor of an entry, as a view that can be read and written."""
    node: Any = params
    for name in entry.ours.split("/"):
        node = node[name]
    if entry.layer is not None:
        node = node[entry.layer]
    if entry.part is not None:
        node = node[:, entry.part] if entry.kind is Kind.KERNEL else node[entry.part]
    return node


def to_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Our parameters (numpy, float32) under their names and in their layout."""
    tensors = {}
    for entry in entries(config.num_layers, pair="pair" in params):
        array = _view(params, entry)
        if entry.kind is Kind.VECTOR:
            array = array.reshape(-1)
        if entry.kind is Kind.KERNEL:
            inputs = _inputs(entry, config)
            array = array.reshape(inputs, -1).T
        tensors[entry.theirs] = np.ascontiguousarray(array)
    return tensors


def _inputs(entry: Entry, config: ModelConfig) -> int:
    owner = entry.ours.split("/")[-2]
    widths = {"projection": config.num_heads * config.size_per_head, "fall": config.intermediate_size}
    return widths.get(owner, config.hidden_size)


def from_tensors(config: ModelConfig, read: Callable[[str], np.ndarray], shapes: Params, source: str) -> Params:
    """Our parameters from theirs.

    Args:
      config: of the model.
      read: a tensor by its name there.
      shapes: tree with the shape of every parameter of ours.
      source: what is read, for messages.

    Raises:
      UserError: a tensor is missing, or has another size than the config says.
    """
    params = _zeros(shapes)
    for entry in entries(config.num_layers, pair="pair" in params):
        view = _view(params, entry)
        try:
            theirs = np.asarray(read(entry.theirs), np.float32)
        except (KeyError, safetensors.SafetensorError) as error:
            raise UserError(f"{source}: tensor '{entry.theirs}' is missing or unreadable") from error
        if theirs.size != view.size:
            raise UserError(f"{source}: tensor '{entry.theirs}' has shape {theirs.shape}, the config says {view.shape}")
        view[...] = (theirs.T if entry.kind is Kind.KERNEL else theirs).reshape(view.shape)
    return params


def _zeros(shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return {name: _zeros(child) for name, child in shapes.items()}
    return np.zeros(shapes.shape, np.float32)


def describe(config: ModelConfig, tokenizer: Tokenizer, *, pair: bool) -> dict[str, Any]:
    """Their ``config.json``.

    Raises:
      UserError: the encoder is not a BERT as they know it.
    """
    foreign = {
        "direction": config.direction != "bidirectional",
        "positions": config.positions != "learned",
        "norm_placement": config.norm_placement != "post",
        "attention_window": config.attention_window is not None,
        "parameter_groups": config.parameter_groups is not None,
        "embedding_size": config.embedding_size is not None,
        "feed_forward": config.feed_forward != "plain",
        "biases": config.biases != "all",
        "type_vocab_size": config.type_vocab_size == 0,
        "head_size": config.size_per_head * config.num_heads != config.hidden_size,
    }
    for name, differs in foreign.items():
        if differs:
            raise UserError(f"model.{name} {getattr(config, name)} cannot be written as a Hugging Face BERT")
    return {
        "architectures": ["BertForPreTraining" if pair else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.norm_epsilon,
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
        "bert_jax_version": __version__,
    }


def parse_config(directory: StoredPath) -> ModelConfig:
    """Our model config from their ``config.json``.

    Raises:
      UserError: there is none, or it is not of a BERT.
    """
    path = directory / CONFIG
    try:
        theirs = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is missing or not JSON: {directory} is no Hugging Face model") from error
    if theirs.get("model_type") != "bert":
        raise UserError(f"{path}: model_type '{theirs.get('model_type')}' is not supported: only 'bert' is")
    if theirs.get("is_decoder"):
        raise UserError(f"{path}: is_decoder is set: models that only look back cannot be read yet")
    activations = {name: ours for ours, name in ACTIVATION_NAMES.items()}
    activation = theirs.get("hidden_act", "gelu")
    if activation not in activations:
        raise UserError(f"{path}: hidden_act '{activation}' is not one of {', '.join(activations)}")
    return ModelConfig(
        vocab_size=theirs["vocab_size"],
        hidden_size=theirs["hidden_size"],
        num_layers=theirs["num_hidden_layers"],
        num_heads=theirs["num_attention_heads"],
        intermediate_size=theirs["intermediate_size"],
        max_positions=theirs["max_position_embeddings"],
        type_vocab_size=theirs["type_vocab_size"],
        activation=activations[activation],
        norm_epsilon=theirs.get("layer_norm_eps", 1e-12),
        initializer_range=theirs.get("initializer_range", 0.02),
        hidden_dropout=theirs.get("hidden_dropout_prob", 0.1),
        attention_dropout=theirs.get("attention_probs_dropout_prob", 0.1),
    )


def write(destination: StoredPath, config: ModelConfig, params: Params, tokenizer: Tokenizer, card: str) -> None:
    """A directory that ``transformers`` opens; it appears whole or not at all, or, in a store, with the weights last.

    Args:
      destination: must not exist.
      config: of the model.
      params: numpy arrays, float32.
      tokenizer: WordPiece, as BERT's is.
      card: text of README.md.

    Raises:
      UserError: the destination exists, or the model is no BERT as they know it.
    """
    if destination.exists():
        raise UserError(f"{destination} exists already: choose another destination, or remove it")
    described = describe(config, tokenizer, pair="pair" in params)
    beside = None if is_remote(destination) else destination.parent
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=f".{destination.name}-") as scratch:
        inside = Path(scratch) / "export"
        inside.mkdir()
        (inside / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
        safetensors.numpy.save_file(to_tensors(config, params), inside / WEIGHTS, metadata={"format": "pt"})
        tokenizer.save(inside / "tokenizer.json")
        tokenizer.save_vocab(inside / "vocab.txt")
        settings = {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": tokenizer.lowercase,
            "model_max_length": config.max_positions,
        }
        (inside / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (inside / "README.md").write_text(card)
        if beside is not None:
            inside.rename(destination)
            return
        weights = (inside / WEIGHTS).rename(Path(scratch) / WEIGHTS)
        copy_tree(inside, destination)
        epath.Path(weights).copy(destination / WEIGHTS)


def read(directory: StoredPath, shapes_of: Callable[[ModelConfig, bool], Params]) -> tuple[ModelConfig, Params]:
    """Config and parameters (numpy, float32) of a directory in their form.

    Args:
      directory: with config.json and model.safetensors.
      shapes_of: (config, has a pair head) -> tree of our shapes.

    Raises:
      UserError: files or tensors are missing, damaged, or contradict the config.
    """
    config = parse_config(directory)
    path = directory / WEIGHTS
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            pair = "cls.seq_relationship.weight" in file.keys()  # noqa: SIM118 (not a dict)
            return config, from_tensors(config, file.get_tensor, shapes_of(config, pair), str(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is missing or damaged: {error}") from error
