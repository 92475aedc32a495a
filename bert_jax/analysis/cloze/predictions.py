"""What the MLM head predicts at one masked position of each row, in batches of few shapes."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Float, Int
from bert_jax.inference.embedding import pad_rows, row_length
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config, compute
from bert_jax.interventions.rows import TextRow, encode_texts, space_before_words
from bert_jax.tokenizers.tokenizer import Tokenizer

TOKENS_PER_BATCH = 2048
"""Tokens of a forward pass, padding included."""
LENGTH_STEP = 8
"""Row lengths are multiples of this."""
MIN_TOKENS_PER_LENGTH = 8192
"""A row length has at least this many tokens, unless it is the longest: each length costs a compilation."""
MASK = "[MASK]"
"""The mask in files of data, whatever the tokenizer's mask token is."""


class Shape(NamedTuple):
    """Rows of one padded length, for forward passes of one size."""

    length: int
    rows_per_pass: int
    indices: np.ndarray
    """int64, of the rows."""

    def passes(self) -> Iterator[tuple[np.ndarray, int]]:
        """Indices of each pass, `rows_per_pass` of them, the last ones repeated, and how many of them are real."""
        for start in range(0, len(self.indices), self.rows_per_pass):
            chosen = self.indices[start : start + self.rows_per_pass]
            yield np.resize(chosen, self.rows_per_pass), len(chosen)


def plan_shapes(lengths: Int[np.ndarray, " n"], tokens_per_batch: int = TOKENS_PER_BATCH) -> list[Shape]:
    """Group rows by padded length, shortest first; a length with few tokens joins the next longer one.

    Args:
      lengths: tokens of each row, special ones included.
      tokens_per_batch: of a pass, padding included, unless one row has more.
    """
    padded = np.array([row_length(int(length), LENGTH_STEP) for length in lengths], np.int64)
    shapes, waiting = [], np.zeros(0, np.int64)
    longest = padded.max(initial=0)
    for length in np.unique(padded):
        waiting = np.concatenate([waiting, np.flatnonzero(padded == length)])
        if len(waiting) * length >= MIN_TOKENS_PER_LENGTH or length == longest:
            shapes.append(Shape(int(length), max(1, tokens_per_batch // int(length)), waiting))
            waiting = np.zeros(0, np.int64)
    return shapes


def encode_masked(texts: Sequence[str], model: LoadedModel) -> list[TextRow | None]:
    """Rows of texts with one [MASK]; None for a text with more tokens than the model has positions.

    Args:
      texts: with MASK once each, which becomes the tokenizer's mask token.
      model: whose tokenizer and position table count.
    """
    mask = model.tokenizer.id_to_token(model.tokenizer.mask_id)
    texts = [text.replace(MASK, mask) for text in texts]
    return encode_texts(texts, model.tokenizer, model.config.max_positions)


def mask_log_probabilities(model: LoadedModel, rows: Sequence[TextRow]) -> Float[np.ndarray, "n V"]:
    """Log-probabilities of the tokenizer's tokens at the mask of each row; for long lists, call it in chunks.

    The softmax is over all rows of the vocabulary, padding rows included, as in `LoadedModel.fill_mask`.

    Args:
      model: with an MLM head.
      rows: each with one mask token.
    """
    tokenizer = model.tokenizer
    found = np.zeros((len(rows), tokenizer.vocab_size), np.float32)
    for shape in plan_shapes(np.array([len(row.input_ids) for row in rows], np.int64)):
        input_ids, mask = pad_rows([rows[i].input_ids for i in shape.indices], shape.length, tokenizer.pad_id)
        positions = (input_ids == tokenizer.mask_id).argmax(1).astype(np.int32)
        within = Shape(shape.length, shape.rows_per_pass, np.arange(len(shape.indices)))
        for chosen, count in within.passes():
            batch = (input_ids[chosen], np.zeros_like(input_ids[chosen]), mask[chosen])
            values = _log_probabilities(_config(model), model.heads, model.params, batch, positions[chosen])
            found[shape.indices[chosen[:count]]] = np.asarray(values)[:count, : tokenizer.vocab_size]
    return found


def token_log_probabilities(
    model: LoadedModel,
    input_ids: Int[np.ndarray, "B S"],
    attention_mask: Int[np.ndarray, "B S"],
    positions: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, " B"],
) -> Float[np.ndarray, " B"]:
    """Log-probability of one token at one position of each row, in one forward pass.

    Args:
      model: with an MLM head.
      input_ids: with masks.
      attention_mask: 1 at tokens.
      positions: of the masked tokens.
      tokens: the masked tokens.
    """
    batch = (input_ids, np.zeros_like(input_ids), attention_mask)
    return np.asarray(_of_tokens(_config(model), model.heads, model.params, batch, positions, tokens))


def lone_mask_log_probabilities(model: LoadedModel) -> Float[np.ndarray, " V"]:
    """Log-probabilities at a mask without any other word: what the model prefers without context."""
    (row,) = encode_masked([MASK], model)
    return mask_log_probabilities(model, [row])[0]


def token_of_word(word: str, tokenizer: Tokenizer, *, begins_text: bool = False) -> int | None:
    """The token that a word is at a mask; None if it is several tokens, or unknown.

    Args:
      word: without spaces.
      tokenizer: of the model.
      begins_text: whether the mask is the first token of its text: byte-level vocabularies mark no space there.
    """
    (ids,) = tokenizer.encode_batch([("" if begins_text else space_before_words(tokenizer)) + word])
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_id else None


def _config(model: LoadedModel):
    return analysis_config(model.config, ("mlm_logits",))


def _log_softmax(config, heads, params, batch, positions):
    logits = compute(config, heads, (), ("mlm_logits",), params, batch, {}, positions[:, None])["mlm_logits"]
    return jax.nn.log_softmax(logits[:, 0], axis=-1)


_log_probabilities = functools.partial(jax.jit, static_argnums=(0, 1))(_log_softmax)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_tokens(config, heads, params, batch, positions, tokens):
    log_probabilities = _log_softmax(config, heads, params, batch, positions)
    return jnp.take_along_axis(log_probabilities, tokens[:, None], axis=1)[:, 0]
