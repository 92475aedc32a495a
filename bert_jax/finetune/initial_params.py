"""Initial parameters of a fine-tuning run, from those of a source and newly initialised ones."""

import re
from typing import Any

import numpy as np

from bert_jax.errors import UserError, require
from bert_jax.training.param_paths import LAYERS, map_with_paths, name_leaves
from bert_jax.training.state import stack_depth
from bert_jax.training.task import Params

OPTIONAL = re.compile(r"encoder/(pooler/|layers/\w+_adapter/)|task/(mix|cls_norm)/")
"""Beginnings of the paths of parameters that a source may lack."""


def fit_params(
    source_params: Params, fresh_params: Params, *, new_layers: int, new_head: bool
) -> tuple[Params, list[str]]:
    """Take parameters from a source where a run keeps them, and new ones elsewhere.

    Encoder parameters are the source's. A pooler and adapters that it lacks are new, as are scalar mix and statistics
    of [CLS] that a kept head lacks. Heads of the source that the run does not have are not used.

    Args:
      source_params: of a pretrained or fine-tuned model.
      fresh_params: newly initialised, with the shapes of the run.
      new_layers: layers at the top that are new, as `reinitialize_top_layers` does.
      new_head: whether all parameters of the task head are new; False: they are the source's.

    Returns:
      numpy arrays in a tree like `fresh_params`, and the paths of the new ones; new top layers are one entry with their
      range, ``encoder/layers[10:12]``.

    Raises:
      UserError: the source lacks a part of the encoder, or of a head that is kept; a shape differs; `new_layers` is
        larger than the depth.
    """
    source, fresh = name_leaves(source_params), []

    def choose(path: str, leaf: Any) -> np.ndarray:
        is_head = not path.startswith("encoder/")
        if (is_head and new_head) or (path not in source and OPTIONAL.match(path)):
            fresh.append(path)
            return np.asarray(leaf)
        part = "task head" if is_head else "encoder"
        advice = "initialise a new head" if is_head else "use a checkpoint of the same architecture"
        require(path in source, f"the source has no {path}, which the run's {part} needs: {advice}")
        array = np.asarray(source[path])
        require(
            array.shape == leaf.shape,
            f"the source's {path} has shape {list(array.shape)}, the run's {part} needs {list(leaf.shape)}: {advice}",
        )
        return array

    params = map_with_paths(choose, fresh_params)
    if not new_layers:
        return params, fresh
    depth = stack_depth(params)
    params = reinitialize_top_layers(params, fresh_params, new_layers)
    poolers = [path for path in name_leaves(params) if path.startswith("encoder/pooler/") and path not in fresh]
    return params, [*fresh, *poolers, f"encoder/layers[{depth - new_layers}:{depth}]"]


def reinitialize_top_layers(params: Params, fresh_params: Params, count: int) -> Params:
    """Replace the top layers, and the pooler if there is one, by new ones (Zhang et al. 2021, section 5).

    Args:
      params: with the layers stacked on axis 0; not changed.
      fresh_params: newly initialised, with the same shapes.
      count: layers; if layers share parameters (ALBERT), sets of parameters.

    Raises:
      UserError: `count` is larger than the depth.
    """
    depth = stack_depth(params)
    if count > depth:
        raise UserError(f"--new-layers {count}: the source has {depth} layer(s): use at most {depth}")
    new = name_leaves(fresh_params)

    def replace(path: str, leaf: Any) -> Any:
        if path.startswith("encoder/pooler/"):
            return np.asarray(new[path])
        if not path.startswith(LAYERS):
            return leaf
        return np.concatenate([np.asarray(leaf)[: depth - count], np.asarray(new[path])[depth - count :]])

    return map_with_paths(replace, params)
