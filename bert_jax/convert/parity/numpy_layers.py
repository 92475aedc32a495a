"""Layers in numpy and float64, on weights that are read by name and only while they are used.

Slow and simple on purpose: nothing of bert_jax.model is used, so that the two sides share no code.
Shapes in names: B rows, S queries, T keys, N heads, D head size.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import erf

from bert_jax.convert.forward_types import may_be_unused
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + erf(x / np.sqrt(2.0))) / 2.0


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))) / 2.0


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + np.tanh(x / 2.0)) / 2.0


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": _gelu,
    "gelu_python": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_accurate": _gelu_tanh,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "silu": _silu,
    "swish": _silu,
    "tanh": np.tanh,
}
"""By the names of transformers' activations.py."""


class Weights:
    """The tensors of a model, cast to float64 one at a time, with a record of which were read."""

    def __init__(self, hf_model: HuggingFaceModel):
        self.hf_model, self._names, self._read = hf_model, set(hf_model.tensors), set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str) -> np.ndarray:
        """A tensor, float64.

        Raises:
          UserError: it is missing.
        """
        if name not in self._names:
            raise UserError(f"{self.hf_model.source}: tensor '{name}' is missing")
        self._read.add(name)
        return np.asarray(self.hf_model.tensors[name], np.float64)

    def dense(self, name: str, x: np.ndarray, *, bias: bool = True) -> np.ndarray:
        """x W^T + b over the last axis."""
        y = x @ self(f"{name}.weight").T
        return y + self(f"{name}.bias") if bias else y

    def norm(self, name: str, x: np.ndarray, epsilon: float, *, bias: bool = True) -> np.ndarray:
        """LayerNorm of the last axis (Ba et al. 2016)."""
        variance = x.var(-1, keepdims=True)
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + epsilon) * self(f"{name}.weight")
        return y + self(f"{name}.bias") if bias else y

    def activation(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """A function by its name in a config.

        Raises:
          UserError: the activation is not in ACTIVATIONS.
        """
        if name not in ACTIVATIONS:
            raise UserError(f"{self.hf_model.source}: activation '{name}' is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def embedding_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of a table.

        Raises:
          UserError: an id is outside it.
        """
        table = self(name)
        if ids.min() < 0 or ids.max() >= len(table):
            raise UserError(f"{self.hf_model.source}: id {ids.max()} is outside '{name}', which has {len(table)} rows")
        return table[ids]

    def unused_tensors(self) -> tuple[str, ...]:
        """Names of tensors that were not read, without those that `may_be_unused`."""
        return tuple(sorted(name for name in self._names - self._read if not may_be_unused(name)))


def split_heads(x_BSH: np.ndarray, num_heads: int) -> np.ndarray:
    """[B, S, N x D] to [B, N, S, D]."""
    rows, length, width = x_BSH.shape
    return x_BSH.reshape(rows, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def attend(query_BNSD: np.ndarray, key_BNTD: np.ndarray, value_BNTD: np.ndarray, visible_BST: np.ndarray) -> np.ndarray:
    """Softmax attention with its heads joined again, [B, S, N x D] (Vaswani et al. 2017, section 3.2).

    Args:
      query_BNSD: queries.
      key_BNTD: keys.
      value_BNTD: values.
      visible_BST: bool; a query that sees no key gets the mean of all values.
    """
    scores_BNST = query_BNSD @ key_BNTD.swapaxes(-1, -2) / np.sqrt(query_BNSD.shape[-1])
    scores_BNST = np.where(visible_BST[:, None], scores_BNST, np.finfo(np.float32).min)
    weights_BNST = np.exp(scores_BNST - scores_BNST.max(-1, keepdims=True))
    weights_BNST /= weights_BNST.sum(-1, keepdims=True)
    mixed_BSND = (weights_BNST @ value_BNTD).transpose(0, 2, 1, 3)
    return mixed_BSND.reshape(*mixed_BSND.shape[:2], -1)


def rotate(x_BNSD: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions from 0; dimension i is paired with i + D/2 (Su et al. 2021; rotate_half of transformers)."""
    length, size = x_BNSD.shape[-2:]
    frequencies = base ** (-np.arange(0, size, 2) / size)
    angles_SD = np.tile(np.arange(length)[:, None] * frequencies, 2)
    first, second = np.split(x_BNSD, 2, axis=-1)
    return x_BNSD * np.cos(angles_SD) + np.concatenate([-second, first], -1) * np.sin(angles_SD)
