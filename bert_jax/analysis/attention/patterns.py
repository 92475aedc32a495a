"""The five patterns of attention maps (Kovaleva et al. 2019, section 4.1), by a rule.

Kovaleva et al. annotate 400 maps by hand and train a classifier on them; the annotated maps are not public. The rule is
ours. It compares the attention on three groups of keys with that of a uniform map of the same text, so that it does not
depend on the text's length, and it is tested on maps that are built as a pattern.
"""

import numpy as np

from bert_jax.analysis.attention.maps import TokenKinds
from bert_jax.array_types import Float, Int

PATTERNS = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
STRUCTURED, PURE, WITHIN = 0.5, 0.8, 0.5
"""Thresholds of `classify_patterns`."""


def classify_patterns(attention: Float[np.ndarray, "*heads n n"], kinds: TokenKinds) -> Int[np.ndarray, "*heads"]:
    """The pattern of each map, as an index into PATTERNS.

    The excess of a share m of the attention over the share u that a uniform map has is (m - u) / (1 - u): 0 for the
    uniform map, 1 if all attention is there. Keys are [CLS] and [SEP] (`special`); the token itself and its two
    neighbours, if they are not special (`band`); and the rest.

    1. The excess of special and band together is at least 0.5. Of what exceeds the uniform map, the special keys have
       at least 0.8: vertical; the band has at least 0.8: diagonal; else vertical+diagonal.
    2. Otherwise, the text has two segments, and of the attention on the rest, the share within the query's segment
       exceeds that of a uniform map by at least 0.5: block.
    3. Otherwise heterogeneous.

    Args:
      attention: probabilities of queries by keys.
      kinds: of the tokens.
    """
    n = attention.shape[-1]
    special = np.broadcast_to(kinds.special, (n, n))
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    band = (distance <= 1) & ~special
    rest = ~special & ~band
    same = kinds.segments[:, None] == kinds.segments

    vertical, diagonal = _above_uniform(attention, special), _above_uniform(attention, band)
    room = 1 - (special | band).mean()
    is_structured = vertical + diagonal >= STRUCTURED * room if room else np.full(vertical.shape, True)
    part = np.maximum(vertical, 0) / np.maximum(np.maximum(vertical, 0) + np.maximum(diagonal, 0), 1e-12)
    found = np.where(part >= PURE, 0, np.where(part <= 1 - PURE, 1, 2))

    is_block = np.full(vertical.shape, False)
    uniform = (rest & same).sum() / max(1, rest.sum())
    if 0 < uniform < 1:
        within = _share(attention, rest & same) / np.maximum(_share(attention, rest), 1e-12)
        is_block = (within - uniform) / (1 - uniform) >= WITHIN
    return np.where(is_structured, found, np.where(is_block, 3, 4))


def _share(attention: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Mean over the queries of the attention on some keys, bool [n, n]."""
    return np.asarray(np.einsum("...st,st->...", attention, keys.astype(attention.dtype)) / len(keys))


def _above_uniform(attention: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.asarray(_share(attention, keys) - keys.mean())
