"""The description of a model family, and the parts that most families share.

Tensor names are those of transformers' modeling_*.py, config fields those of its config.json.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bert_jax import field_validation
from bert_jax.config import ModelConfig
from bert_jax.convert.name_map import Entry, dense, norm, same_layout
from bert_jax.convert.tensors import to_lazy
from bert_jax.errors import UserError
from bert_jax.model.heads import Heads, TaskHead

ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
_ACTIVATIONS = {name: ours for ours, name in ACTIVATION_NAMES.items()} | {
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast"), "gelu_tanh"),
}
"""By the names of transformers' activations.py; variants that differ only in the computation are the same."""
SPAN_LABELS = ("start", "end")


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` map to and from bert_jax."""

    model_type: str
    base: str
    """Prefix of the encoder's tensor names in models with heads; models without heads lack it."""
    entries: Callable[[ModelConfig, Heads], Iterator[Entry]]
    """The parameter of every tensor."""
    read_config: Callable[["Settings"], ModelConfig]
    write_config: Callable[[ModelConfig, Heads], dict[str, Any]]
    """The family's config.json fields."""
    read_heads: Callable[["Settings", "TensorNames"], Heads]
    architecture: Callable[[ModelConfig, Heads], str]
    """Name of the class with these heads."""
    copies: dict[str, str] = field(default_factory=dict)
    """Tied copies that some files contain: name of the copy -> name of the original."""
    buffers: tuple[str, ...] = ()
    """Patterns of names that are not parameters."""
    unused_params: dict[str, float] = field(default_factory=dict)
    """By path, values for parameters that no layer reads and transformers does not have."""


class Settings:
    """The fields of a config.json."""

    def __init__(self, values: dict[str, Any], source: str):
        """`source` names the config in error messages."""
        self.values, self.source = values, source

    def get(self, name: str, default: Any = None) -> Any:
        """A value, or the default of transformers if the field is missing."""
        value = self.values.get(name)
        return default if value is None else value

    def required_size(self, name: str) -> int:
        """A size without a default.

        Raises:
          UserError: the field is missing, or not a positive integer.
        """
        value = self.values.get(name)
        if value is None:
            raise UserError(f"{self.source}: config.json lacks '{name}', which is required")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{self.source}: {name} is {value!r} in config.json: it must be a whole number above 0")
        return value

    def model(self, **values: Any) -> ModelConfig:
        """A `ModelConfig` with these values.

        Raises:
          UserError: a value has the wrong type, or values contradict each other.
        """
        return field_validation.from_json(ModelConfig, values, self.source)

    def activation(self, name: str, default: str = "gelu") -> str:
        """An activation, by its name in bert_jax.

        Raises:
          UserError: bert_jax does not have it.
        """
        hf_activation = self.get(name, default)
        if hf_activation not in _ACTIVATIONS:
            raise UserError(f"{self.source}: {name} '{hf_activation}' is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[hf_activation]

    def require_value(self, name: str, supported: Any, why: str) -> None:
        """Raise UserError if a field has another value than the supported one, which is also its default."""
        if self.get(name, supported) != supported:
            raise UserError(f"{self.source}: {name} is {self.get(name)!r}: {why}")

    def labels(self, count: int) -> tuple[str, ...]:
        """Label names: those of id2label if it has `count` entries, else transformers' default names."""
        label_names = self.get("id2label", {})
        if len(label_names) == count:
            return tuple(str(label_names[i]) for i in sorted(label_names, key=int))
        return tuple(f"LABEL_{i}" for i in range(count))

    @property
    def architecture(self) -> str:
        """The class that was saved, "" if unknown."""
        return (self.get("architectures") or [""])[0]


class TensorNames:
    """The names of a model's tensors."""

    def __init__(self, tensors: Mapping[str, np.ndarray], settings: Settings):
        """The encoder's names have the family's prefix."""
        self._tensors, self._settings = to_lazy(tensors), settings

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._tensors

    def task(self, output: str, kind: str, reads: str, **parts: Any) -> TaskHead | None:
        """The head that ends in the dense layer `output`, or None if there is no such layer.

        Raises:
          UserError: the layer's weight is empty, or does not have two axes.
        """
        weight = self._tensors.get(f"{output}.weight")
        if weight is None:
            return None
        if len(weight.shape) != 2 or 0 in weight.shape:
            shape = f"has shape {list(weight.shape)}: it must be [labels, inputs]"
            raise UserError(f"{self._settings.source}: tensor '{output}.weight' {shape}")
        labels = SPAN_LABELS if kind == "span" else self._settings.labels(weight.shape[0])
        return TaskHead(kind, labels, reads, **parts)


def task_of_pooled(settings: Settings, names: TensorNames, pooler: bool) -> TaskHead | None:
    """The task head in families whose sequence classifiers read the pooler.

    A `classifier` labels tokens if the class says so or, if the class is unknown, if there is no pooler.
    """
    span = names.task("qa_outputs", "span", "tokens")
    if span is not None:
        return span
    by_token = settings.architecture.endswith("ForTokenClassification")
    if by_token or not (pooler or settings.architecture.endswith("ForSequenceClassification")):
        return names.task("classifier", "tagging", "tokens")
    return names.task("classifier", "classification", "pooled")


def architecture_of(prefix: str, heads: Heads, **others: str) -> str:
    """Name of the class with these heads, in a family with the usual class names.

    Args:
      prefix: of the family's classes.
      heads: of the model.
      others: suffixes that differ, by head ("pair", "mlm", "base", "replaced").
    """
    suffixes = {
        "classification": "ForSequenceClassification",
        "tagging": "ForTokenClassification",
        "span": "ForQuestionAnswering",
        "replaced": "ForPreTraining",
        "pair": "ForPreTraining",
        "mlm": "ForMaskedLM",
        "base": "Model",
    } | others
    head = heads.task.kind if heads.task else "pair" if heads.pair else "mlm" if heads.mlm else "base"
    return prefix + suffixes[head]


def shared_settings(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    """Config fields that nearly all families share."""
    hf_config = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "max_position_embeddings": config.position_offset + config.max_positions,
        "type_vocab_size": config.type_vocab_size,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": True,
    }
    return hf_config | describe_labels(heads)


def describe_labels(heads: Heads) -> dict[str, Any]:
    """id2label and label2id of a head with named labels."""
    if heads.task is None or heads.task.kind not in ("classification", "tagging"):
        return {}
    label_names = dict(enumerate(heads.task.labels))
    return {
        "id2label": {str(i): name for i, name in label_names.items()},
        "label2id": {n: i for i, n in label_names.items()},
    }


def read_shared(settings: Settings, **changes: Any) -> ModelConfig:
    """A `ModelConfig` from the fields that nearly all families share; `changes` are the family's own."""
    settings.require_value("position_embedding_type", "absolute", "only absolute positions can be read")
    values = {
        "vocab_size": settings.required_size("vocab_size"),
        "hidden_size": settings.required_size("hidden_size"),
        "num_layers": settings.required_size("num_hidden_layers"),
        "num_heads": settings.required_size("num_attention_heads"),
        "intermediate_size": settings.required_size("intermediate_size"),
        "max_positions": settings.required_size("max_position_embeddings"),
        "type_vocab_size": settings.get("type_vocab_size", 2),
        "activation": settings.activation("hidden_act"),
        "norm_epsilon": settings.get("layer_norm_eps", 1e-12),
        "initializer_range": settings.get("initializer_range", 0.02),
        "hidden_dropout": settings.get("hidden_dropout_prob", 0.1),
        "attention_dropout": settings.get("attention_probs_dropout_prob", 0.1),
        "direction": "causal" if settings.get("is_decoder", False) else "bidirectional",
    }
    return settings.model(**values | changes)


def embeddings(base: str, config: ModelConfig) -> Iterator[Entry]:
    """The embedding tables that most families have, and their LayerNorm."""
    yield from same_layout(f"{base}.embeddings.word_embeddings.weight", "encoder/embeddings/word")
    yield from same_layout(f"{base}.embeddings.position_embeddings.weight", "encoder/embeddings/position")
    if config.type_vocab_size:
        yield from same_layout(f"{base}.embeddings.token_type_embeddings.weight", "encoder/embeddings/token_type")
    yield from norm(f"{base}.embeddings.LayerNorm", "encoder/embeddings/norm")


def bert_layers(base: str, config: ModelConfig) -> Iterator[Entry]:
    """Layers with the names of BERT, RoBERTa and ELECTRA."""
    for layer in range(config.num_layers):
        inside = f"{base}.encoder.layer.{layer}"
        for part, name in enumerate(("query", "key", "value")):
            yield from dense(f"{inside}.attention.self.{name}", "encoder/layers/qkv", layer, part)
        yield from dense(f"{inside}.attention.output.dense", "encoder/layers/attention_out", layer, merging=True)
        yield from norm(f"{inside}.attention.output.LayerNorm", "encoder/layers/attention_norm", layer)
        yield from dense(f"{inside}.intermediate.dense", "encoder/layers/up", layer)
        yield from dense(f"{inside}.output.dense", "encoder/layers/down", layer)
        yield from norm(f"{inside}.output.LayerNorm", "encoder/layers/feed_forward_norm", layer)
