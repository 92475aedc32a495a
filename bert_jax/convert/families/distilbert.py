"""DistilBERT (transformers modeling_distilbert.py; Sanh et al. 2019)."""

from collections.abc import Mapping

from bert_jax.config import TaskHead
from bert_jax.convert.families.family import (
    Family,
    Field,
    HuggingFaceConfig,
    embeddings,
    mlm_head,
    post_norm_layers,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import task_heads, task_of_tokens
from bert_jax.convert.tensors import LazyTensor

FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("dim", "hidden_size"),
    Field("n_layers", "num_layers"),
    Field("n_heads", "num_heads"),
    Field("hidden_dim", "intermediate_size"),
    Field("max_position_embeddings", "max_positions"),
    Field("activation", "activation", "gelu"),
    Field("initializer_range", "initializer_range", 0.02),
    Field("dropout", "hidden_dropout", 0.1),
    Field("attention_dropout", "attention_dropout", 0.1),
)
FIXED = {"sinusoidal_pos_embds": False, "tie_weights_": True}


def _read_task(settings: HuggingFaceConfig, tensors: Mapping[str, LazyTensor], pooler: bool) -> TaskHead | None:
    if "pre_classifier.weight" in tensors:
        return settings.find_task_head(tensors, "classifier", "classification", "cls", activation="relu")
    return task_of_tokens(settings, tensors)


DISTILBERT = Family(
    model_type="distilbert",
    base="distilbert",
    names=(
        *embeddings("distilbert"),
        *post_norm_layers(
            "distilbert.transformer.layer.{n}",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            attention_out="attention.out_lin",
            attention_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            feed_forward_norm="output_layer_norm",
        ),
        *mlm_head("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
    ),
    tasks=task_heads("classifier", "pre_classifier"),
    decoder="vocab_projector",
    read_config=lambda settings: read_fields(settings, FIELDS, type_vocab_size=0),
    write_config=lambda config, heads: write_fields(config, heads, FIELDS, FIXED),
    read_task=_read_task,
    class_prefix="DistilBert",
    sequence_head={"reads": "cls", "activation": "relu"},
    defaults={"activation": "gelu"},
    buffers=("embeddings.position_ids",),
)
