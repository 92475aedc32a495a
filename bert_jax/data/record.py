"""Records of a corpus: at most 8,192 tokens of one document each, decoded from a serialised tf.Example."""

from typing import NamedTuple

import numpy as np

from bert_jax.storage.varints import decode_varint


class Record(NamedTuple):
    """A part of one document."""

    document: int
    """index of the document in its split"""
    part: int
    """0, 1, ... within the document"""
    tokens: np.ndarray
    """token ids [num_tokens], uint16 or uint32"""
    sentence_ends: np.ndarray
    """tokens up to and including each sentence [num_sentences], uint16; the last is num_tokens"""


def parse_record(raw: bytes, dtype: np.dtype) -> Record:
    """Decodes a serialised tf.Example with the four features of a corpus record.

    TFDS's decoder takes longer than reading the record does. Wire format: protobuf.dev, "Encoding"; the tests compare
    with TFDS.

    Args:
      raw: the record's bytes.
      dtype: type of the token ids, see `token_dtype`.

    Raises:
      ValueError: the bytes are not such a record.
    """
    try:
        features, _ = _field(raw, 0)
        values: dict[bytes, bytes] = {}
        position = 0
        while position < len(features):
            entry, position = _field(features, position)
            name, after_name = _field(entry, 0)
            feature, _ = _field(entry, after_name)
            value_list, _ = _field(feature, 0)
            values[name], _ = _field(value_list, 0)
        return Record(
            document=decode_varint(values[b"document"], 0)[0],
            part=decode_varint(values[b"part"], 0)[0],
            tokens=np.frombuffer(values[b"tokens"], dtype),
            sentence_ends=np.frombuffer(values[b"sentence_ends"], "<u2"),
        )
    except (IndexError, KeyError) as error:
        raise ValueError("not a record of a bert_jax corpus") from error


def _field(data: bytes, position: int) -> tuple[bytes, int]:
    """The length-delimited field at a position, and the position of the next one."""
    if data[position] & 7 != 2:
        raise ValueError("not a record of a bert_jax corpus")
    length, begin = decode_varint(data, position + 1)
    return data[begin : begin + length], begin + length
