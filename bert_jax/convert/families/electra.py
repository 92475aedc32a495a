"""ELECTRA, generator and discriminator (transformers modeling_electra.py; Clark et al. 2020)."""

from collections.abc import Mapping

from bert_jax.config import ModelConfig, TaskHead
from bert_jax.convert.families.family import (
    Family,
    HuggingFaceConfig,
    bert_layers,
    embeddings,
    mlm_head,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import find_task_head_without_pooler, task_heads
from bert_jax.convert.name_map import dense
from bert_jax.convert.tensors import LazyTensor


def _read_task(settings: HuggingFaceConfig, tensors: Mapping[str, LazyTensor], pooler: bool) -> TaskHead | None:
    if "discriminator_predictions.dense.weight" in tensors:
        return TaskHead("replaced", ("replaced",), "tokens", activation=settings.activation("hidden_act"))
    return find_task_head_without_pooler(settings, tensors, "classifier.out_proj", "gelu", SEQUENCE_HEAD)


def _read_config(settings: HuggingFaceConfig) -> ModelConfig:
    width = settings.get("embedding_size", 128)
    return read_fields(settings, embedding_size=None if width == settings.required_size("hidden_size") else width)


SEQUENCE_HEAD = {"reads": "cls", "activation": "gelu"}
ELECTRA = Family(
    model_type="electra",
    base="electra",
    names=(
        *embeddings("electra"),
        *dense("electra.embeddings_project", "encoder/embeddings/projection"),
        *bert_layers("electra"),
        *mlm_head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head.bias"),
    ),
    tasks=task_heads("classifier.out_proj", "classifier.dense")
    | {
        "multiple_choice": (
            *dense("sequence_summary.summary", "task/dense"),
            *dense("classifier", "task/output"),
        ),
        "replaced": (
            *dense("discriminator_predictions.dense", "task/dense"),
            *dense("discriminator_predictions.dense_prediction", "task/output"),
        ),
    },
    decoder="generator_lm_head",
    read_config=_read_config,
    write_config=lambda config, heads: write_fields(config, heads) | {"embedding_size": config.embedding_width},
    read_task=_read_task,
    mlm_activation=lambda settings: "gelu",
    class_prefix="Electra",
    sequence_head=SEQUENCE_HEAD,
)
