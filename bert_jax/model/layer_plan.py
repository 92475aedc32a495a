"""The layer plan: what differs between the layers of one encoder, and how it repeats.

Plain BERT, ALBERT's single parameter group and ModernBERT's alternation of local and global attention
are three plans of one encoder, not three encoders.
"""

import enum
from dataclasses import dataclass

from bert_jax.config import ModelConfig


class NormPlacement(enum.Enum):
    """Where a layer normalises its hidden states."""

    POST = "post"
    """After each residual sum (Devlin et al. 2019)."""
    PRE = "pre"
    """Before each sub-layer (Xiong et al. 2020)."""
    PRE_FEED_FORWARD = "pre_feed_forward"
    """Before the feed-forward only: the first layer of a pre-norm stack, whose input the embeddings have already
    normalised (Warner et al. 2024). Its attention norm is an unused entry of the stacked parameters."""


@dataclass(frozen=True)
class LayerPlan:
    """The properties of one layer; layers with equal plans share one compiled body."""

    norm_placement: NormPlacement
    window: int | None
    """Tokens that a query attends to on each side; None: all."""
    rotary_base: float | None
    """Base of the rotary wavelengths; None: no rotary position embedding."""


@dataclass(frozen=True)
class ScanPlan:
    """A sequence of plans, written as `prefix + body * repeats`."""

    prefix: tuple[LayerPlan, ...]
    body: tuple[LayerPlan, ...]
    repeats: int


def layer_plans(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every layer, bottom first."""
    plans = []
    for layer in range(config.num_layers):
        is_global = config.attention_window is None or layer % config.global_every == 0
        if config.norm_placement == "post":
            norm_placement = NormPlacement.POST
        else:
            norm_placement = NormPlacement.PRE if layer else NormPlacement.PRE_FEED_FORWARD
        rotary_base = None
        if config.positions == "rotary":
            rotary_base = config.rotary_base if is_global else config.local_rotary_base
        plans.append(LayerPlan(norm_placement, None if is_global else config.attention_window, rotary_base))
    return tuple(plans)


def parameter_groups(config: ModelConfig) -> tuple[int, ...]:
    """Index of the parameter group of every layer (Lan et al. 2020, section 3.1: consecutive layers share one)."""
    groups = config.parameter_groups or config.num_layers
    return tuple(layer * groups // config.num_layers for layer in range(config.num_layers))


def count_last_layer_positions(num_layers: int, read: int, length: int) -> int:
    """Number of positions of a row that the last layer computes.

    Args:
      num_layers: of the encoder.
      read: positions whose final hidden vectors are read: those of predicted tokens, and of [CLS] for a pooler.
      length: of the row, all of which is computed if more than half is read.
    """
    return read if 2 * read <= length and num_layers > 1 else length


def split_prefix_and_scan_body(plans: tuple[LayerPlan, ...]) -> ScanPlan:
    """The decomposition with the fewest layers in prefix and body together: those are traced and compiled."""
    total = len(plans)
    for bodies in range(1, total + 1):
        for prefix in range(bodies):
            period = bodies - prefix
            rest = plans[prefix:]
            if len(rest) % period == 0 and rest == rest[:period] * (len(rest) // period):
                return ScanPlan(plans[:prefix], rest[:period], len(rest) // period)
    raise AssertionError("every sequence is a body with one repeat")
