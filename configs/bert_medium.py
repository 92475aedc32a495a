"""BERT-Medium: 8 layers of width 512.

Paper: Turc et al. 2019, "Well-Read Students Learn Better" (sizes); Devlin et al. 2019 (recipe).
Command: bert-jax pretrain bert_medium --corpus DIR --workdir DIR
Computes in bfloat16, for accelerators; on a CPU, --model.compute-dtype float32 is faster.
Expected: GLUE test 73.5 after 1M steps on Wikipedia and BooksCorpus, by the paper; not run here.
Parameters: 41,373,184 with encoder and pooler, 41,668,412 with both heads (vocabulary of 30,522).
"""

import dataclasses

from bert_jax.config import Config, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-Medium."""
    return Config(
        name="bert_medium",
        model=dataclasses.replace(families.bert(num_layers=8, hidden_size=512), compute_dtype="bfloat16"),
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
