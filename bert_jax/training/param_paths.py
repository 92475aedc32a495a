"""Paths of leaves in a tree, and tables of (pattern, value) that every leaf must match."""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

EMBEDDINGS, LAYERS, GENERATOR = "encoder/embeddings/", "encoder/layers/", "generator/"
"""Beginnings of the paths of the embeddings' parameters, of the stacked ones of the layers, and of those of a
generator."""


def name_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by slash-separated path, e.g. ``encoder/layers/qkv/kernel``, in tree order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def params_sha256(params: Any, about: str = "") -> str:
    """Hex SHA-256 of a text about parameters, and of their paths, types, shapes and values."""
    digest = hashlib.sha256(about.encode())
    for name, array in name_leaves(params).items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).data)
    return digest.hexdigest()


def map_with_paths(use: Callable[[str, Any], Any], tree: Any) -> Any:
    """``use(path, leaf)`` for every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: use(path_name(path), leaf), tree)


def path_name(path: tuple[Any, ...]) -> str:
    """A jax key path as a string, e.g. ``encoder/layers/qkv/kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def map_with_table(table: Sequence[tuple[str, Any]], use: Callable[[Any, Any], Any], tree: Any) -> Any:
    """``use(value, leaf)`` for every leaf, with the value of the first pattern that matches the end of its path.

    Raises:
      LookupError: no pattern matches a leaf. There is no default, so that a new parameter needs a rule.
    """

    def apply(name: str, leaf: Any) -> Any:
        for pattern, value in table:
            if re.search(rf"(^|/)(?:{pattern})$", name):
                return use(value, leaf)
        raise LookupError(f"no rule matches parameter '{name}': add it to the table")

    return map_with_paths(apply, tree)
