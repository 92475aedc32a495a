"""The characters of a text that its tokens come from, with one meaning for all libraries."""

from collections.abc import Sequence

import numpy as np


def trim_offsets(text: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Spans without the spaces around their words, and with the characters of words that normalisation deleted.

    The libraries disagree about the space before a word, and leave out characters that have no piece, such as accents
    in NFD and zero-width spaces. Here a deleted character belongs to the token before it in its word; at the start of a
    word to the first token.

    Args:
      text: that was encoded.
      spans: first character and last character + 1 of each token, as a library reports them.

    Returns:
      int64 [T, 2]; a token of spaces alone has an empty span.
    """
    found: list[list[int]] = []
    covered = 0
    for first, last in spans:
        word = text[first:last]
        first += len(word) - len(word.lstrip())
        last = max(first, first + len(word.strip()))
        gap = text[covered:first]
        deleted = _letters(gap) if found else 0
        if deleted:
            found[-1][1] = covered + deleted
        first -= _letters(gap[deleted:][::-1])
        found.append([first, last])
        covered = max(covered, last)
    deleted = _letters(text[covered:])
    if found and deleted:
        found[-1][1] = covered + deleted
    return np.array(found, np.int64).reshape(-1, 2)


def _letters(text: str) -> int:
    """The number of characters before the first space."""
    return next((i for i, character in enumerate(text) if character.isspace()), len(text))
