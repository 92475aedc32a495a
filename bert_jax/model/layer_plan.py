"""The per-layer plan: what differs between the layers of one encoder, and how it repeats.

Plain BERT, ALBERT's single parameter group and ModernBERT's alternation of local and global attention
are three plans of one encoder, not three encoders.
"""

import enum
from dataclasses import dataclass

from bert_jax.config import ModelConfig


class NormPlacement(enum.Enum):
    """Where a layer normalises."""

    POST = "post"
    """After each residual sum (Devlin et al. 2019)."""
    PRE = "pre"
    """Before each sub-layer (Xiong et al. 2020)."""
    PRE_FEED_FORWARD = "pre_feed_forward"
    """Before the feed-forward only: the first layer of a pre-norm stack, whose input the embeddings have
    just normalised (Warner et al. 2024). Its attention norm stays in the stack, unused."""


@dataclass(frozen=True)
class LayerPlan:
    """What is particular to one layer; equal plans can share one compiled body."""

    norm: NormPlacement
    window: int | None
    """Tokens seen to each side; None sees all."""
    rotary_base: float | None
    """None: no rotary positions."""


@dataclass(frozen=True)
class Repetition:
    """Layers [0, prefix) stand alone; the rest is `body` repeated."""

    prefix: tuple[LayerPlan, ...]
    body: tuple[LayerPlan, ...]
    repeats: int


def layer_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every layer, bottom first."""
    plans = []
    for layer in range(config.num_layers):
        everywhere = config.attention_window is None or layer % config.global_every == 0
        if config.norm_placement == "post":
            norm = NormPlacement.POST
        else:
            norm = NormPlacement.PRE if layer else NormPlacement.PRE_FEED_FORWARD
        rotary_base = None
        if config.positions == "rotary":
            rotary_base = config.rotary_base if everywhere else config.local_rotary_base
        plans.append(LayerPlan(norm, None if everywhere else config.attention_window, rotary_base))
    return tuple(plans)


def parameter_groups(config: ModelConfig) -> tuple[int, ...]:
    """Which parameter set each layer uses (Lan et al. 2020, section 3.1: consecutive layers share)."""
    groups = config.parameter_groups or config.num_layers
    return tuple(layer * groups // config.num_layers for layer in range(config.num_layers))


def find_repetition(plans: tuple[LayerPlan, ...]) -> Repetition:
    """The decomposition with the fewest distinct layer bodies; fewer means less to compile."""
    total = len(plans)
    for bodies in range(1, total + 1):
        for prefix in range(bodies):
            period = bodies - prefix
            rest = plans[prefix:]
            if len(rest) % period == 0 and rest == rest[:period] * (len(rest) // period):
                return Repetition(plans[:prefix], rest[:period], len(rest) // period)
    raise AssertionError("a sequence is its own single repetition")
