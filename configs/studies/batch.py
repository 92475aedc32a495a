"""Batches of 256 to 8,192 rows with AdamW and LAMB at equal tokens.

Papers: Liu et al. 2019 (RoBERTa), section 4.3, table 3; You et al. 2020 (LAMB), section 4 and table 1.
Question: up to which batch does the loss at equal tokens stay the same, and is LAMB better than AdamW there?
Published: RoBERTa's batches of 256, 2,048 and 8,192 have perplexity 3.99, 3.68 and 3.77 and MNLI-m 84.7, 85.2 and
84.6 at equal passes. LAMB: SQuAD F1 of BERT-large from 91.8 (512) to 91.5 (32,768).
Command: bert-jax ablate batch --corpus DIR --workdir DIR
Recipe: bert_small with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Cost: 24 runs, 7.3e+18 FLOPs; 6 hours on one H100 by the roofline of bert-jax plan. Not run here.
Rates: AdamW's are those of RoBERTa (256: 1e-4, 2,048: 7e-4, 8,192: 1e-3; 1,024 between them), with 1 % warmup. LAMB's
follow You et al., 5e-3 at 32,768 and its square root rule, warmup 1/320 at 512 and in proportion to the batch.
warmup_steps are given for 100,000 steps, and keep their share of the steps.
"""

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Seven pairs of optimizer and batch."""
    return Study(
        name="batch",
        base=config_lib.replace(
            presets.load_config("bert_small"),
            phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=1e-4, warmup_steps=1000),),
        ),
        factors={
            "batch": {
                "adamw_256": {},
                "adamw_1024": {"phases": {"batch_size": 1024, "learning_rate": 4e-4}},
                "adamw_2048": {"phases": {"batch_size": 2048, "learning_rate": 7e-4}},
                "adamw_8192": {"phases": {"batch_size": 8192, "learning_rate": 1e-3}},
                "lamb_256": _lamb(256),
                "lamb_1024": _lamb(1024),
                "lamb_2048": _lamb(2048),
                "lamb_8192": _lamb(8192),
            },
        },
        margins={"mlm_loss": 0.02, "nsp_accuracy": 0.01},
        rows=HeldOutRows("full_sentences", 128, 2048),
    )


def _lamb(batch_size: int) -> dict:
    rate, warmup = 5e-3 * (batch_size / 32_768) ** 0.5, 100_000 * batch_size // (512 * 320)
    phases = {"batch_size": batch_size, "learning_rate": rate, "warmup_steps": warmup}
    return {"phases": phases, "optimizer": {"name": "lamb", "lamb_flavour": "paper", "clip_norm": None}}
