"""RoBERTa-base: 12 layers of width 768, no sentence pairs, large batches, much data.

Paper: Liu et al. 2019, "RoBERTa", sections 4 and 5 (arXiv 1907.11692); facebookresearch/fairseq, examples/roberta.
Command: bert-jax pretrain roberta_base --corpus DIR --workdir DIR
The corpus needs a byte-level BPE of 50,265 pieces: bert-data tokenizer --kind byte-bpe --vocab-size 50265.
Batch: 8,192 rows of 512 tokens for 500,000 steps.
Expected: dev accuracy of 87.6 on MNLI and 94.8 on SST-2 after 160 GB of text, by the README; not run here.
Parameters: 124,055,040 of the encoder, 124,697,433 with the MLM head.
Differences from RoBERTa: exactly 15 % of each row's tokens are predicted (RoBERTa: 15 % plus a random fraction, rounded
down), biases and LayerNorms have no weight decay (in RoBERTa they have), bfloat16 instead of float16. The encoder has
1,536 parameters fewer than the released 124,055,040: RoBERTa has two unused position embeddings (model/families.py).
The peak of 6e-4 and the warmup are from memory of the paper's table 9; the README's own example has other numbers.
"""

import dataclasses

from bert_jax.config import Config, DataConfig, EvaluationConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """RoBERTa-base."""
    return Config(
        name="roberta_base",
        model=dataclasses.replace(families.roberta(num_layers=12, hidden_size=768), compute_dtype="bfloat16"),
        objective=ObjectiveConfig(pair="none"),
        data=DataConfig(format="full_sentences"),
        optimizer=OptimizerConfig(beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=None),
        phases=(
            Phase(
                steps=500_000,
                seq_len=512,
                batch_size=8192,
                learning_rate=6e-4,
                warmup_steps=24_000,
                decay_start=24_000,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
