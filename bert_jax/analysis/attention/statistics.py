"""Where heads attend: relative positions, special tokens, punctuation, and how broadly (Clark et al. 2019, section 3).

Functions on the attention of one text; the suite averages over texts, each text counting once.
Shapes: n tokens; *heads any leading axes.
"""

import numpy as np

from bert_jax.analysis.attention.maps import TokenKinds
from bert_jax.array_types import Float

SHARES = ("self", "previous", "next", "cls", "sep", "punctuation", "sep_to_sep", "other_to_sep")
"""Statistics that are shares of attention."""
ENTROPIES = ("entropy_nats", "cls_entropy_nats")


def attention_statistics(
    attention: Float[np.ndarray, "*heads n n"], kinds: TokenKinds
) -> dict[str, Float[np.ndarray, "*heads"]]:
    """Means over the queries of a text.

    ``self``, ``previous``, ``next``: share on the token itself, on the one before it and on the one after it. As in
    Clark's code, the mean is over all queries, of which the first has no previous one.
    ``cls``, ``sep``, ``punctuation``: share on these keys; ``sep_to_sep`` and ``other_to_sep`` are ``sep`` of the
    queries that are [SEP] and of all others.
    ``entropy_nats``, ``cls_entropy_nats``: entropy of a query's attention, mean over all queries, and that of [CLS]. It
    is exact, where Clark's code smooths the attention by 1e-4.

    Args:
      attention: probabilities of queries by keys.
      kinds: of the tokens.
    """
    n = attention.shape[-1]
    diagonals = {
        name: np.trace(attention, offset, -2, -1) / n for name, offset in zip(SHARES[:3], (0, -1, 1), strict=True)
    }
    columns = attention.mean(-2)
    of_sep, of_others = (attention[..., rows, :].mean(-2)[..., kinds.sep].sum(-1) for rows in (kinds.sep, ~kinds.sep))
    entropies = entropy(attention)
    found = diagonals | {
        "cls": columns[..., kinds.cls].sum(-1),
        "sep": columns[..., kinds.sep].sum(-1),
        "punctuation": columns[..., kinds.punctuation].sum(-1),
        "sep_to_sep": of_sep,
        "other_to_sep": of_others,
        "entropy_nats": entropies.mean(-1),
        "cls_entropy_nats": entropies[..., 0],
    }
    return {name: np.asarray(values) for name, values in found.items()}


def entropy(probabilities: Float[np.ndarray, "*rows n"]) -> Float[np.ndarray, "*rows"]:
    """Entropy of distributions in nats; 0 log 0 is 0."""
    terms = probabilities * np.log(np.maximum(probabilities, np.finfo(np.float32).tiny))
    return np.asarray(-terms.sum(-1))


def uniform_attention(n: int) -> Float[np.ndarray, "n n"]:
    """The attention of a head that attends to all tokens equally, float32."""
    return np.full((n, n), 1 / n, np.float32)
