"""Serialises records as the tf.Example that TFDS reads, and groups sentences into records."""

from collections.abc import Iterator

import numpy as np

from bert_jax.data.manifest import MAX_RECORD_TOKENS
from bert_jax.storage.varints import encode_varint


def serialize_example(document: int, part: int, tokens: np.ndarray, sentence_ends: np.ndarray) -> bytes:
    """A tf.Example with the features `document`, `part`, `sentence_ends` and `tokens`, keys sorted.

    Gives the same bytes as TFDS's ExampleSerializer in a third of its time, without importing TFDS in every worker.
    Wire format: protobuf.dev, "Encoding".

    Args:
      document: index of the document in its split.
      part: index of the record in the document.
      tokens: ids [num_tokens], of the corpus' little-endian type.
      sentence_ends: tokens up to and including each sentence [num_sentences], little-endian uint16.
    """
    entries = (
        _entry(b"document", _field(3, _field(1, encode_varint(document)))),
        _entry(b"part", _field(3, _field(1, encode_varint(part)))),
        _entry(b"sentence_ends", _field(1, _field(1, sentence_ends.tobytes()))),
        _entry(b"tokens", _field(1, _field(1, tokens.tobytes()))),
    )
    return _field(1, b"".join(entries))


def _entry(key: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, key) + _field(2, feature))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encode_varint(len(content)) + content


def split_long_lengths(lengths: np.ndarray) -> np.ndarray:
    """Lengths with every sentence of more than MAX_RECORD_TOKENS split into pieces, uint16.

    Args:
      lengths: tokens of each sentence, all positive; integers of any type [num_sentences].
    """
    if not len(lengths) or lengths.max() <= MAX_RECORD_TOKENS:
        return lengths.astype(np.uint16)
    lengths = lengths.astype(np.int64)  # because unsigned integers cannot be negated
    pieces = -(-lengths // MAX_RECORD_TOKENS)
    cut = np.full(int(pieces.sum()), MAX_RECORD_TOKENS, np.uint16)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * MAX_RECORD_TOKENS
    return cut


class DocumentRecordSplitter:
    """Groups the sentences of one document, which may be added in several pieces, into records.

    A record contains as many whole sentences as fit into MAX_RECORD_TOKENS.
    """

    def __init__(self, dtype: np.dtype):
        """`dtype` is the type of the token ids."""
        self._tokens = np.zeros(0, dtype)
        self._lengths = np.zeros(0, np.uint16)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Adds a piece; yields tokens and sentence lengths of each complete record."""
        tokens, lengths = np.concatenate([self._tokens, tokens]), np.concatenate([self._lengths, lengths])
        ends = np.cumsum(lengths, dtype=np.int64)
        sentence = token = 0
        while token + MAX_RECORD_TOKENS < len(tokens):
            next_sentence = int(np.searchsorted(ends, token + MAX_RECORD_TOKENS, "right"))
            next_token = int(ends[next_sentence - 1])
            yield tokens[token:next_token], lengths[sentence:next_sentence]
            sentence, token = next_sentence, next_token
        self._tokens, self._lengths = tokens[token:], lengths[sentence:]

    def flush(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and sentence lengths of the last record; the next piece starts another document."""
        tokens, lengths = self._tokens, self._lengths
        self._tokens, self._lengths = tokens[:0], lengths[:0]
        return tokens, lengths
