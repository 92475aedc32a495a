"""The training state, and deeper models from shallower ones by repeating the layer stack (Gong et al. 2019)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.data.cursor import Cursor
from bert_jax.training.divergence import DivergenceState
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.task import Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a train step reads and writes."""

    step: Any
    """Steps done, an int32 scalar. Any: the leaves can also be shapes, shardings or specs."""
    params: Params
    """Nested dict of float32 arrays."""
    optimizer: Any
    """Moments, and the step count for bias correction: an optax state with a field `count`."""
    divergence: DivergenceState
    """Loss average and counts of skipped steps."""
    average: Any = None
    """Moving average of the parameters (`optimizer.ema_decay`), or None."""

    @property
    def evaluated_params(self) -> Params:
        """The parameters that are evaluated and exported."""
        return self.params if self.average is None else self.average


class Moments(NamedTuple):
    """Optimizer state of Adam or LAMB: trees with the shapes of the parameters; numpy, float32."""

    step: int
    """Steps done, for bias correction."""
    mu: Params
    nu: Params


class InitialParams(NamedTuple):
    """Initial parameters and optimizer state of a run: numpy arrays with the shapes of its first phase."""

    params: Params
    optimizer_state: Moments | None = None
    """None: a new one."""


class Fork(NamedTuple):
    """A checkpoint of another run that a run continues, as if its steps were the run's own."""

    checkpoint: str
    """Path of an intact one."""
    metadata: dict[str, Any]
    """Saved with it."""
    cursor: Cursor
    """Its position in the stream, with the run's corpora."""


def repeat_stack(stack: Any, depth: int) -> Any:
    """The layers of a stack for a model with another depth.

    Layer l of the result is a copy of layer l mod L: a deeper model repeats the block of all L layers in its order
    (gonglinyuan/StackingBERT), it does not double each layer in place; a shallower one takes the first layers. The
    function that the model computes changes.

    Args:
      stack: array [L, ...].
      depth: number of layers of the result.
    """
    return stack if len(stack) == depth else stack[np.arange(depth) % len(stack)]


def repeat_layers(tree: Any, like: Any) -> Any:
    """Parameters, or an optimizer's state, with every layer stack repeated up to its depth in another tree; all other
    arrays are unchanged.

    Args:
      tree: arrays; the leading axis of those under ``layers`` is the layers, or the groups that layers share.
      like: the same tree with the shapes of the result.
    """
    depths = {path: leaf.shape[0] for path, leaf in name_leaves(like).items() if "/layers/" in path}
    return map_with_paths(lambda path, x: repeat_stack(x, depths[path]) if path in depths else x, tree)


def stack_depth(params: Any) -> int:
    """Length of the leading axis of the layer stack; only shapes are read."""
    return jax.tree.leaves(params["encoder"]["layers"])[0].shape[0]
