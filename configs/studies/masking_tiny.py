"""Dynamic masking, or 1 or 10 static sets of masks: minutes on two CPU cores.

Paper: Liu et al. 2019 (RoBERTa), section 4.1, table 1.
Question: do masks that repeat raise the held-out MLM loss after 10 to 20 epochs?
Published: BERT-base with 10 sets in 40 epochs, each seen four times: static 78.3 F1 on SQuAD 2.0, 84.3 on MNLI-m and
92.5 on SST-2, dynamic 78.7, 84.0 and 92.9 (medians of 5 seeds).
Command: bert-jax ablate masking_tiny --corpus DIR --workdir DIR
Size: 10,000 steps of 16 rows of 64 tokens, 10.2 million tokens in a run: 20 epochs of a corpus of 0.5 million tokens,
with a vocabulary of about 4,000. Hold out at least 35,000 tokens, for 512 rows.
Margin: 0.05 nats, stated before any run.
Cost: 9 runs, 92 million tokens; 11 minutes a run on one core, 57 minutes in two parts with one core each.
Result: dynamic 4.100, static_1 8.189 (higher), static_10 4.143 (higher: +0.043, t interval +0.019 to +0.066), on 29
books with 0.47 million tokens for training: docs/log/analysis.md, 2026-11-23, and docs/studies/masking_tiny.html.
Fair rows: with example_copies 1 the examples are the same in every epoch, so the levels read the same rows in the same
order, and differ only in their masks.
Format: with contiguous rows (full_sentences), as in the first version, a model of this size needs more than 4,000 steps
to become much better than unigrams.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Three levels of data.mask_copies, three seeds."""
    return Study(
        name="masking_tiny",
        base=config_lib.replace(
            presets.load_config("bert_tiny"),
            phases=(Phase(steps=10_000, seq_len=64, batch_size=16, learning_rate=2e-3, warmup_steps=200),),
            checkpoint=CheckpointConfig(every=2000, keep=1),
            log=LogConfig(every=100, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=2000, rows=512),
            objective={"pair": "none"},
            data={"format": "segment_pair", "example_copies": 1},
        ),
        factors={
            "masks": {
                "dynamic": {},
                "static_1": {"data": {"mask_copies": 1}},
                "static_10": {"data": {"mask_copies": 10}},
            }
        },
        margins={"mlm_loss": 0.05},
        rows=HeldOutRows("full_sentences", 64, 512),
    )
