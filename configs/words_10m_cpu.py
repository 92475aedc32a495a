"""A BERT of 3 layers of width 192 for about 10 million words and two CPU cores in two hours.

Recipe: new. The shape follows from the budget: one core trains about 2,200 tokens/s of it (docs/log/training.md), two
cores some 27 million in two hours, 20 for each of the 1.3 million parameters of the layers (Hoffmann et al. 2022,
"Training Compute-Optimal Large Language Models"). Short rows, a high learning rate, no dropout, wide initial weights
and 30 % of the tokens masked, as in bert_tiny. The first 1,500 steps are causal: a masked model of this size stays near
the unigram loss for millions of tokens, and a causal one does not (docs/recipes.md; causal and then masked, at other
sizes: Gisserot-Boukhlef et al. 2025, "Should We Still Pretrain Encoders with Masked Language Modeling?").
Command: bert-jax pretrain words_10m_cpu --corpus DIR --workdir DIR
The time limit (`hours`) ends the second phase, over whose steps the linear decay is stretched; its `steps` are an upper
bound that no CPU should reach. The causal steps take about half an hour.
Expected: docs/recipes.md has the curve of a run and what the model can do.
Parameters: 7,220,160 of the encoder, 7,288,122 with the MLM head (vocabulary of 30,522; 8,192 is recommended).
"""

import dataclasses

from bert_jax.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, LogConfig, ObjectiveConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """Two hours of two CPU cores."""
    rows = {"seq_len": 64, "batch_size": 32}
    causal = Phase(
        steps=1_500, learning_rate=1.6e-3, end_learning_rate=1.4e-3, warmup_steps=100, direction="causal", **rows
    )
    masked = Phase(steps=100_000, hours=1.4, learning_rate=1.4e-3, warmup_steps=0, **rows)
    return Config(
        name="words_10m_cpu",
        model=dataclasses.replace(
            families.bert(num_layers=3, hidden_size=192, max_positions=128),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention="deferred",  # the implementation for CPUs
            initializer_range=0.07,  # about 1 / sqrt(192)
        ),
        objective=ObjectiveConfig(pair="none", mask_rate=0.3),
        data=DataConfig(format="doc_sentences", example_end="row"),
        phases=(causal, masked),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=50),
        evaluation=EvaluationConfig(every=250),
    )
