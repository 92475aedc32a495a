"""The description of a model family, and the parts that most families share.

Tensor names are those of transformers' modeling_*.py, config fields those of its config.json.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bert_jax import field_validation
from bert_jax.config import ModelConfig, TaskHead
from bert_jax.convert.name_map import Entry, Params, dense, norm, same_layout
from bert_jax.convert.tensors import LazyTensor
from bert_jax.errors import require
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves

ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}
_ACTIVATIONS = {name: ours for ours, name in ACTIVATION_NAMES.items()} | {
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "gelu_fast"), "gelu_tanh"),
}
"""By the names of transformers' activations.py; variants that differ only in the computation are the same."""
SPAN_LABELS = ("start", "end")
REGRESSION_LABELS = ("score",)
MULTILABEL = "multi_label_classification"
CLASS_SUFFIXES = {
    "classification": "ForSequenceClassification",
    "multilabel": "ForSequenceClassification",
    "multiple_choice": "ForMultipleChoice",
    "tagging": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "replaced": "ForPreTraining",
    "pair": "ForPreTraining",
    "mlm": "ForMaskedLM",
    "causal": "ForMaskedLM",
    "base": "Model",
}
"""By head: suffix of the class in families with the usual class names."""


@dataclass(frozen=True)
class Family:
    """How models of one `model_type` map to and from bert_jax."""

    model_type: str
    base: str
    """Prefix of the encoder's tensor names in models with heads; models without heads lack it."""
    names: tuple[Entry, ...]
    """The parameter of every tensor outside of task heads; those that a model lacks are ignored. "{n}" in a name is
    the number of a layer or parameter group."""
    tasks: Mapping[str, tuple[Entry, ...]]
    """By kind of task head: the parameter of every tensor in it."""
    decoder: str
    """Name of the layer that is tied to the word embeddings."""
    read_config: Callable[["HuggingFaceConfig"], ModelConfig]
    write_config: Callable[[ModelConfig, Heads], dict[str, Any]]
    """The family's config.json fields."""
    read_task: Callable[["HuggingFaceConfig", Mapping[str, LazyTensor], bool], TaskHead | None]
    """The task head, from config, tensors and whether there is a pooler."""
    class_prefix: str
    """Of the classes in transformers."""
    class_suffixes: Mapping[str, str] = field(default_factory=dict)
    """By head: suffixes that differ from CLASS_SUFFIXES; "pair alone" is a pair head without an MLM head."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "gelu"})
    """Defaults of transformers' configuration_*.py for fields that the readers require."""
    mlm_activation: Callable[["HuggingFaceConfig"], str | None] = lambda settings: None
    """Activation of the MLM head; None: that of the layers."""
    buffers: tuple[str, ...] = ("embeddings.position_ids", "embeddings.token_type_ids")
    """Patterns of names, after `base`, that are not parameters."""
    sequence_head: Mapping[str, Any] = field(default_factory=lambda: {"reads": "pooled"})
    """What a new head that classifies sequences reads, and its layers."""
    choice_head: Mapping[str, Any] | None = None
    """The same of one that scores the endings of a multiple choice; None: as `sequence_head`."""
    token_head: Mapping[str, Any] = field(default_factory=dict)
    """Layers of a new head that labels tokens or finds spans."""
    pair_separators: int = 1
    """[SEP] between the texts of a pair."""
    unused_params: dict[str, float] = field(default_factory=dict)
    """By path, values for parameters that no layer reads and transformers does not have."""

    def entries(self, params: Params, heads: Heads) -> Iterator[Entry]:
        """The parameter of every tensor of a model.

        Args:
          params: the parameters, or a tree with the shape of each.
          heads: of the model.
        """
        leaves = name_leaves(params)
        names = (*self.names, *(self.tasks.get(heads.task.kind, ()) if heads.task else ()))
        present = [entry for entry in names if entry.param_path in leaves]
        for in_layers, group in itertools.groupby(present, lambda entry: "{n}" in entry.hf_name):
            if not in_layers:
                yield from group
                continue
            templates = list(group)
            for n in range(leaves[templates[0].param_path].shape[0]):
                for entry in templates:
                    if n >= entry.first:
                        yield entry._replace(hf_name=entry.hf_name.replace("{n}", str(n)), layer=n)

    def tensor_name(self, param_path: str) -> str:
        """The tensor of a parameter that belongs to no layer."""
        return next(entry.hf_name for entry in self.names if entry.param_path == param_path)

    @property
    def copies(self) -> dict[str, str]:
        """Tied copies that some files contain: name of the copy -> name of the original."""
        word, bias = self.tensor_name("encoder/embeddings/word"), self.tensor_name("mlm/bias")
        copies = {f"{self.decoder}.weight": word, f"{self.decoder}.bias": bias}
        return {copy: original for copy, original in copies.items() if copy != original}

    @functools.cached_property
    def known_names(self) -> re.Pattern:
        """Matches the names of all tensors that a class of the family may have."""
        entries = itertools.chain(self.names, *self.tasks.values())
        names = {entry.hf_name for entry in entries} | {f"{self.decoder}.weight", f"{self.decoder}.bias"}
        patterns = [re.escape(name).replace(r"\{n\}", r"\d+") for name in sorted(names)]
        patterns += [rf"{self.base}\.{pattern}" for pattern in self.buffers]
        return re.compile("|".join(patterns))

    def read_heads(self, settings: "HuggingFaceConfig", tensors: Mapping[str, LazyTensor]) -> Heads:
        """The heads that a model has tensors of."""
        present = {entry.param_path for entry in self.names if entry.hf_name in tensors}
        pooler = "encoder/pooler/kernel" in present
        return Heads(
            mlm="mlm/bias" in present,
            mlm_activation=self.mlm_activation(settings),
            pair="pair/dense/kernel" in present,
            pooler=pooler,
            task=self.read_task(settings, tensors, pooler),
        )

    def new_task_head(self, kind: str, labels: tuple[str, ...]) -> TaskHead:
        """The head that transformers adds to an encoder of this family."""
        if kind == "multiple_choice":
            return TaskHead(kind, labels, **(self.choice_head or self.sequence_head))
        if kind in ("classification", "multilabel"):
            return TaskHead(kind, labels, **self.sequence_head)
        return TaskHead(kind, SPAN_LABELS if kind == "span" else labels, "tokens", **self.token_head)

    def architecture(self, config: ModelConfig, heads: Heads) -> str:
        """Name of the class with these heads."""
        mlm = "causal" if config.direction == "causal" else "mlm"
        head = heads.task.kind if heads.task else "pair" if heads.pair else mlm if heads.mlm else "base"
        suffixes = CLASS_SUFFIXES | self.class_suffixes
        if heads.pair and not heads.mlm and "pair alone" in suffixes:
            head = "pair alone"
        return self.class_prefix + suffixes[head]


