"""Token ids of sentences for analyses: one sentence or pair per row, with the word that each token belongs to."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.errors import UserError
from bert_jax.finetune.tables import read_text
from bert_jax.inference.embedding import pad_rows, row_length
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer

TOKENS_PER_BATCH = 2048
"""Tokens of a batch, padding included; a batch has at least one row."""


class TextRow(NamedTuple):
    """[CLS] a [SEP], or [CLS] a [SEP] b [SEP]."""

    input_ids: np.ndarray
    """int32 [n], with special tokens."""
    token_type_ids: np.ndarray
    """int32 [n]."""
    word_ids: np.ndarray
    """int32 [n]: index of the word of each token, in pairs counted on through both texts; -1 at special tokens."""


class TextBatch(NamedTuple):
    """Rows padded to one length; all arrays are of NumPy."""

    input_ids: np.ndarray
    """int32 [B, S]."""
    token_type_ids: np.ndarray
    """int32 [B, S]."""
    attention_mask: np.ndarray
    """int32 [B, S]: 1 at tokens, 0 at padding."""
    indices: np.ndarray
    """int64 [B]: index of each row in the list that was batched; -1 for rows that only fill the batch."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, special ones included, int64 [B]."""
        return self.attention_mask.sum(1)


def encode_words(sentences: Sequence[Sequence[str]], tokenizer: Tokenizer, max_length: int) -> list[TextRow | None]:
    """Rows of sentences that are given as words; each word is tokenized alone, as in Hewitt and Manning (2019).

    Args:
      sentences: words of each sentence.
      tokenizer: of the model.
      max_length: tokens of a row, special ones included.

    Returns:
      a row per sentence; None for a sentence with more tokens, or with a word that has no token.
    """
    space = space_before_words(tokenizer)
    flat, lengths = tokenizer.encode_flat([space + word for sentence in sentences for word in sentence])
    rows, token, word = [], 0, 0
    for sentence in sentences:
        of_words = lengths[word : word + len(sentence)]
        total = int(of_words.sum())
        ids, word_ids = flat[token : token + total], np.repeat(np.arange(len(sentence)), of_words)
        token, word = token + total, word + len(sentence)
        fits = 0 < total <= max_length - 2 and bool((of_words > 0).all())
        rows.append(_join(tokenizer, [ids], [word_ids]) if fits else None)
    return rows


def space_before_words(tokenizer: Tokenizer) -> str:
    """What makes a word that is encoded alone equal to the same word inside a text: " " or "".

    In byte-level vocabularies the mark of a word's beginning is the space before it.
    """
    return " " if tokenizer.settings.get("add_prefix_space") is False else ""


def encode_sentences(sentences: Sequence[str], tokenizer: Tokenizer, max_length: int) -> list[TextRow | None]:
    """Rows of running text, with the words of `Tokenizer.encode_with_word_ids`.

    Args:
      sentences: or longer texts.
      tokenizer: of the model.
      max_length: tokens of a row, special ones included.

    Returns:
      a row per sentence; None if it has more tokens, or none.
    """
    rows = []
    for ids, words in tokenizer.encode_with_word_ids(sentences):
        fits = 0 < len(ids) <= max_length - 2
        rows.append(_join(tokenizer, [np.array(ids)], [np.array(words)]) if fits else None)
    return rows


def encode_texts(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
    second: Sequence[str] | None = None,
    *,
    separators: int = 1,
) -> list[TextRow | None]:
    """Rows of texts, or of pairs with the texts of `second`; every token is its own word.

    Args:
      texts: first or only text of each row; mask tokens and other special tokens in the text are kept as such.
      tokenizer: of the model.
      max_length: tokens of a row, special ones included.
      second: second texts, as many; their tokens have type 1.
      separators: [SEP] between the texts of a pair; RoBERTa has 2 (`convert.families`).

    Returns:
      a row per text; None if it has more tokens, or none.
    """
    rows = []
    for sides in zip(texts, *([] if second is None else [second]), strict=True):
        ids = [np.asarray(tokenizer.encode(side), np.int64) for side in sides]
        total = sum(map(len, ids))
        words = np.split(np.arange(total), np.cumsum([len(side) for side in ids])[:-1])
        specials = 2 if second is None else 2 + separators
        fits = total <= max_length - specials and all(map(len, ids))
        rows.append(_join(tokenizer, ids, words, separators) if fits else None)
    return rows


class TextSample(NamedTuple):
    """Lines of text files, chosen at random."""

    texts: list[str]
    numbers: list[int]
    """Of the texts, from 0, among the different lines of all files."""
    rows: list[TextRow]
    """Of the texts."""
    skipped: int
    """Lines that were drawn and left out: more tokens than fit, or none."""
    lines: int
    """Lines of the files that are not empty."""


def sample_texts(
    paths: Sequence[StoredPath], tokenizer: Tokenizer, max_length: int, count: int, seed: int, least: int = 1
) -> TextSample:
    """At most `count` different lines of text files, drawn without replacement; lines that do not fit are skipped.

    Args:
      paths: of the files, UTF-8, with one text per line.
      tokenizer: of the model.
      max_length: tokens of a row, special ones included.
      count: number of texts to draw.
      seed: of the draw.
      least: number of texts without which the files are refused.

    Raises:
      UserError: a file is not UTF-8, or fewer than `least` lines fit.
    """
    lines = [line.strip() for path in paths for line in read_text(path).split("\n") if line.strip()]
    distinct = list(dict.fromkeys(lines))
    texts, numbers, rows, skipped = [], [], [], 0
    for index in np.random.default_rng(seed).permutation(len(distinct)):
        if len(rows) == count:
            break
        (row,) = encode_texts([distinct[index]], tokenizer, max_length)
        if row is None:
            skipped += 1
            continue
        texts.append(distinct[index])
        numbers.append(int(index))
        rows.append(row)
    if len(rows) < least:
        names = ", ".join(str(path) for path in paths)
        raise UserError(
            f"{names}: {len(rows)} of {len(distinct)} different lines have a token and, with [CLS] and [SEP], at most "
            f"{max_length}; {least} or more are needed: give other texts, or a larger max-length"
        )
    return TextSample(texts, numbers, rows, skipped, len(lines))


