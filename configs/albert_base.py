"""ALBERT-base: 12 layers of width 768 that share one set of parameters; embeddings of width 128.

Paper: Lan et al. 2020, "ALBERT" (arXiv 1909.11942); google-research/albert (run_pretraining.py, optimization.py).
Command: bert-jax pretrain albert_base --corpus DIR --workdir DIR
The corpus needs a vocabulary of 30,000 pieces (ALBERT's is SentencePiece): bert-data tokenizer
--kind sentencepiece-unigram --vocab-size 30000.
Batch: 4,096 rows of 512 tokens for 125,000 steps.
Expected: an average of 80.1 over five tasks for the first release, 82.3 for the second, by the README; not run here.
Parameters: 11,683,584 with encoder and pooler, 11,813,810 with both heads.
A mix of the two releases: no dropout, as in the second, and the number of steps of the first (the second has
10 million, and more data). Masks are new in every epoch (in the original they are stored), and short examples share
rows.
"""

import dataclasses

from bert_jax.config import Config, DataConfig, EvaluationConfig, ObjectiveConfig, OptimizerConfig, Phase
from bert_jax.model import families


def config() -> Config:
    """ALBERT-base, without dropout."""
    return Config(
        name="albert_base",
        model=dataclasses.replace(
            families.albert(num_layers=12, hidden_size=768, num_heads=12), compute_dtype="bfloat16"
        ),
        objective=ObjectiveConfig(pair="sop", mask_unit="ngram", max_ngram=3),
        data=DataConfig(format="sentence_order"),
        optimizer=OptimizerConfig(name="lamb", lamb_flavour="google", epsilon=1e-6, weight_decay=0.01),
        phases=(
            Phase(
                steps=125_000,
                seq_len=512,
                batch_size=4096,
                learning_rate=1.76e-3,
                warmup_steps=3125,
            ),
        ),
        evaluation=EvaluationConfig(batch_size=256),
    )
