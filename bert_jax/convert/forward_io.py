"""What goes into a forward pass of the parity report and what comes out, whoever runs it; which heads a form has.

Shapes in names: B rows, S positions, H hidden, V vocabulary, C classes.
"""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError

PREFIXES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "albert": "albert.",
    "distilbert": "distilbert.",
    "electra": "electra.",
    "modernbert": "model.",
}
"""By model_type: what stands before the names of the encoder in a model with heads."""


MODEL_TYPE_ALIASES = {"xlm-roberta": "roberta", "camembert": "roberta"}
"""Model types whose models are another's under a name of their own: the same settings, tensors and computation."""
DECODERS = {"bert": "LMHeadModel", "roberta": "ForCausalLM"}
"""By model_type: the end of transformers' class that is one if `is_decoder` is set. In other families the setting does
nothing there, or is in no model that we can read."""


class ForwardInputs(NamedTuple):
    """A batch, padded; int32 each. Every row has a real token at position 0."""

    input_ids_BS: np.ndarray
    token_type_ids_BS: np.ndarray
    """0 everywhere for models without types."""
    attention_mask_BS: np.ndarray
    """1 for real tokens, 0 for padding."""


class Task(enum.Enum):
    """What the "task" logits of a model are; the value is the end of transformers' class name."""

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
    """What a forward pass gave, float32."""

    hidden_states: list[np.ndarray]
    """[B, S, H] each: what enters the first layer, then what leaves every layer, the last after the final norm."""
    logits: dict[str, np.ndarray]
    """"mlm" [B, S, V], "pair" [B, 2], "task" as `task` says: the heads that the model has."""
    task: Task | None = None
    pooled_BH: np.ndarray | None = None
    """None where there is no pooler, or where the library does not hand it out."""
    unused_tensors: tuple[str, ...] = ()
    """Tensors of the form that had no part in this, though they are neither buffers nor a pooler nobody asks for."""


class Heads(NamedTuple):
    """Which heads the tensors of a form make up."""

    mlm: bool
    pair: bool
    task: Task | None


_MLM = {
    "bert": "cls.predictions.transform.dense.weight",
    "roberta": "lm_head.dense.weight",
    "albert": "predictions.dense.weight",
    "distilbert": "vocab_transform.weight",
    "electra": "generator_predictions.dense.weight",
}
_PAIR = {"bert": "cls.seq_relationship.weight", "albert": "sop_classifier.classifier.weight"}
_TASK = {
    "qa_outputs.weight": Task.SPAN,
    "discriminator_predictions.dense.weight": Task.REPLACED,
    "classifier.out_proj.weight": Task.SEQUENCE,
    "pre_classifier.weight": Task.SEQUENCE,
}
_BY_ARCHITECTURE = (Task.SEQUENCE, Task.TOKENS, Task.SPAN)


def family_of(hf_model: HuggingFaceModel) -> str:
    """The form's model_type, or the one whose models are like it.

    Raises:
      UserError: no reference forward pass knows this family, or it is none that can be a decoder, but says so.
    """
    name = hf_model.config.get("model_type")
    family = MODEL_TYPE_ALIASES.get(name, name)
    if family not in PREFIXES:
        raise UserError(
            f"{hf_model.source}: model_type '{name}' is not one of {', '.join((*PREFIXES, *MODEL_TYPE_ALIASES))}"
        )
    if is_causal(hf_model) and family not in DECODERS:
        raise UserError(f"{hf_model.source}: is_decoder is set: only a {' or a '.join(DECODERS)} can look back alone")
    kind = hf_model.config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise UserError(f"{hf_model.source}: position_embedding_type '{kind}' is not supported: only 'absolute' is")
    return family


def is_causal(hf_model: HuggingFaceModel) -> bool:
    """Whether a token sees only itself and those before it."""
    return bool(hf_model.config.get("is_decoder"))


def config_value(hf_model: HuggingFaceModel, *names: str) -> Any:
    """A setting under the first of its names that the config has.

    Raises:
      UserError: it has none of them.
    """
    for name in names:
        if name in hf_model.config:
            return hf_model.config[name]
    raise UserError(f"{hf_model.source}: the config has no '{names[0]}'")


def prefix_of(hf_model: HuggingFaceModel) -> str:
    """What stands before the encoder's names: the family's prefix, or nothing in a bare encoder.

    Raises:
      UserError: there is no table of word embeddings under either name.
    """
    family = family_of(hf_model)
    word = "embeddings.tok_embeddings.weight" if family == "modernbert" else "embeddings.word_embeddings.weight"
    names = set(hf_model.tensors)
    for prefix in (PREFIXES[family], ""):
        if prefix + word in names:
            return prefix
    raise UserError(f"{hf_model.source}: tensor '{PREFIXES[family]}{word}' is missing")


def heads_of(hf_model: HuggingFaceModel) -> Heads:
    """The heads that the tensors make up; `architectures` decides only where the names leave it open.

    Raises:
      UserError: a `classifier` of which nothing says what it classifies.
    """
    family, names = family_of(hf_model), set(hf_model.tensors)
    task = next((task for name, task in _TASK.items() if name in names), None)
    if task is None and "classifier.weight" in names:
        task = _classifier_kind(hf_model, family, names)
    mlm = _MLM[family] in names if family in _MLM else "head.dense.weight" in names and "classifier.weight" not in names
    return Heads(mlm, _PAIR.get(family) in names, task)


def _classifier_kind(hf_model: HuggingFaceModel, family: str, names: set[str]) -> Task:
    """A plain `classifier`: of BERT's and ALBERT's pooled vector or of tokens, of anything in a ModernBERT."""
    architecture = next(iter(hf_model.config.get("architectures") or ()), "")
    for task in _BY_ARCHITECTURE:
        if architecture.endswith(task.value):
            return task
    if architecture.endswith("ForMultipleChoice") or family == "modernbert":
        raise UserError(
            f"{hf_model.source}: '{architecture}' in architectures does not say a classifier of what it has"
        )
    pooler = prefix_of(hf_model) + ("pooler.weight" if family == "albert" else "pooler.dense.weight")
    return Task.SEQUENCE if pooler in names else Task.TOKENS


def may_be_unused(name: str) -> bool:
    """Whether a tensor may go unread: a buffer of positions or types, or a pooler under heads that do not use it."""
    buffers = ("position_ids", "token_type_ids", "inv_freq")
    return name.endswith(buffers) or "pooler." in name
