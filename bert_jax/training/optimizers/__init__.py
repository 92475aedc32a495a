"""Optimizers, rules per parameter, and learning-rate schedules.

An optimizer is a module of this package with a description, `OPTIMIZER`; its name is listed in `OptimizerConfig.name`.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class OptimizerDescription(NamedTuple):
    """What distinguishes an optimizer. Clipping, weight decay, frozen parameters, skipped steps and metrics are common
    to all (`optimizer.py`).
    """

    transform: Callable[..., Any]
    """(OptimizerConfig, tree of ParamRule) to an optax.GradientTransformation: from clipped gradients to directions
    without learning rate and weight decay. Its state has a `count` of steps and arrays of the parameters' shapes."""
    moments: int
    """Float32 arrays in the state per parameter."""
    step_bytes: float
    """Bytes that a step reads and writes per parameter: gradient, moments and weights."""
    is_adapted: Callable[..., bool] | None = None
    """(OptimizerConfig, ParamRule): whether a parameter has a trust ratio; None: no parameter has one."""
    trust_ratio: Callable[..., Any] | None = None
    """(OptimizerConfig, sums of squares of weights, of updates) to the factor of each logical tensor's update."""


def describe(name: str) -> OptimizerDescription:
    """The description of the optimizer with this name, a value of `OptimizerConfig.name`."""
    return importlib.import_module(f"{__name__}.{name}").OPTIMIZER