class HuggingFaceConfig:
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
          UserError: the field is missing.
        """
        require(self.get(name) is not None, f"{self.source}: its config lacks '{name}', which is required")
        return self.values[name]

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
        hf_activation, known = self.get(name, default), ", ".join(_ACTIVATIONS)
        require(hf_activation in _ACTIVATIONS, f"{self.source}: {name} '{hf_activation}' is not one of {known}")
        return _ACTIVATIONS[hf_activation]

    def require_value(self, name: str, supported: Any, why: str) -> None:
        """Raise UserError if a field has another value than the supported one, which is also its default."""
        value = self.get(name, supported)
        require(value == supported, f"{self.source}: {name} is {value!r}: {why}")

    def find_task_head(
        self, tensors: Mapping[str, LazyTensor], output: str, kind: str, reads: str, **parts: Any
    ) -> TaskHead | None:
        """The head that ends in the dense layer `output`, or None if there is no such layer.

        Its labels are those of id2label if it has as many, else `default_labels`. A head of sequences is one of a
        multiple choice if the class says so, and one of several labels if `problem_type` does.

        Raises:
          UserError: the layer's weight is empty, or does not have two axes; a multiple choice has several outputs.
        """
        name = f"{output}.weight"
        if name not in tensors:
            return None
        shape = tensors[name].shape
        fits = len(shape) == 2 and 0 not in shape
        require(fits, f"{self.source}: tensor '{name}' has shape {list(shape)}: it must be [labels, inputs]")
        label_names = self.get("id2label", {})
        labels = default_labels(shape[0])
        if len(label_names) == len(labels):
            labels = tuple(str(label_names[i]) for i in sorted(label_names, key=int))
        if kind == "classification" and self.is_multiple_choice:
            require(shape[0] == 1, f"{self.source}: tensor '{name}' has {shape[0]} rows, a multiple choice has one")
            kind, labels = "multiple_choice", REGRESSION_LABELS
        elif kind == "classification" and shape[0] > 1 and self.get("problem_type") == MULTILABEL:
            kind = "multilabel"
        return TaskHead(kind, SPAN_LABELS if kind == "span" else labels, reads, **parts)

    @property
    def architecture(self) -> str:
        """The class that was saved, "" if unknown."""
        return (self.get("architectures") or [""])[0]

    @property
    def is_multiple_choice(self) -> bool:
        """Whether the class that was saved scores the endings of a multiple choice."""
        return self.architecture.endswith(CLASS_SUFFIXES["multiple_choice"])


def default_labels(count: int) -> tuple[str, ...]:
    """Names of outputs that a source does not name: those of transformers, but a single one is a regression."""
    return REGRESSION_LABELS if count == 1 else tuple(f"LABEL_{i}" for i in range(count))


class Field(NamedTuple):
    """One field of config.json that has the value of one field of `ModelConfig`."""

    hf_name: str
    name: str
    default: Any = None
    """Of transformers; None: the field is a size and required."""


SHARED_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_heads"),
    Field("intermediate_size", "intermediate_size"),
    Field("hidden_act", "activation", "gelu"),
    Field("hidden_dropout_prob", "hidden_dropout", 0.1),
    Field("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Field("max_position_embeddings", "max_positions"),
    Field("type_vocab_size", "type_vocab_size", 2),
    Field("initializer_range", "initializer_range", 0.02),
    Field("layer_norm_eps", "norm_epsilon", 1e-12),
)
"""The fields of nearly all families, in the order in which they are written."""
TIED = {"tie_word_embeddings": True}


def read_fields(
    settings: "HuggingFaceConfig", fields: tuple[Field, ...] = SHARED_FIELDS, **changes: Any
) -> ModelConfig:
    """A `ModelConfig` from config.json; `changes` are values that no field has as it is."""
    settings.require_value("position_embedding_type", "absolute", "only absolute positions can be read")
    values: dict[str, Any] = {"direction": "causal" if settings.get("is_decoder", False) else "bidirectional"}
    for hf_name, name, default in fields:
        if name == "activation":
            values[name] = settings.activation(hf_name, default)
        else:
            values[name] = settings.required_size(hf_name) if default is None else settings.get(hf_name, default)
    return settings.model(**values | changes)


def write_fields(
    config: ModelConfig,
    heads: Heads,
    fields: tuple[Field, ...] = SHARED_FIELDS,
    fixed: Mapping[str, Any] = TIED,
) -> dict[str, Any]:
    """The fields of config.json that `read_fields` reads, those with a `fixed` value, and those of labels."""
    values = dataclasses.asdict(config) | {"activation": ACTIVATION_NAMES[config.activation]}
    return {hf_name: values[name] for hf_name, name, _ in fields} | dict(fixed) | describe_labels(heads)


def decoder_flag(config: ModelConfig) -> dict[str, bool]:
    """The field of families that have causal models."""
    return {"is_decoder": True} if config.direction == "causal" else {}


def describe_labels(heads: Heads) -> dict[str, Any]:
    """id2label and label2id of a head with named labels; a regression and several labels are named as such.

    Without `problem_type`, `transformers.pipeline` applies a sigmoid to a single output and a softmax to others.
    """
    if heads.task is None or heads.task.kind not in ("classification", "multilabel", "tagging"):
        return {}
    label_names = dict(enumerate(heads.task.labels))
    problem = "regression" if heads.task.labels == REGRESSION_LABELS else None
    problem = MULTILABEL if heads.task.kind == "multilabel" else problem
    return ({"problem_type": problem} if problem else {}) | {
        "id2label": {str(i): name for i, name in label_names.items()},
        "label2id": {n: i for i, n in label_names.items()},
    }


def embeddings(base: str) -> tuple[Entry, ...]:
    """The embedding tables that most families have, and their LayerNorm."""
    return (
        *same_layout(f"{base}.embeddings.word_embeddings.weight", "encoder/embeddings/word"),
        *same_layout(f"{base}.embeddings.position_embeddings.weight", "encoder/embeddings/position"),
        *same_layout(f"{base}.embeddings.token_type_embeddings.weight", "encoder/embeddings/token_type"),
        *norm(f"{base}.embeddings.LayerNorm", "encoder/embeddings/norm"),
    )


def post_norm_layers(
    prefix: str,
    *,
    qkv: tuple[str, str, str],
    attention_out: str,
    attention_norm: str,
    up: str,
    down: str,
    feed_forward_norm: str,
) -> tuple[Entry, ...]:
    """The layers of a post-norm encoder, by the names of their parts; `prefix` contains "{n}"."""
    ours = "encoder/layers"
    return (
        *(entry for part, name in enumerate(qkv) for entry in dense(f"{prefix}.{name}", f"{ours}/qkv", part)),
        *dense(f"{prefix}.{attention_out}", f"{ours}/attention_out", merging=True),
        *norm(f"{prefix}.{attention_norm}", f"{ours}/attention_norm"),
        *dense(f"{prefix}.{up}", f"{ours}/up"),
        *dense(f"{prefix}.{down}", f"{ours}/down"),
        *norm(f"{prefix}.{feed_forward_norm}", f"{ours}/feed_forward_norm"),
    )


def bert_layers(base: str) -> tuple[Entry, ...]:
    """Layers with the names of BERT, RoBERTa and ELECTRA."""
    return post_norm_layers(
        f"{base}.encoder.layer.{{n}}",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        attention_out="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        feed_forward_norm="output.LayerNorm",
    )


def mlm_head(transform: str, layer_norm: str, bias: str) -> tuple[Entry, ...]:
    """The MLM head, by the names of its parts."""
    return *dense(transform, "mlm/transform"), *norm(layer_norm, "mlm/norm"), *same_layout(bias, "mlm/bias")
