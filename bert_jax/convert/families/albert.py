"""ALBERT (transformers modeling_albert.py; Lan et al. 2020)."""

from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    SHARED_FIELDS,
    Family,
    Field,
    HuggingFaceConfig,
    embeddings,
    mlm_head,
    post_norm_layers,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import find_task_head_with_pooler, task_heads
from bert_jax.convert.name_map import dense
from bert_jax.model.heads import Heads

DEFAULTS = {"hidden_act": "gelu_new", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FIELDS = (
    *(field._replace(default=DEFAULTS.get(field.hf_name, field.default)) for field in SHARED_FIELDS),
    Field("embedding_size", "embedding_size", 128),
    Field("num_hidden_groups", "parameter_groups", 1),
)


def _read_config(settings: HuggingFaceConfig) -> ModelConfig:
    settings.require_value("inner_group_num", 1, "only one layer in a group can be read")
    return read_fields(settings, FIELDS)


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    return write_fields(config, heads) | {
        "embedding_size": config.embedding_size,
        "num_hidden_groups": config.parameter_groups,
        "inner_group_num": 1,
        # transformers writes 0.1 here whatever the other dropout rates are.
        "classifier_dropout_prob": 0.1,
    }


ALBERT = Family(
    model_type="albert",
    base="albert",
    names=(
        *embeddings("albert"),
        *dense("albert.encoder.embedding_hidden_mapping_in", "encoder/embeddings/projection"),
        *post_norm_layers(
            "albert.encoder.albert_layer_groups.{n}.albert_layers.0",
            qkv=("attention.query", "attention.key", "attention.value"),
            attention_out="attention.dense",
            attention_norm="attention.LayerNorm",
            up="ffn",
            down="ffn_output",
            feed_forward_norm="full_layer_layer_norm",
        ),
        *dense("albert.pooler", "encoder/pooler"),
        *mlm_head("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        *dense("sop_classifier.classifier", "pair/dense"),
    ),
    tasks=task_heads(),
    decoder="predictions.decoder",
    read_config=_read_config,
    write_config=_write_config,
    read_task=find_task_head_with_pooler,
    class_prefix="Albert",
    defaults={"hidden_act": DEFAULTS["hidden_act"]},
)
