"""ModernBERT-base's shape and its three stages with a tenth of their tokens: 1,024 tokens a row, then 8,192.

Paper: Warner et al. 2024, "Smarter, Better, Faster, Longer" (arXiv 2412.13663), section 2.2; AnswerDotAI/ModernBERT,
modernbert-base-pretrain.yaml and modernbert-base-context-extension.yaml.
Command: bert-jax pretrain modern_base_8k --corpus DIR --workdir DIR
Batch: as modern_base, then 576 rows of 8,192 tokens: 172, 25 and 5 billion tokens.
Expected: no score is published for this length; not run here.
Parameters: 149,015,040 of the encoder, 149,656,000 with the MLM head.
From the original: in phase 0 that of modern_base, with a constant rate after the warmup; then rows of 8,192, a rate of
3e-4, constant, then decaying by 1 - sqrt, and a rotary base of 160,000 in global layers, of 10,000 in local ones.
Differences: those of modern_base in phase 0, but for the decay. One corpus instead of better sources in the last two
stages. Weight decay is 1e-5 / 8e-4 in all phases.
"""

import dataclasses

from bert_jax.config import Config, EvaluationConfig, Phase
from bert_jax.config.presets import load_config


def config() -> Config:
    """ModernBERT-base to 8,192 tokens."""
    short = load_config("modern_base")
    first = dataclasses.replace(short.phases[0], decay="constant", decay_start=0, rotary_base=10_000.0)
    long = Phase(
        steps=5298,
        seq_len=8192,
        batch_size=576,
        learning_rate=3e-4,
        warmup_steps=0,
        decay="constant",
    )
    return dataclasses.replace(
        short,
        name="modern_base_8k",
        model=dataclasses.replace(short.model, max_positions=8192, rotary_base=160_000.0),
        phases=(first, long, dataclasses.replace(long, steps=1060, decay="sqrt")),
        evaluation=EvaluationConfig(batch_size=32),
    )
