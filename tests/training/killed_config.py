"""Config of the runs that are killed: packed rows, two sets of masks, a batch ramp, two phases of which the second has
twice the layers, several epochs, dropout, LAMB, a checkpoint every 10 steps.
"""

from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    Phase,
    RecoveryConfig,
)


def config() -> Config:
    """A run of 60 steps, its 41st the first of the second phase."""
    model = {"vocab_size": 120, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    ramp = {"start_batch_size": 4, "ramp_steps": 24, "num_layers": 1, "warmup_steps": 5, "learning_rate": 2e-2}
    return Config(
        name="killed",
        model=ModelConfig(**model, max_positions=64),
        data=DataConfig(examples_per_row=4, mask_copies=2),
        phases=(
            Phase(steps=40, seq_len=32, batch_size=8, accumulation=2, **ramp),
            Phase(steps=20, seq_len=48, batch_size=6, accumulation=2, learning_rate=1e-2, warmup_steps=2),
        ),
        optimizer=OptimizerConfig(name="lamb"),
        recovery=RecoveryConfig(max_skipped=3, stable_steps=5),
        checkpoint=CheckpointConfig(every=10, keep=2),
        log=LogConfig(every=3, tensorboard=False),
        evaluation=EvaluationConfig(every=15, rows=8, batch_size=8),
    )
