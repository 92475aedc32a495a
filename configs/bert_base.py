"""BERT-base: 12 layers of width 768.

Paper: Devlin et al. 2019, "BERT", sections 3 and A.2.
Command: bert-jax pretrain bert_base --corpus DIR --workdir DIR
Computes in bfloat16, for accelerators; on a CPU, --model.compute-dtype float32 is faster.
Expected: GLUE test 79.6 on Wikipedia and BooksCorpus, by the paper; not run here.
Parameters: 109,482,240 with encoder and pooler, 110,106,428 with both heads (vocabulary of 30,522).
"""

import dataclasses

from bert_jax.config import Config, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-base."""
    return Config(
        name="bert_base",
        model=dataclasses.replace(families.bert(num_layers=12, hidden_size=768), compute_dtype="bfloat16"),
        # One linear decay over 1,000,000 steps, 90 % of them on short rows: phase 1 begins at a tenth of the peak.
        phases=(
            Phase(
                steps=900_000,
                seq_len=128,
                batch_size=256,
                learning_rate=1e-4,
                warmup_steps=10_000,
                end_learning_rate=1e-5,
            ),
            Phase(steps=100_000, seq_len=512, batch_size=256, learning_rate=1e-5, warmup_steps=0),
        ),
    )
