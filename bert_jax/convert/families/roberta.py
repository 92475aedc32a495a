"""RoBERTa (transformers modeling_roberta.py; Liu et al. 2019), and models with the same architecture.

XLM-RoBERTa (modeling_xlm_roberta.py; Conneau et al. 2020) and CamemBERT (modeling_camembert.py; Martin et al. 2020)
differ in their data and tokenizers.
"""

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
from bert_jax.model.heads import Heads


def _entries(config: ModelConfig, heads: Heads) -> Iterator[Entry]:
    yield from embeddings("roberta", config)
    yield from bert_layers("roberta", config)
    if heads.has_pooler:
        yield from dense("roberta.pooler.dense", "encoder/pooler")
    if heads.mlm:
        yield from dense("lm_head.dense", "mlm/transform")
        yield from norm("lm_head.layer_norm", "mlm/norm")
        yield from same_layout("lm_head.bias", "mlm/bias")
    if heads.task is None:
        return
    if heads.task.kind == "classification":
        yield from dense("classifier.dense", "task/dense")
        yield from dense("classifier.out_proj", "task/output")
    else:
        yield from dense("qa_outputs" if heads.task.kind == "span" else "classifier", "task/output")


def _read_heads(settings: Settings, names: TensorNames) -> Heads:
    task = (
        names.task("classifier.out_proj", "classification", "cls", activation="tanh")
        or names.task("classifier", "tagging", "tokens")
        or names.task("qa_outputs", "span", "tokens")
    )
    pooler = names.has("roberta.pooler.dense.weight")
    return Heads(mlm=names.has("lm_head.dense.weight"), mlm_activation="gelu", pooler=pooler, task=task)


def _read_config(settings: Settings) -> ModelConfig:
    offset = settings.get("pad_token_id", 1) + 1
    return read_shared(
        settings, position_offset=offset, max_positions=settings.required_size("max_position_embeddings") - offset
    )


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    decoder = {"is_decoder": True} if config.direction == "causal" else {}
    return shared_settings(config, heads) | decoder | {"pad_token_id": config.position_offset - 1}


def _family(model_type: str, prefix: str) -> Family:
    """RoBERTa under one of its model types; `prefix` is that of the class names in transformers."""

    def architecture(config: ModelConfig, heads: Heads) -> str:
        causal = config.direction == "causal"
        return architecture_of(prefix, heads, **({"mlm": "ForCausalLM"} if causal else {}))

    return Family(
        model_type=model_type,
        base="roberta",
        entries=_entries,
        read_config=_read_config,
        write_config=_write_config,
        read_heads=_read_heads,
        architecture=architecture,
        copies={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        buffers=(r"roberta\.embeddings\.(position_ids|token_type_ids)",),
    )


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
CAMEMBERT = _family("camembert", "Camembert")
