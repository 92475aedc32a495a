"""DistilBERT (transformers modeling_distilbert.py; Sanh et al. 2019)."""

from collections.abc import Iterator
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    ACTIVATION_NAMES,
    Family,
    Settings,
    TensorNames,
    architecture_of,
    describe_labels,
    embeddings,
)
from bert_jax.convert.name_map import Entry, dense, norm, same_layout
from bert_jax.model.heads import Heads


def _entries(config: ModelConfig, heads: Heads) -> Iterator[Entry]:
    yield from embeddings("distilbert", config)
    for layer in range(config.num_layers):
        inside = f"distilbert.transformer.layer.{layer}"
        for part, name in enumerate(("q_lin", "k_lin", "v_lin")):
            yield from dense(f"{inside}.attention.{name}", "encoder/layers/qkv", layer, part)
        yield from dense(f"{inside}.attention.out_lin", "encoder/layers/attention_out", layer, merging=True)
        yield from norm(f"{inside}.sa_layer_norm", "encoder/layers/attention_norm", layer)
        yield from dense(f"{inside}.ffn.lin1", "encoder/layers/up", layer)
        yield from dense(f"{inside}.ffn.lin2", "encoder/layers/down", layer)
        yield from norm(f"{inside}.output_layer_norm", "encoder/layers/feed_forward_norm", layer)
    if heads.mlm:
        yield from dense("vocab_transform", "mlm/transform")
        yield from norm("vocab_layer_norm", "mlm/norm")
        yield from same_layout("vocab_projector.bias", "mlm/bias")
    if heads.task is None:
        return
    if heads.task.kind == "classification":
        yield from dense("pre_classifier", "task/dense")
    yield from dense("qa_outputs" if heads.task.kind == "span" else "classifier", "task/output")


def _read_heads(settings: Settings, names: TensorNames) -> Heads:
    if names.has("pre_classifier.weight"):
        task = names.task("classifier", "classification", "cls", activation="relu")
    else:
        task = names.task("classifier", "tagging", "tokens") or names.task("qa_outputs", "span", "tokens")
    return Heads(mlm=names.has("vocab_transform.weight"), task=task)


def _read_config(settings: Settings) -> ModelConfig:
    return settings.model(
        vocab_size=settings.required_size("vocab_size"),
        hidden_size=settings.required_size("dim"),
        num_layers=settings.required_size("n_layers"),
        num_heads=settings.required_size("n_heads"),
        intermediate_size=settings.required_size("hidden_dim"),
        max_positions=settings.required_size("max_position_embeddings"),
        type_vocab_size=0,
        activation=settings.activation("activation"),
        initializer_range=settings.get("initializer_range", 0.02),
        hidden_dropout=settings.get("dropout", 0.1),
        attention_dropout=settings.get("attention_dropout", 0.1),
    )


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "hidden_dim": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "activation": ACTIVATION_NAMES[config.activation],
        "initializer_range": config.initializer_range,
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
    } | describe_labels(heads)


DISTILBERT = Family(
    model_type="distilbert",
    base="distilbert",
    entries=_entries,
    read_config=_read_config,
    write_config=_write_config,
    read_heads=_read_heads,
    architecture=lambda config, heads: architecture_of("DistilBert", heads),
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    buffers=(r"distilbert\.embeddings\.position_ids",),
)
