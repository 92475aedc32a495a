"""Optimizers, rules per parameter, and learning-rate schedules.

An optimizer is a module of this package with a description, `OPTIMIZER`; its name is listed in `OptimizerConfig.name`.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class UpdateCost(NamedTuple):
    """What an optimizer needs per parameter."""

    moments: int
    """Float32 arrays in the state."""
    step_bytes: float
    """Bytes that a step reads and writes: gradient, moments and weights."""


class OptimizerDescription(NamedTuple):
    """What distinguishes an optimizer. Clipping, weight decay, frozen parameters, skipped steps and metrics are common
    to all (`optimizer.py`).
    """

    transform: Callable[..., Any]
    """(OptimizerConfig, tree of ParamRule) to an optax.GradientTransformation: from clipped gradients to directions
    without learning rate and weight decay. Its state has a `count` of steps and arrays of the parameters' shapes."""
    cost: UpdateCost
    is_adapted: Callable[..., bool] | None = None
    """(OptimizerConfig, ParamRule): whether a parameter has a trust ratio; None: no parameter has one."""
    trust_ratio: Callable[..., Any] | None = None
    """(OptimizerConfig, norms.TensorUpdate) to the factor of each logical tensor's update."""
    matrix_cost: UpdateCost | None = None
    """Of matrices of layers (`ParamRule.input_axes`); None: as of all others."""
    matrix_flops: Callable[..., float] = lambda rule, shape: 0.0
    """(ParamRule, shape) to the FLOPs of matrix products in the update of a parameter."""


def describe(name: str) -> OptimizerDescription:
    """The description of the optimizer with this name, a value of `OptimizerConfig.name`."""
    return importlib.import_module(f"{__name__}.{name}").OPTIMIZER
