"""BERT (transformers modeling_bert.py; Devlin et al. 2019)."""

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
    task_of_pooled,
)
from bert_jax.convert.name_map import Entry, dense, norm, same_layout
from bert_jax.model.heads import Heads


def _entries(config: ModelConfig, heads: Heads) -> Iterator[Entry]:
    yield from embeddings("bert", config)
    yield from bert_layers("bert", config)
    if heads.has_pooler:
        yield from dense("bert.pooler.dense", "encoder/pooler")
    if heads.mlm:
        yield from dense("cls.predictions.transform.dense", "mlm/transform")
        yield from norm("cls.predictions.transform.LayerNorm", "mlm/norm")
        yield from same_layout("cls.predictions.bias", "mlm/bias")
    if heads.pair:
        yield from dense("cls.seq_relationship", "pair/dense")
    if heads.task:
        yield from dense("qa_outputs" if heads.task.kind == "span" else "classifier", "task/output")


def _read_heads(settings: Settings, names: TensorNames) -> Heads:
    pooler = names.has("bert.pooler.dense.weight")
    return Heads(
        mlm=names.has("cls.predictions.transform.dense.weight"),
        pair=names.has("cls.seq_relationship.weight"),
        pooler=pooler,
        task=task_of_pooled(settings, names, pooler),
    )


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    decoder = {"is_decoder": True} if config.direction == "causal" else {}
    return shared_settings(config, heads) | decoder


def _architecture(config: ModelConfig, heads: Heads) -> str:
    if heads.pair and not heads.mlm:
        return "BertForNextSentencePrediction"
    causal = config.direction == "causal"
    return architecture_of("Bert", heads, **({"mlm": "LMHeadModel"} if causal else {}))


BERT = Family(
    model_type="bert",
    base="bert",
    entries=_entries,
    read_config=read_shared,
    write_config=_write_config,
    read_heads=_read_heads,
    architecture=_architecture,
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
)
