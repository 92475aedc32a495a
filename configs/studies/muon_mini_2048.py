"""AdamW, LAMB and Muon at a batch of 2,048 rows: bert_mini on two CPU cores, a small form of `muon_batch`.

Papers: those of `muon_batch`.
Question: which optimizer reaches the lowest loss of a small masked LM at equal tokens?
Published: nothing for masked language models that is known to us.
Command: bert-jax ablate muon_mini_2048 --corpus DIR --workdir DIR
Size: 20.19 million tokens in a run: 77 causal and 231 masked steps of 2,048 rows of 32 tokens; one seed.
Margin: 0.02 nats, stated before any run.
Cost: 3 runs, 61 million tokens; 1.4 hours a run on one core (measured).
Rates: the best of `muon_rates_mini` at 256 rows, whose runs had about as many steps (320). The square root of 8 times
as large ones (You et al.) are near those that did not train there.
Causal first: a masked model of this size stays at the unigram loss for millions of tokens (`schedules_mini`).
Other settings: those of `muon_mini_256`, which this study is made from.
"""

import dataclasses

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, EvaluationConfig, LogConfig, Phase
from bert_jax.experiments.study import Study, load_study


def large(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Phases with an eighth of the steps, of 8 times as many rows."""
    return tuple(
        dataclasses.replace(
            phase,
            steps=phase.steps // 8,
            warmup_steps=phase.warmup_steps // 8,
            batch_size=8 * phase.batch_size,
            accumulation=8,
        )
        for phase in phases
    )


def study() -> Study:
    """Three optimizers, one seed."""
    small = load_study("muon_mini_256")
    levels = small.factors["optimizer"]
    return dataclasses.replace(
        small,
        name="muon_mini_2048",
        base=config_lib.replace(
            small.base,
            phases=large(small.base.phases),
            checkpoint=CheckpointConfig(every=77, every_minutes=5.0, keep=1),
            log=LogConfig(every=11, layers=False, tensorboard=False),
            evaluation=EvaluationConfig(every=22, rows=1024),
        ),
        factors={"optimizer": {name: level | {"phases": large(level["phases"])} for name, level in levels.items()}},
    )
