"""Two equal levels with different seeds, a check of the procedure: minutes on two CPU cores.

Question: does a study find a difference where there is none? Both levels are the baseline of nsp_tiny with half its
steps; the second one has the seeds 100, 101 and 102, so its runs are not paired with those of the first.
Expected: undecided or equal; a difference would be found in at most 5 of 100 such studies.
Command: bert-jax ablate aa_tiny --corpus DIR --workdir DIR
Size: 5,000 steps of 16 rows of 64 tokens, 5.1 million tokens in a run: 20 epochs of a corpus of 0.25 million tokens,
or 10 of 0.5 million, with a vocabulary of about 4,000. Hold out at least 35,000 tokens, for 512 rows.
Margin: 0.05 nats, stated before any run.
Cost: 6 runs, 31 million tokens: 24 minutes in two parts with one core each, beside other work.
Result: undecided, -0.040 (-0.155 to +0.075); docs/log/analysis.md, 2026-11-23; report: docs/studies/aa_tiny.html.
"""

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Two equal levels, three seeds each."""
    return Study(
        name="aa_tiny",
        base=config_lib.replace(
            presets.load_config("bert_tiny"),
            phases=(Phase(steps=5000, seq_len=64, batch_size=16, learning_rate=2e-3, warmup_steps=200),),
            checkpoint=CheckpointConfig(every=1000, keep=1),
            log=LogConfig(every=100, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=1000, rows=512),
            objective={"pair": "none"},
        ),
        factors={"level": {"a": {}, "b": {"seed": 100}}},
        margins={"mlm_loss": 0.05},
        rows=HeldOutRows("full_sentences", 64, 512),
    )
