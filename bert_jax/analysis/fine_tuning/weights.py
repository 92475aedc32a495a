"""Parameters between a pretrained and a fine-tuned model.

The body is the encoder without its pooler: pooler and task head are those of the fine-tuned model at every point,
because a pretrained model has no task head, and some have no pooler.
"""

import dataclasses

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


def point_on_line(params: Params, base: Params, alpha: float) -> Params:
    """The body base + alpha (fine-tuned - base); pooler and heads are those of `params`.

    Alpha 0 is the base and alpha 1 the fine-tuned model, bit for bit.

    Args:
      params: of the fine-tuned model.
      base: of the pretrained one.
      alpha: coordinate.
    """
    base_leaves = name_leaves(base)

    def move(path: str, leaf: np.ndarray) -> np.ndarray:
        leaf = np.asarray(leaf)
        if not is_body(path):
            return leaf
        return np.float32(1 - alpha) * np.asarray(base_leaves[path]) + np.float32(alpha) * leaf

    return map_with_paths(move, params)
