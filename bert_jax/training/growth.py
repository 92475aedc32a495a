"""Deeper models from shallower ones: the stack of layers is repeated (Gong et al. 2019)."""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.training.paths import map_with_table


def repeat_layers(tree: Any, like: Any) -> Any:
    """Parameters, or their moments, for a model of another depth.

    Layer l of the result is a copy of layer l mod L: a deeper model repeats the block of all L layers in its order
    (gonglinyuan/StackingBERT), it does not double each layer in place; a shallower one takes the first layers. All
    else stays as it is. The function that the model computes changes.

    Args:
      tree: arrays; those under ``layers`` have the layers on their leading axis.
      like: tree of the same structure with the shapes that are wanted.

    Raises:
      ValueError: other shapes differ, too.
    """

    def repeated(x: jax.Array, wanted: Any) -> jax.Array:
        return x if x.shape == wanted.shape else x[jnp.arange(wanted.shape[0]) % x.shape[0]]

    def same(x: jax.Array, wanted: Any) -> jax.Array:
        if x.shape != wanted.shape:
            raise ValueError(f"an array of shape {x.shape} cannot become {wanted.shape}: only layers can be repeated")
        return x

    rules = ((r"layers/.*", repeated), (r".*", same))
    chosen = map_with_table(rules, lambda rule, _: rule, tree)
    return jax.tree.map(lambda rule, x, wanted: rule(x, wanted), chosen, tree, like)
