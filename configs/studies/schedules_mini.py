"""A mask rate that falls, and causal before masked language modelling, against 15 % masks: bert_mini, two CPU cores.

Papers: Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining" (30 to 15 %); Gisserot-Boukhlef et al.
2025, "Should We Still Pretrain Encoders with Masked Language Modeling?" (causal, then masked).
Question: that of `schedules_tiny` for a model of twice its depth and width: does either schedule lower the held-out MLM
loss at equal tokens?
Published: see `schedules_tiny`.
Command: bert-jax ablate schedules_mini --corpus DIR --workdir DIR
Size: 4,000 steps of 16 rows of 64 tokens, 4.1 million tokens in a run, a vocabulary of 8,192.
Margin: 0.05 nats, stated before any run.
Cost: 9 runs, 37 million tokens; about 20 minutes a run on one core.
Result: 6.409 with 15 % (two of three runs stay at the unigram loss, 6.51 to 6.54), 5.933 falling from 30 to 5 %
(undecided: -0.476, t interval -1.071 to +0.119), 4.511 causal and then masked (lower: -1.898, -2.457 to -1.338), on the
books: docs/log/analysis.md, 2026-11-29, and docs/studies/schedules_mini.html. As in `schedules_tiny`, it says what a
short run gains.
Rates: 1e-3, that of bert_tiny divided by the ratio of the widths; initial weights of 1 / sqrt(256). Not swept.
FLOPs: not equal. Causal rows predict every token, so causal_half has 1.25 times those of constant_15; falling 1.08.
Fair rows: all levels read the same rows in the same order; held-out rows always have 15 % of their tokens masked.
Schedule: one warmup and one linear decay over all steps; causal_half begins its second phase at half of the peak.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

WHOLE = {"seq_len": 64, "batch_size": 16}


def study() -> Study:
    """Three schedules, three seeds."""
    half = 2000
    causal = Phase(
        steps=half, learning_rate=1e-3, end_learning_rate=5e-4, warmup_steps=240, direction="causal", **WHOLE
    )
    return Study(
        name="schedules_mini",
        base=config_lib.replace(
            presets.load_config("bert_mini"),
            model={
                "vocab_size": 8192,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "initializer_range": 0.0625,
            },
            phases=(Phase(steps=2 * half, learning_rate=1e-3, warmup_steps=240, **WHOLE),),
            checkpoint=CheckpointConfig(every=1000, keep=1),
            log=LogConfig(every=100, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=1000, rows=512),
            objective={"pair": "none", "mask_rate": 0.15},
            data={"format": "doc_sentences", "example_end": "row"},
        ),
        factors={
            "schedule": {
                "constant_15": {},
                "falling": {"phases": {"mask_rate": 0.3, "end_mask_rate": 0.05}},
                "causal_half": {"phases": (causal, Phase(steps=half, learning_rate=5e-4, warmup_steps=0, **WHOLE))},
            }
        },
        margins={"mlm_loss": 0.05},
        rows=HeldOutRows("full_sentences", 64, 512),
    )
