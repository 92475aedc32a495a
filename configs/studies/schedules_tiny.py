"""A mask rate that falls, and causal before masked language modelling, against 15 % masks: minutes on two CPU cores.

Papers: Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining" (30 to 15 %); Gisserot-Boukhlef et al.
2025, "Should We Still Pretrain Encoders with Masked Language Modeling?" (causal, then masked).
Question: does either schedule lower the held-out MLM loss at equal tokens?
Published: with BERT-base, a rate that falls from 30 to 15 % gains 0.46 points of GLUE over 15 %; of one budget,
part causal and then masked training is better than masked training alone, for models of 210M to 1B parameters.
Command: bert-jax ablate schedules_tiny --corpus DIR --workdir DIR
Size: 3,000 steps of 16 rows of 64 tokens, 3.1 million tokens in a run.
Margin: 0.05 nats, stated before any run.
Cost: 12 runs, 37 million tokens; 6 to 14 minutes a run on one shared core.
Result: 5.629 with 15 %, 5.593 with 30 %, 5.630 falling from 30 to 5 % (both equal within the margin), 4.352 causal and
then masked (lower: -1.277, t interval -1.481 to -1.073), on 25 books with 3.5 million tokens for training. By
then the masked models are still worse than a bigram model of the text (4.23 nats); the causal ones are at 4.4 after
1,000 steps. So this says what a short run gains, and nothing about long ones: docs/log/analysis.md, 2026-11-28,
and docs/studies/schedules_tiny.html.
FLOPs: not equal. Causal rows predict every token, so causal_half has 1.44 times those of constant_15; 30 %, at any time
of a run, gives rows room for as many predictions, which makes it 1.15.
Fair rows: all levels read the same rows in the same order; held-out rows always have 15 % of their tokens masked.
Schedule: one warmup and one linear decay over all steps; causal_half begins its second phase at half of the peak.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study

WHOLE = {"seq_len": 64, "batch_size": 16}


def study() -> Study:
    """Four schedules, three seeds."""
    half = 1500
    return Study(
        name="schedules_tiny",
        base=config_lib.replace(
            presets.load_config("bert_tiny"),
            phases=(Phase(steps=2 * half, learning_rate=2e-3, warmup_steps=180, **WHOLE),),
            checkpoint=CheckpointConfig(every=1000, keep=1),
            log=LogConfig(every=100, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=1000, rows=512),
            objective={"pair": "none", "mask_rate": 0.15},
            data={"format": "doc_sentences", "example_end": "row"},
        ),
        factors={
            "schedule": {
                "constant_15": {},
                "constant_30": {"phases": {"mask_rate": 0.3}},
                "falling": {"phases": {"mask_rate": 0.3, "end_mask_rate": 0.05}},
                "causal_half": {
                    "phases": (
                        Phase(
                            steps=half,
                            learning_rate=2e-3,
                            end_learning_rate=1e-3,
                            warmup_steps=180,
                            direction="causal",
                            **WHOLE,
                        ),
                        Phase(steps=half, learning_rate=1e-3, warmup_steps=0, **WHOLE),
                    )
                },
            }
        },
        margins={"mlm_loss": 0.05},
        rows=HeldOutRows("full_sentences", 64, 512),
    )
