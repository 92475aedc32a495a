"""BERT (transformers modeling_bert.py; Devlin et al. 2019)."""

from bert_jax.convert.families.family import (
    Family,
    bert_layers,
    decoder_flag,
    embeddings,
    mlm_head,
    read_fields,
    write_fields,
)
from bert_jax.convert.families.task_heads import find_task_head_with_pooler, task_heads
from bert_jax.convert.name_map import dense

BERT = Family(
    model_type="bert",
    base="bert",
    names=(
        *embeddings("bert"),
        *bert_layers("bert"),
        *dense("bert.pooler.dense", "encoder/pooler"),
        *mlm_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
        *dense("cls.seq_relationship", "pair/dense"),
    ),
    tasks=task_heads(),
    decoder="cls.predictions.decoder",
    read_config=read_fields,
    write_config=lambda config, heads: write_fields(config, heads) | decoder_flag(config),
    read_task=find_task_head_with_pooler,
    class_prefix="Bert",
    class_suffixes={"causal": "LMHeadModel", "pair alone": "ForNextSentencePrediction"},
)
