"""BERT-large in 8,599 steps: LAMB with batches of 65,536 and 32,768 rows, as in its paper.

Paper: You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962).
Command: bert-jax pretrain bert_large_76min --corpus DIR --workdir DIR
Batch: 65,536 rows of 128 tokens for 7,037 steps, then 32,768 rows of 512 for 1,562.
Expected: SQuAD 1.1 F1 90.584 (8,599 steps, 76 minutes on 1,024 TPUv3), by the paper's table 1; not run here.
Parameters: 335,141,888 with encoder and pooler, 336,226,108 with both heads (vocabulary of 30,522).
From the paper: both batch sizes, the total number of steps, a new warmup in the second phase. From memory, not checked
again: nine tenths of the epochs have 128 tokens, which gives 7,037 and 1,562 steps; the learning rate is 5 / (2^k
1000), times the root of 2 for each doubling of the batch, with 5e-3 at 32,768; the warmup is 1/5 of the steps there
and doubles with the batch; both decay linearly to 0, over all of a phase's steps. Continued to 65,536 rows, those
rules give the first phase's 7.07e-3 and 2/5: an extrapolation, higher than NVIDIA's 6e-3 and 0.28 (bert_large_lamb).
Short examples are packed into shared rows.
"""

import dataclasses

from bert_jax.config import Config, EvaluationConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-large with the LAMB of the paper."""
    return Config(
        name="bert_large_76min",
        model=dataclasses.replace(families.bert(num_layers=24, hidden_size=1024), compute_dtype="bfloat16"),
        # Algorithm 2 has no clipping of the gradient.
        optimizer=OptimizerConfig(name="lamb", lamb_flavour="paper", weight_decay=0.01, clip_norm=None),
        phases=(
            Phase(
                steps=7037,
                seq_len=128,
                batch_size=65_536,
                learning_rate=5e-3 * 2**0.5,
                warmup_steps=2815,
            ),
            Phase(
                steps=1562,
                seq_len=512,
                batch_size=32_768,
                learning_rate=5e-3,
                warmup_steps=312,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
