"""Parameters between a pretrained and a fine-tuned model.

The body is the encoder without its pooler: pooler and task head are those of the fine-tuned model at every point,
because a pretrained model has no task head, and some have no pooler.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import require
from bert_jax.training.param_paths import EMBEDDINGS, LAYERS, map_with_paths, name_leaves
from bert_jax.training.state import stack_depth
from bert_jax.training.task import Params

NOT_ARCHITECTURE = (
    *("initializer_range", "hidden_dropout", "attention_dropout", "attention", "compute_dtype", "dense_dtype"),
    *("remat", "scan_unroll"),
)
"""Fields of ModelConfig that do not change what a model computes from given parameters without dropout."""


def is_body(path: str) -> bool:
    """Whether a parameter belongs to the body."""
    return path.startswith("encoder/") and not path.startswith("encoder/pooler/")


def check_same_architecture(config: ModelConfig, base: ModelConfig, flag: str) -> None:
    """Raise UserError that names the first field in which the two differ; `flag` names the base."""
    for field in dataclasses.fields(ModelConfig):
        mine, other = getattr(config, field.name), getattr(base, field.name)
        require(
            mine == other or field.name in NOT_ARCHITECTURE,
            f"{flag} has {field.name} {other}, the model {mine}: give the model that it was fine-tuned from",
        )


def with_body_of(params: Params, base: Params) -> Params:
    """The parameters with the body of another model of the same architecture, bit for bit; NumPy arrays."""
    base_leaves = name_leaves(base)
    return map_with_paths(lambda path, leaf: np.asarray(base_leaves[path] if is_body(path) else leaf), params)


def num_stages(params: Params) -> int:
    """Largest `stages` of `restore_early`: the embeddings, each layer (ALBERT: each set of parameters)."""
    return 1 + stack_depth(params)


def restore_early(params: Params, base: Params, stages: int) -> Params:
    """Set the first parts of the body back to those of another model.

    Args:
      params: of the fine-tuned model; not changed.
      base: of the pretrained model.
      stages: 0: none; 1: the embeddings; 1 + k: also the first k layers; with all layers, all else of the body too
        (the final norm), so that the body is that of `base` bit for bit.
    """
    if stages == num_stages(params):
        return with_body_of(params, base)
    base_leaves = name_leaves(base)

    def choose(path: str, leaf: np.ndarray) -> np.ndarray:
        leaf = np.asarray(leaf)
        if path.startswith(EMBEDDINGS) and stages >= 1:
            return np.asarray(base_leaves[path])
        if path.startswith(LAYERS) and stages > 1:
            return np.concatenate([np.asarray(base_leaves[path])[: stages - 1], leaf[stages - 1 :]])
        return leaf

    return map_with_paths(choose, params)


def point_on_plane(params: Params, base: Params, direction: Params | None, alpha: float, beta: float = 0.0) -> Params:
    """The body base + alpha (fine-tuned - base) + beta direction; pooler and heads are those of `params`.

    At beta 0, alpha 0 is the base and alpha 1 the fine-tuned model, bit for bit.

    Args:
      params: of the fine-tuned model.
      base: of the pretrained one.
      direction: tree with the body's paths at least; None for beta 0.
      alpha, beta: coordinates.
    """
    base_leaves = name_leaves(base)
    directions = {} if direction is None else name_leaves(direction)

    def move(path: str, leaf: np.ndarray) -> np.ndarray:
        leaf = np.asarray(leaf)
        if not is_body(path):
            return leaf
        value = np.float32(1 - alpha) * np.asarray(base_leaves[path]) + np.float32(alpha) * leaf
        return value + np.float32(beta) * directions[path] if beta else value

    return map_with_paths(move, params)


def direction_to(other: Params, base: Params) -> Params:
    """other - base of the body, zeros elsewhere."""
    other_leaves = name_leaves(other)
    return _of_body(base, lambda path, leaf: np.asarray(other_leaves[path]) - leaf)


def random_direction(params: Params, base: Params, seed: int) -> Params:
    """A random direction of the body, as long as the change by fine-tuning.

    Normal values, with the length of each filter proportional to that of the base (filter normalisation, Li et al.
    2018, arXiv:1712.09913), zeros for biases and norms; then the whole is as long as fine-tuned - base, so that both
    axes of the plane have one unit. A filter is the weights of one output unit, or the row of one token or position in
    a table.
    """
    rng = np.random.default_rng(seed)

    def draw(path: str, leaf: np.ndarray) -> np.ndarray:
        if path.endswith(("/bias", "/scale")):
            return np.zeros_like(leaf)
        noise = rng.standard_normal(leaf.shape, np.float32)
        axes = _input_axes(path, leaf.ndim)
        length, wanted = (np.sqrt(np.square(x).sum(axes, keepdims=True)) for x in (noise, leaf))
        return noise * (wanted / length)

    direction = _of_body(base, draw)
    factor = np.float32(_length(direction_to(params, base)) / _length(direction))
    return map_with_paths(lambda _, leaf: leaf * factor, direction)


def _input_axes(path: str, ndim: int) -> tuple[int, ...]:
    """The axes of a tensor over which a filter runs."""
    if not path.endswith("/kernel"):
        return (ndim - 1,)
    first = int(path.startswith(LAYERS))
    return tuple(range(first, first + (2 if path.endswith("attention_out/kernel") else 1)))


def _of_body(base: Params, use: Callable[[str, np.ndarray], np.ndarray]) -> Params:
    return map_with_paths(
        lambda path, leaf: use(path, np.asarray(leaf)) if is_body(path) else np.zeros_like(leaf, np.float32), base
    )


def _length(tree: Params) -> float:
    return float(np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in name_leaves(tree).values())))
