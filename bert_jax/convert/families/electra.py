"""ELECTRA, generator and discriminator (transformers modeling_electra.py; Clark et al. 2020)."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    Family,
    Settings,
    TensorNames,
    architecture_of,
    bert_layers,
    embeddings,
    read_shared,
    shared_settings,
)
from bert_jax.convert.name_map import Entry, dense, norm, same_layout
from bert_jax.model.heads import Heads, TaskHead


def _entries(config: ModelConfig, heads: Heads) -> Iterator[Entry]:
    yield from embeddings("electra", config)
    if config.embedding_size is not None:
        yield from dense("electra.embeddings_project", "encoder/embeddings/projection")
    yield from bert_layers("electra", config)
    if heads.mlm:
        yield from dense("generator_predictions.dense", "mlm/transform")
        yield from norm("generator_predictions.LayerNorm", "mlm/norm")
        yield from same_layout("generator_lm_head.bias", "mlm/bias")
    task = heads.task
    if task is not None and task.kind == "replaced":
        yield from dense("discriminator_predictions.dense", "task/dense")
        yield from dense("discriminator_predictions.dense_prediction", "task/output")
    elif task is not None and task.kind == "classification":
        yield from dense("classifier.dense", "task/dense")
        yield from dense("classifier.out_proj", "task/output")
    elif task is not None:
        yield from dense("qa_outputs" if task.kind == "span" else "classifier", "task/output")


def _read_heads(settings: Settings, names: TensorNames) -> Heads:
    if names.has("discriminator_predictions.dense.weight"):
        task = TaskHead("replaced", ("replaced",), "tokens", activation=settings.activation("hidden_act"))
    else:
        task = (
            names.task("classifier.out_proj", "classification", "cls", activation="gelu")
            or names.task("classifier", "tagging", "tokens")
            or names.task("qa_outputs", "span", "tokens")
        )
    return Heads(mlm=names.has("generator_predictions.dense.weight"), mlm_activation="gelu", task=task)


def _read_config(settings: Settings) -> ModelConfig:
    width = settings.get("embedding_size", 128)
    return read_shared(settings, embedding_size=None if width == settings.required_size("hidden_size") else width)


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    return shared_settings(config, heads) | {"embedding_size": config.embedding_width}


ELECTRA = Family(
    model_type="electra",
    base="electra",
    entries=_entries,
    read_config=_read_config,
    write_config=_write_config,
    read_heads=_read_heads,
    architecture=lambda config, heads: architecture_of("Electra", heads),
    copies={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    buffers=(r"electra\.embeddings\.(position_ids|token_type_ids)",),
)
