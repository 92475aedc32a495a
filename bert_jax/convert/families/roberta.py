"""RoBERTa (transformers modeling_roberta.py; Liu et al. 2019), and models with the same architecture.

XLM-RoBERTa (modeling_xlm_roberta.py; Conneau et al. 2020) and CamemBERT (modeling_camembert.py; Martin et al. 2020)
differ in their data and tokenizers.
"""

import dataclasses
from typing import Any

from bert_jax.config import ModelConfig
from bert_jax.convert.families.family import (
    Family,
    HuggingFaceConfig,
    bert_layers,
    decoder_flag,
    embeddings,
    mlm_head,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import find_task_head_without_pooler, task_heads
from bert_jax.convert.name_map import dense
from bert_jax.model.heads import Heads


def _read_config(settings: HuggingFaceConfig) -> ModelConfig:
    offset = settings.get("pad_token_id", 1) + 1
    max_positions = settings.required_size("max_position_embeddings") - offset
    return read_fields(settings, position_offset=offset, max_positions=max_positions)


def _write_config(config: ModelConfig, heads: Heads) -> dict[str, Any]:
    offset = config.position_offset
    positions = {"max_position_embeddings": offset + config.max_positions}
    return write_fields(config, heads) | positions | decoder_flag(config) | {"pad_token_id": offset - 1}


CHOICE_HEAD = {"reads": "pooled"}
ROBERTA = Family(
    model_type="roberta",
    base="roberta",
    names=(
        *embeddings("roberta"),
        *bert_layers("roberta"),
        *dense("roberta.pooler.dense", "encoder/pooler"),
        *mlm_head("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ),
    tasks=task_heads("classifier.out_proj", "classifier.dense")
    | {"multiple_choice": dense("classifier", "task/output")},
    decoder="lm_head.decoder",
    read_config=_read_config,
    write_config=_write_config,
    read_task=lambda settings, tensors, pooler: find_task_head_without_pooler(
        settings, tensors, "classifier.out_proj", "tanh", CHOICE_HEAD
    ),
    mlm_activation=lambda settings: "gelu",
    class_prefix="Roberta",
    sequence_head={"reads": "cls", "activation": "tanh"},
    choice_head=CHOICE_HEAD,
    pair_separators=2,
    class_suffixes={"causal": "ForCausalLM"},
)
XLM_ROBERTA = dataclasses.replace(ROBERTA, model_type="xlm-roberta", class_prefix="XLMRoberta")
CAMEMBERT = dataclasses.replace(ROBERTA, model_type="camembert", class_prefix="Camembert")
