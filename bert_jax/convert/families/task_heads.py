"""The task heads of transformers' classes, which several families share: how they are found, and their tensors."""

from collections.abc import Mapping
from typing import Any

from bert_jax.config import TaskHead
from bert_jax.convert.families.family import HuggingFaceConfig
from bert_jax.convert.name_map import Entry, dense
from bert_jax.convert.tensors import LazyTensor


def find_task_head_with_pooler(
    settings: HuggingFaceConfig, tensors: Mapping[str, LazyTensor], pooler: bool
) -> TaskHead | None:
    """The task head in families whose sequence classifiers read the pooler.

    A `classifier` labels tokens if the class says so or, if the class is unknown, if there is no pooler.
    """
    by_token = settings.architecture.endswith("ForTokenClassification")
    by_sequence = settings.architecture.endswith("ForSequenceClassification")
    if "qa_outputs.weight" in tensors or by_token or not (pooler or by_sequence):
        return task_of_tokens(settings, tensors)
    return settings.find_task_head(tensors, "classifier", "classification", "pooled")


def find_task_head_without_pooler(
    settings: HuggingFaceConfig,
    tensors: Mapping[str, LazyTensor],
    classifier: str,
    activation: str,
    choice: Mapping[str, Any],
) -> TaskHead | None:
    """The task head in families whose sequence classifiers have a dense layer on [CLS].

    Args:
      settings, tensors: of the model.
      classifier: output layer of the classification of sequences.
      activation: before it.
      choice: what the head of a multiple choice reads, and its layers; it ends in the layer `classifier`.
    """
    if settings.is_multiple_choice:
        return settings.find_task_head(tensors, "classifier", "classification", **choice)
    head = settings.find_task_head(tensors, classifier, "classification", "cls", activation=activation)
    return head or task_of_tokens(settings, tensors)


def task_of_tokens(settings: HuggingFaceConfig, tensors: Mapping[str, LazyTensor]) -> TaskHead | None:
    """The task head for spans or labels of tokens."""
    span = settings.find_task_head(tensors, "qa_outputs", "span", "tokens")
    return span or settings.find_task_head(tensors, "classifier", "tagging", "tokens")


def task_heads(classifier: str = "classifier", dense_layer: str | None = None) -> dict[str, tuple[Entry, ...]]:
    """Task heads with the usual names.

    Args:
      classifier: output layer of the classification of sequences.
      dense_layer: the layer before it, if it has one.
    """
    before = dense(dense_layer, "task/dense") if dense_layer else ()
    sequence = (*before, *dense(classifier, "task/output"))
    return {
        "classification": sequence,
        "multilabel": sequence,
        "multiple_choice": sequence,
        "tagging": dense("classifier", "task/output"),
        "span": dense("qa_outputs", "task/output"),
    }
