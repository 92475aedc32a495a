"""How similar two models are, on arrays. Leading axes, such as that of the hidden states, are independent."""

import numpy as np

from bert_jax.analysis.fine_tuning.weights import is_body
from bert_jax.array_types import Float
from bert_jax.training.param_paths import LAYERS, name_leaves
from bert_jax.training.task import Params


def linear_cka(x: Float[np.ndarray, "n H"], y: Float[np.ndarray, "n W"]) -> float:
    """Linear centred kernel alignment of vectors of the same n tokens (Kornblith et al. 2019, arXiv:1905.00414).

    1 if y is x up to rotation, scale and shift; it does not depend on these of either side. With n not much larger than
    the widths it is biased upwards, so compare only values of equal n.
    """
    x, y = (np.asarray(vectors, np.float64) for vectors in (x, y))
    x, y = x - x.mean(0), y - y.mean(0)
    between = np.square(x.T @ y).sum()
    norm = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(between / norm) if norm else 0.0


def mean_cosines(x: Float[np.ndarray, "*layers n H"], y: Float[np.ndarray, "*layers n H"]) -> np.ndarray:
    """Mean over vectors of the cosine of each with its counterpart; float64 [...]."""
    x, y = (np.asarray(vectors, np.float64) for vectors in (x, y))
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray(((x * y).sum(-1) / np.maximum(norms, 1e-30)).mean(-1))


def attention_cosines(x: Float[np.ndarray, "*heads S T"], y: Float[np.ndarray, "*heads S T"]) -> np.ndarray:
    """Cosine of each head's flattened map in two models; float64 [...].

    Kovaleva et al. (2019, arXiv:1908.08593) flatten maps that are padded with zeros, which do not change the cosine.

    Args:
      x, y: probabilities of one example, without padding.
    """
    flat_x, flat_y = (np.asarray(maps, np.float64).reshape(*maps.shape[:-2], 1, -1) for maps in (x, y))
    return mean_cosines(flat_x, flat_y)


def relative_parameter_changes(params: Params, base: Params) -> dict[str, float | list[float]]:
    """Length of the change of each tensor of the encoder's body, relative to the length in the base.

    A tensor that is zero in the base has the length of the change.

    Returns:
      by path; of stacked layers a list.
    """
    base_leaves, found = name_leaves(base), {}
    for path, leaf in name_leaves(params).items():
        if not is_body(path):
            continue
        after, before = (np.asarray(one, np.float64) for one in (leaf, base_leaves[path]))
        if not path.startswith(LAYERS):
            after, before = after[None], before[None]
        change, length = (np.sqrt(np.square(x).reshape(len(x), -1).sum(1)) for x in (after - before, before))
        relative = (change / np.where(length > 0, length, 1)).tolist()
        found[path] = relative if path.startswith(LAYERS) else relative[0]
    return found
