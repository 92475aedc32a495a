"""Inputs and outputs of the parity report's forward passes, and which heads a `HuggingFaceModel` has.

Shapes in names: B rows, S positions, H hidden, V vocabulary, C classes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError

ENCODER_PREFIXES = {name: f"{name}." for name in ("bert", "roberta", "albert", "distilbert", "electra", "mobilebert")}
ENCODER_PREFIXES |= {"modernbert": "model."}
"""By family: prefix of the encoder's tensor names in a model with heads."""
MODEL_TYPE_ALIASES = {"xlm-roberta": "roberta", "camembert": "roberta"}
"""Model types with the config fields, tensors and computation of another type."""

SEQUENCE, TOKENS, SPAN, CHOICE = TASK_CLASSES = (
    *("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
)
REPLACED = "ForPreTraining"
"""Suffixes of transformers' classes with a task head; REPLACED is ELECTRA's discriminator."""


class ForwardInputs(NamedTuple):
    """A padded batch, int32. Every row has a real token at position 0."""

    input_ids_BS: np.ndarray
    token_type_ids_BS: np.ndarray
    """0 everywhere for models without token types."""
    attention_mask_BS: np.ndarray
    """1 for real tokens, 0 for padding."""


ForwardOutputs = dict[str, np.ndarray]
"""The outputs that a model has, float32, by their names in the report:

- "embeddings", the input of the first layer, and "layer 1", "layer 2", ...: [B, S, H]; the last after the final norm;
- "mlm logits" [B, S, V], "pair logits" [B, 2], "pooled vector" [B, H];
- "task logits": [B, C] of SEQUENCE, [B, 1] of CHOICE, whose rows are single endings, else [B, S, C]. Those of SPAN
  are start and end of the answer; that of REPLACED is above 0 if the token was replaced.
"""


def name_states(hidden_states: Iterable[np.ndarray], first_layer: int = 0) -> ForwardOutputs:
    """Hidden states by their names; layer 0 is the embeddings."""
    return {f"layer {i}" if i else "embeddings": state for i, state in enumerate(hidden_states, first_layer)}


class HeadsPresent(NamedTuple):
    """Which heads a model has, by its tensors."""

    mlm: bool
    pair: bool
    task: str | None
    """One of TASK_CLASSES, or REPLACED."""


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
    "mobilebert": MlmHead(
        "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"
    ),
    "modernbert": MlmHead("head.dense", "head.norm", "decoder"),
}
"""By family; ModernBERT's classifiers have the same dense layer and norm."""
PAIR_HEADS = dict.fromkeys(("bert", "mobilebert"), "cls.seq_relationship") | {"albert": "sop_classifier.classifier"}
_TASK_TENSORS = {
    "qa_outputs.weight": SPAN,
    "discriminator_predictions.dense.weight": REPLACED,
    "classifier.out_proj.weight": SEQUENCE,
}


def family_of(hf_model: HuggingFaceModel) -> str:
    """The model's model_type, or the one that it is an alias of."""
    name = hf_model.config["model_type"]
    return MODEL_TYPE_ALIASES.get(name, name)


def is_causal(hf_model: HuggingFaceModel) -> bool:
    """Whether a token attends only to itself and to earlier tokens."""
    return bool(hf_model.config.get("is_decoder"))


def prefix_of(hf_model: HuggingFaceModel) -> str:
    """Prefix of the encoder's tensor names: the family's, or "" in a model without heads."""
    prefix = ENCODER_PREFIXES[family_of(hf_model)]
    return prefix if any(name.startswith(prefix) for name in hf_model.tensors) else ""


def heads_of(hf_model: HuggingFaceModel) -> HeadsPresent:
    """The heads of a model by its tensor names; `architectures` decides only where the names are ambiguous.

    Raises:
      UserError: `architectures` does not give the kind of ModernBERT's classifier.
    """
    family, names = family_of(hf_model), set(hf_model.tensors)
    task = next((task for name, task in _TASK_TENSORS.items() if name in names), None)
    if task is None and "classifier.weight" in names:
        task = _classifier_kind(hf_model, family, names)
    mlm = f"{MLM_HEADS[family].dense}.weight" in names and not (family == "modernbert" and task)
    return HeadsPresent(mlm, f"{PAIR_HEADS.get(family)}.weight" in names, task)


def _classifier_kind(hf_model: HuggingFaceModel, family: str, names: set[str]) -> str:
    """Kind of a plain `classifier`: in ModernBERT any; in BERT, ALBERT, MobileBERT of the pooled vector or tokens."""
    architecture = next(iter(hf_model.config.get("architectures") or ()), "")
    for task in TASK_CLASSES:
        if architecture.endswith(task):
            return task
    if family == "modernbert":
        raise UserError(f"{hf_model.source}: '{architecture}' in architectures does not say what its classifier reads")
    if "pre_classifier.weight" in names:
        return SEQUENCE
    pooler = prefix_of(hf_model) + ("pooler.weight" if family == "albert" else "pooler.dense.weight")
    return SEQUENCE if pooler in names else TOKENS
