"""Attention maps of texts, and which of their tokens are separators, punctuation and so on.

Shapes: L layers, N heads, S queries, T keys (the same tokens).
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.inference.embedding import row_length
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TOKENS_PER_BATCH, TextRow, batches
from bert_jax.tokenizers.tokenizer import Tokenizer

PROBABILITIES = "layers.*.attention.probabilities"
PROBABILITIES_IN_MEMORY = 2**26
"""Attention probabilities that a batch computes at once: 256 MiB in float32."""


class TextAttention(NamedTuple):
    """Attention of all heads in one text."""

    index: int
    """Of the row."""
    padded: Float[np.ndarray, "L N S T"]
    """Probabilities; rows of padding have no meaning, columns of padding are 0."""
    length: int
    """Tokens of the text."""

    @property
    def probabilities(self) -> Float[np.ndarray, "L N n n"]:
        """Without padding."""
        return self.padded[:, :, : self.length, : self.length]


def attention_maps(
    model: LoadedModel, rows: Sequence[TextRow], *, what: str = "attention", progress: bool = False
) -> Iterator[TextAttention]:
    """The attention of all heads in each row, shortest rows first.

    Args:
      model: from `inference.load`.
      rows: at least one.
      what: the label of the progress bar.
      progress: show a progress bar on stderr.
    """
    config = model.config
    per_token = config.num_layers * config.num_heads * row_length(max(len(row.input_ids) for row in rows))
    tokens_per_batch = min(TOKENS_PER_BATCH, PROBABILITIES_IN_MEMORY // per_token)
    with progress_bar(what, len(rows), "text", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id, tokens_per_batch):
            found = capture(model, batch, [PROBABILITIES])[PROBABILITIES]
            for b, index in enumerate(batch.indices):
                if index >= 0:
                    yield TextAttention(int(index), found[:, b], int(batch.lengths[b]))
                    bar.update(1)


class TokenKinds(NamedTuple):
    """What each token of a row is; all bool [S] but the segments."""

    cls: np.ndarray
    sep: np.ndarray
    punctuation: np.ndarray
    """All characters of the token are punctuation (Unicode's categories P*)."""
    segments: np.ndarray
    """int64 [S]: 0 up to the first [SEP], 1 after it, and so on."""

    @property
    def special(self) -> np.ndarray:
        """[CLS] or [SEP], bool [S]."""
        return self.cls | self.sep


def token_kinds(row: TextRow, tokenizer: Tokenizer) -> TokenKinds:
    """The kinds of a row's tokens; [CLS] is the first token, and not the same token elsewhere."""
    ids = row.input_ids
    first = np.arange(len(ids)) == 0
    sep = (ids == tokenizer.sep_id) & ~first
    special = np.isin(ids, tokenizer.special_ids)
    punctuation = np.array([_is_punctuation(tokenizer.decode([token])) for token in ids])
    return TokenKinds(first, sep, punctuation & ~special, np.cumsum(sep) - sep)


def _is_punctuation(piece: str) -> bool:
    text = piece.removeprefix("##").strip()
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def halve(rows: Sequence[TextRow], tokenizer: Tokenizer, token_types: int) -> list[TextRow]:
    """[CLS] first half [SEP] second half [SEP]: two consecutive spans in a row (Clark et al. 2019, section 3).

    Args:
      rows: [CLS] text [SEP], each with two ordinary tokens or more.
      tokenizer: of the model; the second half begins with a word if it can.
      token_types: of the model; the second half has type 1 if there are two.

    Returns:
      rows that are one token longer.

    Raises:
      UserError: the vocabulary does not mark words.
    """
    halves = []
    for row in rows:
        cut = 1 + _middle(row.input_ids[1:-1], tokenizer)
        ids = np.insert(row.input_ids, cut, tokenizer.sep_id)
        types = (np.arange(len(ids)) > cut) & (token_types > 1)
        words = np.insert(row.word_ids, cut, -1)
        halves.append(TextRow(ids, types.astype(np.int32), words))
    return halves


def _middle(ids: np.ndarray, tokenizer: Tokenizer) -> int:
    """The beginning of a word nearest to the middle, of equally near ones the first; without one, the middle."""
    starts = np.flatnonzero(~tokenizer.continues_word[ids])
    starts = starts[starts > 0]
    middle = len(ids) / 2
    return int(starts[np.abs(starts - middle).argmin()]) if len(starts) else len(ids) // 2


def shorten(rows: Sequence[TextRow], length: int) -> list[TextRow]:
    """Rows [CLS] text [SEP] with the text's first tokens only, at most `length` with the special ones."""
    return [
        row if len(row.input_ids) <= length else TextRow(*(np.r_[values[: length - 1], values[-1:]] for values in row))
        for row in rows
    ]
