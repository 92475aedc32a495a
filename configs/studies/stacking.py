"""Progressive stacking against training at full depth, at equal FLOPs.

Paper: Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking".
Question: is a model that grows from a quarter of its depth better than one of full depth that costs the same?
Published: the same quality in about 25 % less time.
Command: bert-jax ablate stacking --corpus DIR --workdir DIR
Recipe: bert_medium with one phase of 100,000 steps of 256 rows of 128 tokens; ours, not that of the papers.
Cost: 6 runs, 3.4e+18 FLOPs; 3 hours on one H100 by the roofline of bert-jax plan. Not run here.
Stages: 2, 4 and 8 layers for 1/8, 7/40 and 7/10 of the steps, as in the authors' code (gonglinyuan/StackingBERT:
50,000, 70,000 and 280,000). The learning rate is continuous over the stages and linear; moments are reset at each
doubling. The runner adjusts the steps of the level to the FLOPs of the baseline.
"""

import dataclasses

from bert_jax import config as config_lib
from bert_jax.config import Phase, presets
from bert_jax.experiments.study import HeldOutRows, Study


def study() -> Study:
    """Stacked against full depth."""
    base = config_lib.replace(
        presets.load_config("bert_medium"),
        phases=(Phase(steps=100_000, seq_len=128, batch_size=256, learning_rate=2e-4, warmup_steps=1000),),
    )
    return Study(
        name="stacking",
        base=base,
        factors={"depth": {"full": {}, "stacked": {"phases": _stages(base.phases[0])}}},
        margins={"mlm_loss": 0.02, "nsp_accuracy": 0.01},
        rows=HeldOutRows("full_sentences", 128, 2048),
        equal="flops",
    )


def _stages(phase: Phase) -> tuple[Phase, ...]:
    first, second = phase.steps // 8, phase.steps * 7 // 40
    # What is left of the learning rate at the end of each stage.
    rates = [phase.learning_rate * (1 - done / phase.steps) for done in (0, first, first + second)]
    reset = {"warmup_steps": 0, "moments": "reset", "step_count": "reset"}
    return (
        dataclasses.replace(phase, steps=first, num_layers=2, end_learning_rate=rates[1]),
        dataclasses.replace(
            phase, steps=second, num_layers=4, learning_rate=rates[1], end_learning_rate=rates[2], **reset
        ),
        dataclasses.replace(phase, steps=phase.steps - first - second, learning_rate=rates[2], **reset),
    )
