"""How similar two models are, on arrays. Leading axes, such as that of the hidden states, are independent."""

from typing import NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, jackknife
from bert_jax.analysis.fine_tuning.weights import is_body
from bert_jax.array_types import Float, Int
from bert_jax.training.param_paths import LAYERS, name_leaves
from bert_jax.training.task import Params


class _Moments(NamedTuple):
    """Sums over vectors of two models, from which `linear_cka` follows."""

    count: int
    x: np.ndarray
    y: np.ndarray
    xx: np.ndarray
    xy: np.ndarray
    yy: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> "_Moments":
        return cls(len(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y, y.T @ y)

    def without(self, part: "_Moments") -> "_Moments":
        return _Moments(*(one - other for one, other in zip(self, part, strict=True)))

    @property
    def cka(self) -> float:
        n, x, y = self.count, self.x, self.y
        xx, xy, yy = (of - np.outer(a, b) / n for of, a, b in ((self.xx, x, x), (self.xy, x, y), (self.yy, y, y)))
        norm = np.linalg.norm(xx) * np.linalg.norm(yy)
        return float(np.square(xy).sum() / norm) if norm else 0.0


def linear_cka(x: Float[np.ndarray, "n H"], y: Float[np.ndarray, "n W"]) -> float:
    """Linear centred kernel alignment of vectors of the same n tokens (Kornblith et al. 2019, arXiv:1905.00414).

    1 if y is x up to rotation, scale and shift; it does not depend on these of either side. With n not much larger than
    the widths it is biased upwards, so compare only values of equal n.
    """
    return cka_with_interval(x, y, np.zeros(len(x), np.int64)).value


def cka_with_interval(
    x: Float[np.ndarray, "n H"], y: Float[np.ndarray, "n W"], parts: Int[np.ndarray, " n"]
) -> BootstrapMean:
    """`linear_cka` with a 95 % interval of the jackknife that leaves out one part after the other.

    Args:
      x, y: vectors of the same tokens.
      parts: of each vector, numbers of groups of whole texts, as large as each other; one part gives no interval.
    """
    x, y = (np.asarray(vectors, np.float64) - vectors.mean(0) for vectors in (x, y))
    of_parts = [_Moments.of(x[parts == one], y[parts == one]) for one in np.unique(parts)]
    whole = _Moments.of(x, y)
    found = jackknife(whole.cka, [whole.without(one).cka for one in of_parts if one.count < whole.count])
    return found._replace(high=np.minimum(1.0, found.high))


def cosines(x: Float[np.ndarray, "*layers n H"], y: Float[np.ndarray, "*layers n H"]) -> np.ndarray:
    """The cosine of each vector with its counterpart, float64 [..., n]."""
    x, y = (np.asarray(vectors, np.float64) for vectors in (x, y))
    norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.asarray((x * y).sum(-1) / np.maximum(norms, 1e-30))


def attention_cosines(x: Float[np.ndarray, "*heads S T"], y: Float[np.ndarray, "*heads S T"]) -> np.ndarray:
    """Cosine of each head's flattened map in two models; float64 [...].

    Kovaleva et al. (2019, arXiv:1908.08593) flatten maps that are padded with zeros, which do not change the cosine.

    Args:
      x, y: probabilities of one example, without padding.
    """
    flat_x, flat_y = (np.asarray(maps, np.float64).reshape(*maps.shape[:-2], 1, -1) for maps in (x, y))
    return cosines(flat_x, flat_y)[..., 0]


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
