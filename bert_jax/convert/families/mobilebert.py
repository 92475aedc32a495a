"""MobileBERT (transformers modeling_mobilebert.py; Sun et al. 2020).

Its teacher IB-BERT, whose query and key read the layer's input, is not among transformers' models.
"""

from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    SHARED_FIELDS,
    Family,
    Field,
    HuggingFaceConfig,
    bert_layers,
    embeddings,
    mlm_head,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import find_task_head_with_pooler, task_heads
from bert_jax.convert.name_map import Entry, Layout, dense, norm
from bert_jax.errors import require
from bert_jax.model.heads import Heads

DEFAULTS = {"hidden_act": "relu", "hidden_dropout_prob": 0.0}
FIELDS = (
    *(field._replace(default=DEFAULTS.get(field.hf_name, field.default)) for field in SHARED_FIELDS),
    Field("embedding_size", "embedding_size", 128),
    Field("num_feedforward_networks", "feed_forward_networks", 4),
)
NORMS = {"no_norm": "none", "layer_norm": "layer"}
FIXED_EPSILON = 1e-5
"""Epsilon of some LayerNorms of layers in transformers, which do not get the one of the config."""
MOST_NETWORKS = 8
"""Largest `ModelConfig.feed_forward_networks`."""
LAYER, OURS = "mobilebert.encoder.layer.{n}", "encoder/layers"


def _read_config(settings: HuggingFaceConfig) -> ModelConfig:
    settings.require_value("trigram_input", True, "only trigram embeddings can be read")
    settings.require_value("classifier_activation", True, "only a pooler with a dense layer can be read")
    kind = settings.get("normalization_type", "no_norm")
    require(kind in NORMS, f"{settings.source}: normalization_type '{kind}' is not one of {', '.join(NORMS)}")
    epsilon = settings.get("layer_norm_eps", 1e-12)
    require(
        kind == "no_norm" or epsilon == FIXED_EPSILON,
        f"{settings.source}: normalization_type 'layer_norm' with layer_norm_eps {epsilon}: transformers uses "
        f"{FIXED_EPSILON} in some norms whatever layer_norm_eps is, so only {FIXED_EPSILON} can be read",
    )
    changes: dict[str, Any] = {"embeddings": "trigrams", "norm": NORMS[kind]}
    if settings.get("use_bottleneck", True):
        reads_bottleneck, is_shared = (
            settings.get("use_bottleneck_attention", False),
            settings.get("key_query_shared_bottleneck", True),
        )
        changes["bottleneck_size"] = settings.get("intra_bottleneck_size", 128)
        changes["bottleneck_attention"] = "bottleneck" if reads_bottleneck else "shared" if is_shared else "input"
    return read_fields(settings, FIELDS, **changes)


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    values = write_fields(config, heads, FIELDS) | {
        "trigram_input": True,
        "use_bottleneck": config.bottleneck_size is not None,
        "normalization_type": next(name for name, norm in NORMS.items() if norm == config.norm),
        "classifier_activation": True,
    }
    if config.bottleneck_size is None:
        return values
    return values | {
        "intra_bottleneck_size": config.bottleneck_size,
        "use_bottleneck_attention": config.bottleneck_attention == "bottleneck",
        "key_query_shared_bottleneck": config.bottleneck_attention == "shared",
    }


def _earlier_networks() -> tuple[Entry, ...]:
    return tuple(
        entry
        for i in range(MOST_NETWORKS - 1)
        for entry in (
            *dense(f"{LAYER}.ffn.{i}.intermediate.dense", f"{OURS}/networks/{i}/up"),
            *dense(f"{LAYER}.ffn.{i}.output.dense", f"{OURS}/networks/{i}/down"),
            *norm(f"{LAYER}.ffn.{i}.output.LayerNorm", f"{OURS}/networks/{i}/norm"),
        )
    )


MOBILEBERT = Family(
    model_type="mobilebert",
    base="mobilebert",
    names=(
        *embeddings("mobilebert"),
        *dense("mobilebert.embeddings.embedding_transformation", "encoder/embeddings/projection"),
        *bert_layers("mobilebert"),
        # Query, key and value are one parameter if they have one input, else query and key are.
        *dense(f"{LAYER}.attention.self.query", f"{OURS}/query_key", 0),
        *dense(f"{LAYER}.attention.self.key", f"{OURS}/query_key", 1),
        *dense(f"{LAYER}.attention.self.value", f"{OURS}/value"),
        *_earlier_networks(),
        *dense(f"{LAYER}.bottleneck.input.dense", f"{OURS}/bottleneck/input"),
        *norm(f"{LAYER}.bottleneck.input.LayerNorm", f"{OURS}/bottleneck/input_norm"),
        *dense(f"{LAYER}.bottleneck.attention.dense", f"{OURS}/bottleneck/attention"),
        *norm(f"{LAYER}.bottleneck.attention.LayerNorm", f"{OURS}/bottleneck/attention_norm"),
        *dense(f"{LAYER}.output.bottleneck.dense", f"{OURS}/bottleneck/output"),
        *norm(f"{LAYER}.output.bottleneck.LayerNorm", f"{OURS}/bottleneck/output_norm"),
        *dense("mobilebert.pooler.dense", "encoder/pooler"),
        *mlm_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
        Entry("cls.predictions.dense.weight", "mlm/extra_columns", Layout.KERNEL),
        *dense("cls.seq_relationship", "pair/dense"),
    ),
    tasks=task_heads(),
    decoder="cls.predictions.decoder",
    read_config=_read_config,
    write_config=_write_config,
    read_task=find_task_head_with_pooler,
    class_prefix="MobileBert",
    class_suffixes={"pair alone": "ForNextSentencePrediction"},
    defaults={"hidden_act": DEFAULTS["hidden_act"]},
    # With use_bottleneck_attention, transformers has a second projection into the bottleneck that it does not use.
    buffers=("embeddings.position_ids", r"encoder\.layer\.\d+\.bottleneck\.attention\..*"),
)
