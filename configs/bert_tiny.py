"""BERT-Tiny: 2 layers of width 128, with a recipe for a laptop.

Paper: Turc et al. 2019, "Well-Read Students Learn Better" (size). The recipe is ours: at this size and budget
small batches, a high learning rate and no dropout learn most (docs/LOG.md).
Command: bash scripts/quickstart.sh, or bert-jax pretrain bert_tiny --corpus DIR --workdir DIR
Expected: held-out MLM loss more than 1.0 nat under the unigram baseline after 4 minutes on 2 CPU cores.
Parameters: 4,385,920 with encoder and pooler, 4,433,468 with both heads (vocabulary of 30,522).
"""

import dataclasses

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-Tiny for a laptop."""
    model = families.bert(num_layers=2, hidden_size=128)
    return Config(
        name="bert_tiny",
        model=dataclasses.replace(model, hidden_dropout=0.0, attention_dropout=0.0, scan_unroll=2),
        phases=(Phase(steps=3000, seq_len=128, batch_size=16, learning_rate=2e-3, warmup_steps=300),),
        checkpoint=CheckpointConfig(every=500),
        log=LogConfig(every=50),
        evaluation=EvaluationConfig(every=500),
    )
