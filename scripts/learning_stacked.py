"""The stacked arm of scripts/learning_study.py: one layer, then two copies of it (Gong et al. 2019).

Its compute equals that of two layers for 3,264 steps, counted as in bert_jax/model/flops.py, for a row of 64 tokens:

    a layer        3 * 64 * 2 * 128 * (4 * 128 + 2 * 512) + 3 * 64 * 4 * 128 * 64   =  81,788,928
    the MLM head   3 * 19 * 2 * 128 * (128 + 8,192), 19 of 64 tokens being masked    = 121,405,440

A step with one layer costs 203,194,368 / 284,983,296 = 159 / 223 of a step with two, so 1,338 of them cost as much as
954 with two: 1,338 * 159 / 223 = 954, and 3,264 - 954 = 2,310 steps remain, exactly. The first stage has 37 % of the
steps and 29 % of the compute; the paper also spends most of its time at full depth.

The learning rate is continuous, decreasing linearly from its peak to 0 over both stages, with a warmup in the first
stage only. Moments are reset between the stages.
"""

import dataclasses

from bert_jax.config import Config
from bert_jax.config.presets import load_config

ONE_LAYER, TWO_LAYERS = 1338, 2310
"""Steps of the two stages."""
COST = 159 / 223
"""Cost of a step with one layer, in steps with two layers."""
RATE, WARMUP = 2e-3, 204
"""Same as in the arm that it is compared with (adamw_16)."""


def config() -> Config:
    """Config of both stages; settings shared by all arms are given as flags."""
    tiny = load_config("bert_tiny")
    rate_between = RATE * TWO_LAYERS / (ONE_LAYER + TWO_LAYERS)
    one = dataclasses.replace(
        tiny.phases[0],
        steps=ONE_LAYER,
        num_layers=1,
        learning_rate=RATE,
        warmup_steps=WARMUP,
        end_learning_rate=rate_between,
    )
    two = dataclasses.replace(
        one,
        steps=TWO_LAYERS,
        num_layers=2,
        learning_rate=rate_between,
        warmup_steps=0,
        end_learning_rate=0.0,
        moments="reset",
        step_count="reset",
    )
    return dataclasses.replace(tiny, name="bert_tiny_stacked", phases=(one, two))
