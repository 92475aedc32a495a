"""Inputs and outputs of the parity report's forward passes, and which heads a `HuggingFaceModel` has.

Shapes in names: B rows, S positions, H hidden, V vocabulary, C classes.
"""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError

ENCODER_PREFIXES = {name: f"{name}." for name in ("bert", "roberta", "albert", "distilbert", "electra")}
ENCODER_PREFIXES |= {"modernbert": "model."}
"""By model_type: prefix of the encoder's tensor names in a model with heads."""
MODEL_TYPE_ALIASES = {"xlm-roberta": "roberta", "camembert": "roberta"}
"""Model types with the config fields, tensors and computation of another type."""
CAUSAL_CLASSES = {"bert": "LMHeadModel", "roberta": "ForCausalLM"}
"""By model_type: suffix of transformers' class that is causal if `is_decoder` is set. In the other families the field
has no effect, or occurs in no supported model."""


class ForwardInputs(NamedTuple):
    """A padded batch, int32. Every row has a real token at position 0."""

    input_ids_BS: np.ndarray
    token_type_ids_BS: np.ndarray
    """0 everywhere for models without token types."""
    attention_mask_BS: np.ndarray
    """1 for real tokens, 0 for padding."""


class TaskKind(enum.Enum):
    """Kind of the "task" logits; the value is the suffix of transformers' class name."""

    SEQUENCE = "ForSequenceClassification"
    """[B, C]."""
    TOKENS = "ForTokenClassification"
    """[B, S, C]."""
    SPAN = "ForQuestionAnswering"
    """[B, S, 2]: start and end of the answer."""
    REPLACED = "ForPreTraining"
    """[B, S]: above 0, the token was replaced (ELECTRA's discriminator)."""


@dataclass(frozen=True)
class ForwardOutputs:
    """Outputs of a forward pass, float32."""

    hidden_states: list[np.ndarray]
    """[B, S, H] each: the input of the first layer, then the output of every layer, the last after the final norm."""
    logits: dict[str, np.ndarray]
    """"mlm" [B, S, V], "pair" [B, 2], "task" with the shape of `task`: the heads that the model has."""
    task: TaskKind | None = None
    pooled_BH: np.ndarray | None = None
    """None if the model has no pooler, or the library does not return its output."""
    unused_tensors: tuple[str, ...] = ()
    """Tensors that the forward pass did not use, without those that `may_be_unused`."""


class HeadsPresent(NamedTuple):
    """Which heads a model has, by its tensors."""

    mlm: bool
    pair: bool
    task: TaskKind | None


class MlmHead(NamedTuple):
    """Names of the parts of a masked-LM head, without ".weight" and ".bias"."""

    dense: str
    norm: str
    decoder: str


MLM_HEADS = {
    "bert": MlmHead(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"
    ),
    "roberta": MlmHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    "albert": MlmHead("predictions.dense", "predictions.LayerNorm", "predictions.decoder"),
    "distilbert": MlmHead("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    "electra": MlmHead("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    "modernbert": MlmHead("head.dense", "head.norm", "decoder"),
}
"""By family; ModernBERT's classifiers have the same dense layer and norm."""
_PAIR = {"bert": "cls.seq_relationship.weight", "albert": "sop_classifier.classifier.weight"}
_TASK = {
    "qa_outputs.weight": TaskKind.SPAN,
    "discriminator_predictions.dense.weight": TaskKind.REPLACED,
    "classifier.out_proj.weight": TaskKind.SEQUENCE,
    "pre_classifier.weight": TaskKind.SEQUENCE,
}
_BY_ARCHITECTURE = (TaskKind.SEQUENCE, TaskKind.TOKENS, TaskKind.SPAN)


def family_of(hf_model: HuggingFaceModel) -> str:
    """The model's model_type, or the one that it is an alias of.

    Raises:
      UserError: the family is not supported, or has no causal model although is_decoder is set.
    """
    name = hf_model.config.get("model_type")
    family = MODEL_TYPE_ALIASES.get(name, name)
    if family not in ENCODER_PREFIXES:
        supported = ", ".join((*ENCODER_PREFIXES, *MODEL_TYPE_ALIASES))
        raise UserError(f"{hf_model.source}: model_type '{name}' is not one of {supported}")
    if is_causal(hf_model) and family not in CAUSAL_CLASSES:
        raise UserError(f"{hf_model.source}: is_decoder is set: only {' and '.join(CAUSAL_CLASSES)} are causal")
    kind = hf_model.config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UserError(f"{hf_model.source}: position_embedding_type '{kind}' is not supported: only 'absolute' is")
    return family


def is_causal(hf_model: HuggingFaceModel) -> bool:
    """Whether a token attends only to itself and to earlier tokens."""
    return bool(hf_model.config.get("is_decoder"))


def config_value(hf_model: HuggingFaceModel, *names: str) -> Any:
    """The value of the first of these names that the config has.

    Raises:
      UserError: the config has none of them.
    """
    for name in names:
        if name in hf_model.config:
            return hf_model.config[name]
    raise UserError(f"{hf_model.source}: the config has no '{names[0]}'")


def prefix_of(hf_model: HuggingFaceModel) -> str:
    """Prefix of the encoder's tensor names: the family's, or "" in a model without heads.

    Raises:
      UserError: the model has no table of word embeddings under either name.
    """
    family = family_of(hf_model)
    word = "embeddings.tok_embeddings.weight" if family == "modernbert" else "embeddings.word_embeddings.weight"
    names = set(hf_model.tensors)
    for prefix in (ENCODER_PREFIXES[family], ""):
        if prefix + word in names:
            return prefix
    raise UserError(f"{hf_model.source}: tensor '{ENCODER_PREFIXES[family]}{word}' is missing")


def heads_of(hf_model: HuggingFaceModel) -> HeadsPresent:
    """The heads of a model by its tensor names; `architectures` decides only where the names are ambiguous.

    Raises:
      UserError: the kind of a `classifier` is ambiguous.
    """
    family, names = family_of(hf_model), set(hf_model.tensors)
    task = next((task for name, task in _TASK.items() if name in names), None)
    if task is None and "classifier.weight" in names:
        task = _classifier_kind(hf_model, family, names)
    mlm = f"{MLM_HEADS[family].dense}.weight" in names
    mlm = mlm and not (family == "modernbert" and "classifier.weight" in names)
    return HeadsPresent(mlm, _PAIR.get(family) in names, task)


def _classifier_kind(hf_model: HuggingFaceModel, family: str, names: set[str]) -> TaskKind:
    """Kind of a plain `classifier`: in BERT and ALBERT of the pooled vector or of tokens, in ModernBERT any kind."""
    architecture = next(iter(hf_model.config.get("architectures") or ()), "")
    for task in _BY_ARCHITECTURE:
        if architecture.endswith(task.value):
            return task
    if architecture.endswith("ForMultipleChoice") or family == "modernbert":
        raise UserError(f"{hf_model.source}: '{architecture}' in architectures does not say what its classifier reads")
    pooler = prefix_of(hf_model) + ("pooler.weight" if family == "albert" else "pooler.dense.weight")
    return TaskKind.SEQUENCE if pooler in names else TaskKind.TOKENS


def may_be_unused(name: str) -> bool:
    """Whether a tensor may be unused: a buffer of positions or types, or a pooler that no head reads."""
    buffers = ("position_ids", "token_type_ids", "inv_freq")
    return name.endswith(buffers) or "pooler." in name
