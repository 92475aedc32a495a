"""BERT-Tiny: 2 layers of width 128, with a recipe for a laptop.

Paper: Turc et al. 2019, "Well-Read Students Learn Better" (size). The recipe is new, for minutes instead of
days (docs/log/project.md, 2026-11-21): short rows, small batches, a high learning rate, no dropout, initial weights
nearly as wide as 1 / sqrt(128), and 30 % of the tokens masked (Wettig et al. 2023, "Should You Mask 15% in Masked
Language Modeling?"). Held-out metrics use 15 %, as always.
Command: bash scripts/quickstart.sh, or bert-jax pretrain bert_tiny --corpus DIR --workdir DIR
Expected: held-out MLM loss more than 1.0 nat under the unigram baseline, on the quickstart's corpus.
Parameters: 4,385,920 with encoder and pooler, 4,433,468 with both heads (vocabulary of 30,522).
"""

import dataclasses

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, ObjectiveConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-Tiny for a laptop."""
    return Config(
        name="bert_tiny",
        model=dataclasses.replace(
            families.bert(num_layers=2, hidden_size=128),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            initializer_range=0.08,
        ),
        objective=ObjectiveConfig(mask_rate=0.3),
        phases=(Phase(steps=3500, seq_len=64, batch_size=16, learning_rate=2e-3, warmup_steps=200),),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=50),
        evaluation=EvaluationConfig(every=500),
    )
