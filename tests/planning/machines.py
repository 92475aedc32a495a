"""A small run and a chip with round figures, for expected values computed by hand."""

import dataclasses
from typing import Any

from bert_jax.chips import Chip, Efficiency
from bert_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, Phase

CHIP = Chip(
    "round",
    device_kinds=("Round",),
    peak_flops=1e12,
    float32_share=0.5,
    float8_share=2.0,
    vector_ops=1e11,
    memory_bandwidth=1e10,
    memory=1e9,
    link_bandwidth=1e9,
    torus_dimensions=2,
    ring_size=4,
    network_bandwidth=1e8,
    clock=1e9,
    efficiency=Efficiency(0.5, 1.0, 1.0, 1.0, 1.0),
)


def run(batch: int = 8, seq_len: int = 16, optimizer: str = "adamw", phase: dict[str, Any] | None = None, **model: Any):
    """Two layers of width 8, two heads, feed-forward 16, vocabulary 96; rows of one example."""
    sizes = {"vocab_size": 96, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 16}
    settings = sizes | {"max_positions": 64, "compute_dtype": "bfloat16"} | model
    return Config(
        name="small",
        model=ModelConfig(**settings),
        objective=ObjectiveConfig(pair="none"),
        data=DataConfig(examples_per_row=1),
        optimizer=OptimizerConfig(name=optimizer),
        phases=(Phase(seq_len=seq_len, batch_size=batch, steps=10, **(phase or {})),),
    )


def chip_with(**figures: float) -> Chip:
    """The chip with other figures."""
    return dataclasses.replace(CHIP, **figures)
