"""ALBERT (transformers modeling_albert.py; Lan et al. 2020)."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    Family,
    Settings,
    TensorNames,
    architecture_of,
    embeddings,
    read_shared,
    shared_settings,
    task_of_pooled,
)
from bert_jax.convert.name_map import Entry, dense, norm, same_layout
from bert_jax.model.heads import Heads


def _entries(config: ModelConfig, heads: Heads) -> Iterator[Entry]:
    yield from embeddings("albert", config)
    yield from dense("albert.encoder.embedding_hidden_mapping_in", "encoder/embeddings/projection")
    for group in range(config.parameter_groups or config.num_layers):
        inside = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0"
        for part, name in enumerate(("query", "key", "value")):
            yield from dense(f"{inside}.attention.{name}", "encoder/layers/qkv", group, part)
        yield from dense(f"{inside}.attention.dense", "encoder/layers/attention_out", group, merging=True)
        yield from norm(f"{inside}.attention.LayerNorm", "encoder/layers/attention_norm", group)
        yield from dense(f"{inside}.ffn", "encoder/layers/up", group)
        yield from dense(f"{inside}.ffn_output", "encoder/layers/down", group)
        yield from norm(f"{inside}.full_layer_layer_norm", "encoder/layers/feed_forward_norm", group)
    if heads.has_pooler:
        yield from dense("albert.pooler", "encoder/pooler")
    if heads.mlm:
        yield from dense("predictions.dense", "mlm/transform")
        yield from norm("predictions.LayerNorm", "mlm/norm")
        yield from same_layout("predictions.bias", "mlm/bias")
    if heads.pair:
        yield from dense("sop_classifier.classifier", "pair/dense")
    if heads.task:
        yield from dense("qa_outputs" if heads.task.kind == "span" else "classifier", "task/output")


def _read_heads(settings: Settings, names: TensorNames) -> Heads:
    pooler = names.has("albert.pooler.weight")
    return Heads(
        mlm=names.has("predictions.dense.weight"),
        pair=names.has("sop_classifier.classifier.weight"),
        pooler=pooler,
        task=task_of_pooled(settings, names, pooler),
    )


def _read_config(settings: Settings) -> ModelConfig:
    settings.require_value("inner_group_num", 1, "only one layer in a group can be read")
    groups = settings.get("num_hidden_groups", 1)
    return read_shared(
        settings,
        embedding_size=settings.get("embedding_size", 128),
        parameter_groups=groups,
        activation=settings.activation("hidden_act", "gelu_new"),
        hidden_dropout=settings.get("hidden_dropout_prob", 0.0),
        attention_dropout=settings.get("attention_probs_dropout_prob", 0.0),
    )


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    return shared_settings(config, heads) | {
        "embedding_size": config.embedding_size,
        "num_hidden_groups": config.parameter_groups,
        "inner_group_num": 1,
        # transformers writes 0.1 here whatever the other dropout rates are.
        "classifier_dropout_prob": 0.1,
    }


ALBERT = Family(
    model_type="albert",
    base="albert",
    entries=_entries,
    read_config=_read_config,
    write_config=_write_config,
    read_heads=_read_heads,
    architecture=lambda config, heads: architecture_of("Albert", heads),
    copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    buffers=(r"albert\.embeddings\.(position_ids|token_type_ids)",),
)