def _join(tokenizer: Tokenizer, ids: list[np.ndarray], words: list[np.ndarray], separators: int = 1) -> TextRow:
    ends = [separators] * (len(ids) - 1) + [1]
    sides = [np.r_[side, [tokenizer.sep_id] * end] for side, end in zip(ids, ends, strict=True)]
    input_ids = np.concatenate([[tokenizer.cls_id], *sides])
    word_ids = np.concatenate([[-1], *(np.r_[side, [-1] * end] for side, end in zip(words, ends, strict=True))])
    types = np.repeat(np.arange(len(ids)), [len(side) + (i == 0) for i, side in enumerate(sides)])
    return TextRow(*(x.astype(np.int32) for x in (input_ids, types, word_ids)))


def batches(rows: Sequence[TextRow], pad_id: int, tokens_per_batch: int = TOKENS_PER_BATCH) -> Iterator[TextBatch]:
    """All rows, shortest first, in batches of few shapes, so that few are compiled.

    Args:
      rows: of any lengths.
      pad_id: input id of padding.
      tokens_per_batch: S times B of a batch is at most this, unless B is 1.
    """
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
    lengths = np.array([row_length(len(rows[i].input_ids)) for i in order], np.int64)
    for length in np.unique(lengths):
        chosen, size = order[lengths == length], max(1, tokens_per_batch // int(length))
        for start in range(0, len(chosen), size):
            yield _pad(
                [rows[i] for i in chosen[start : start + size]], chosen[start : start + size], pad_id, length, size
            )


def _pad(rows: list[TextRow], indices: np.ndarray, pad_id: int, length: int, size: int) -> TextBatch:
    """Rows in a batch of one shape; rows that only fill it repeat the first one."""
    filled = [*rows, *[rows[0]] * (size - len(rows))]
    input_ids, mask = pad_rows([row.input_ids for row in filled], length, pad_id)
    types, _ = pad_rows([row.token_type_ids for row in filled], length, 0)
    return TextBatch(input_ids, types, mask, np.r_[indices, np.full(size - len(rows), -1)].astype(np.int64))


def choose_masked(rows: Sequence[TextRow], special_ids: Sequence[int], share: float, seed: int) -> list[np.ndarray]:
    """Positions to mask in each row, ascending: round(share * n) of its n ordinary tokens, at least one.

    The choice is a function of the seed, the row's index and the number of its ordinary tokens.

    Args:
      rows: of texts.
      special_ids: never masked; a row with nothing else gets no position.
      share: of the ordinary tokens.
      seed: of the choice.
    """
    chosen = []
    for index, row in enumerate(rows):
        ordinary = np.flatnonzero(~np.isin(row.input_ids, special_ids))
        count = min(len(ordinary), max(1, round(share * len(ordinary))))
        chosen.append(np.sort(np.random.default_rng([seed, index]).permutation(ordinary)[:count]))
    return chosen


def masked_positions(batch: TextBatch, masked: Sequence[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Masked positions of a batch, int32 [B, most], filled up with a row's first one, and which of them count.

    Args:
      batch: of rows.
      masked: positions in each row, at least one, from `choose_masked`.
      most: largest number of them in a row.
    """
    positions = np.zeros((len(batch.indices), most), np.int32)
    valid = np.zeros(positions.shape, bool)
    for b, index in enumerate(batch.indices):
        chosen = masked[index] if index >= 0 else masked[batch.indices[0]]
        positions[b] = chosen[0]
        positions[b, : len(chosen)] = chosen
        valid[b, : len(chosen)] = index >= 0
    return positions, valid


def mean_of_words(row: TextRow, vectors: np.ndarray) -> np.ndarray:
    """The mean of each word's token vectors, [..., number of words, H].

    Args:
      row: of `encode_words`.
      vectors: [..., S, H], S at least the tokens of the row.
    """
    n = len(row.input_ids)
    tokens = np.flatnonzero(row.word_ids >= 0)
    starts = np.flatnonzero(np.diff(row.word_ids[tokens], prepend=-1))
    counts = np.diff(np.r_[starts, len(tokens)])
    sums = np.add.reduceat(vectors[..., :n, :][..., tokens, :], starts, axis=-2)
    return sums / counts[:, None]


def word_attention(row: TextRow, probabilities: np.ndarray) -> np.ndarray:
    """Attention between words, [..., words, words]: the sum over the key's tokens and the mean over the query's (Clark
    et al. 2019, section 4.1). Special tokens are left out, so that rows sum to at most 1.

    Args:
      row: of `encode_words`.
      probabilities: [..., queries, keys], as many as the row has tokens, or more.
    """
    of_queries = mean_of_words(row, probabilities)
    counts = np.bincount(row.word_ids[row.word_ids >= 0])
    return np.swapaxes(mean_of_words(row, np.swapaxes(of_queries, -1, -2)), -1, -2) * counts
