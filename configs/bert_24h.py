"""The best BERT for 24 hours of training on any machine: BERT-large's shape, pre-norm, short rows, no pairs.

Paper: Izsak et al. 2021, "How to Train BERT with an Academic Budget" (arXiv 2104.07705); the README of
IntelLabs/academic-budget-bert has the command whose numbers these are.
Command: bert-jax pretrain bert_24h --corpus DIR --workdir DIR
Batch: 4,096 rows of 128 tokens.
The time limit (`hours`) ends the run; the schedule, a warmup over 6 % and a linear decay, is stretched over the steps
that fit into it. `steps` is an upper bound that no machine should reach.
Expected: on a par with BERT-base on GLUE after 24 hours on 8 GPUs of 12 GB, by the paper's abstract; not run here.
Parameters: 334,094,336 of the encoder, 335,176,506 with the MLM head (vocabulary of 30,522).
Why this model: in a fixed time the larger model learns more from fewer tokens (Izsak et al.), and 128 tokens per row
keep attention cheap. On one small GPU use a smaller model: Geiping and Goldstein 2023, "Cramming" (arXiv 2212.14034),
train for a day with BERT-base's shape, no biases and no dropout.
Differences from the recipe: bfloat16 instead of float16, a learning rate by steps instead of by time, and the first
layer uses the embeddings' LayerNorm as its own (model/layer_plan.py).
"""

import dataclasses

from bert_jax.config import Config, DataConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-large for a day."""
    return Config(
        name="bert_24h",
        model=dataclasses.replace(
            families.bert(num_layers=24, hidden_size=1024), norm_placement="pre", compute_dtype="bfloat16"
        ),
        objective=ObjectiveConfig(pair="none"),
        data=DataConfig(format="full_sentences"),
        optimizer=OptimizerConfig(beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip_norm=None),
        phases=(
            Phase(
                steps=1_000_000,
                hours=24.0,
                seq_len=128,
                batch_size=4096,
                learning_rate=1e-3,
                warmup_steps=60_000,
                decay_start=60_000,
            ),
        ),
    )
