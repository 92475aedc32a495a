"""Config of a run with every schedule: a causal phase, then masked ones; a mask rate that rises along the second phase,
and one that falls along the third, which has longer rows and larger rotary bases.
"""

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    ObjectiveConfig,
    Phase,
)

STEPS = (5, 4, 6)
"""Of each phase."""


def config() -> Config:
    """A run of 15 steps with a checkpoint every 4."""
    size = {"vocab_size": 120, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    positions = {"positions": "rotary", "attention_window": 6, "global_every": 2, "rotary_base": 400.0}
    short = {"seq_len": 24, "batch_size": 8, "rotary_base": 100.0, "local_rotary_base": 30.0}
    rows = {"learning_rate": 5e-3, "warmup_steps": 1}
    return Config(
        name="schedules",
        model=ModelConfig(**size, max_positions=48, **positions),
        objective=ObjectiveConfig(pair="none", mask_rate=0.2),
        data=DataConfig(format="doc_sentences", examples_per_row=4, prefetch=2),
        phases=(
            Phase(steps=STEPS[0], **short, **rows, direction="causal"),
            Phase(steps=STEPS[1], **short, **rows, end_mask_rate=0.4),
            Phase(steps=STEPS[2], seq_len=48, batch_size=4, **rows, mask_rate=0.3, end_mask_rate=0.05),
        ),
        checkpoint=CheckpointConfig(every=4, keep=9),
        log=LogConfig(every=1, tensorboard=False),
        evaluation=EvaluationConfig(every=5, rows=8, batch_size=8),
    )
