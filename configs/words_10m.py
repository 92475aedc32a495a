"""A BERT of 12 layers of width 384 for about 10 million words and a quarter of an hour of one H100 or H200.

Recipe: new; the shape is BERT's, with the depth and the width of GPT-BERT's model for 10 million words (Charpentier and
Samuel 2024), pre-norm, without dropout, 30 % of the tokens masked.
Command: bert-jax pretrain words_10m --corpus DIR --workdir DIR, again if it was stopped;
scripts/benchmarks/gpu_session.py --stages words trains it in two calls of 9 minutes.
Batch: 512 rows of 128 tokens.
The time limit (`hours`) ends the run; the schedule, a warmup over 5 % and a linear decay, is stretched over the steps
that fit into it. `steps` is an upper bound that no GPU should reach.
Expected: not run here.
Parameters: 33,212,928 of the encoder, 33,392,058 with the MLM head (vocabulary of 30,522; 8,192 is recommended).
"""

import dataclasses

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Phase,
)
from bert_jax.model import families


def config() -> Config:
    """A quarter of an hour of one GPU."""
    return Config(
        name="words_10m",
        model=dataclasses.replace(
            families.bert(num_layers=12, hidden_size=384),
            norm_placement="pre",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            compute_dtype="bfloat16",
        ),
        objective=ObjectiveConfig(pair="none", mask_rate=0.3),
        data=DataConfig(format="doc_sentences", example_end="row"),
        optimizer=OptimizerConfig(beta2=0.98),
        phases=(Phase(steps=100_000, hours=0.25, seq_len=128, batch_size=512, learning_rate=1e-3, warmup_steps=5_000),),
        checkpoint=CheckpointConfig(every=2000),
        evaluation=EvaluationConfig(every=1000, batch_size=256),
    )
