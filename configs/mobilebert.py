"""MobileBERT: 24 layers of width 128 in a residual stream of width 512; word embeddings of width 128.

Paper: Sun et al. 2020, "MobileBERT" (arXiv 2004.02984); google-research/mobilebert (README.md, run_pretraining.py).
Command: bert-jax pretrain mobilebert --corpus DIR --workdir DIR
Batch: 2,048 rows of 512 tokens for 500,000 steps, with LAMB.
Expected: 77.7 on GLUE's test set, by the paper, for a model whose first 240,000 steps imitate the layers of a teacher
of its own kind (IB-BERT) and whose other steps predict half of that teacher's distribution; not run here.
Parameters: 24,844,544 with encoder and pooler, 36,860,220 with both heads, whose decoder has 384 columns of its own.
This preset pretrains on masked tokens and sentence pairs alone, without a teacher; `bert-jax compress distil --recipe
mobilebert` has the layer-wise losses. Masks are new in every epoch (in the original they are stored), and short
examples share rows.
"""

import dataclasses

from bert_jax.config import Config, EvaluationConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """MobileBERT with the schedule of its second stage."""
    return Config(
        name="mobilebert",
        model=dataclasses.replace(families.mobilebert(), compute_dtype="bfloat16"),
        optimizer=OptimizerConfig(name="lamb", lamb_flavour="google", epsilon=1e-6, weight_decay=0.01),
        phases=(
            Phase(
                steps=500_000,
                seq_len=512,
                batch_size=2048,
                learning_rate=1.5e-3,
                warmup_steps=10_000,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
