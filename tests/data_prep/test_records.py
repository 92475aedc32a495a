"""Serialised records against TFDS's serializer, and sentences grouped into records."""

import itertools

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data.manifest import MAX_RECORD_TOKENS
from bert_jax.data.record import parse_record
from data_prep.builder.records import DocumentRecordSplitter, serialize_example, split_long_lengths


@pytest.fixture(scope="module")
def tfds_serialize():
    def raw(dtype):
        return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")

    features = tfds.features.FeaturesDict(
        {"document": np.int64, "part": np.int32, "tokens": raw(np.uint16), "sentence_ends": raw(np.uint16)}
    )
    serializer = tfds.core.example_serializer.ExampleSerializer(features.get_serialized_info())

    def serialize_with_tfds(document, part, tokens, sentence_ends):
        example = features.encode_example(
            {"document": document, "part": part, "tokens": tokens, "sentence_ends": sentence_ends}
        )
        return serializer.get_tf_example(example).SerializeToString(deterministic=True)

    return serialize_with_tfds


@pytest.mark.parametrize("document", [0, 1, 127, 128, 300, 2**31, 2**40])
@pytest.mark.parametrize("sizes", [[1], [63, 1], [70] * 100, [8192]])
def test_the_bytes_are_those_of_tfds(tfds_serialize, document, sizes):
    tokens = (np.arange(sum(sizes)) * 7919 % 65536).astype("<u2")
    ends = np.cumsum(sizes).astype("<u2")
    raw = serialize_example(document, 3, tokens, ends)
    assert raw == tfds_serialize(document, 3, tokens, ends)
    record = parse_record(raw, np.dtype("<u2"))
    assert (record.document, record.part) == (document, 3)
    np.testing.assert_array_equal(record.tokens, tokens)
    np.testing.assert_array_equal(record.sentence_ends, ends)


def test_long_sentences_are_cut():
    np.testing.assert_array_equal(split_long_lengths(np.array([5, 8192, 3])), [5, 8192, 3])
    np.testing.assert_array_equal(split_long_lengths(np.array([8193, 2, 20000])), [8192, 1, 2, 8192, 8192, 3616])
    np.testing.assert_array_equal(split_long_lengths(np.array([16384, 1])), [8192, 8192, 1])
    assert split_long_lengths(np.zeros(0, np.int64)).dtype == np.uint16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, MAX_RECORD_TOKENS), min_size=1, max_size=8), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_records_hold_all_and_do_not_depend_on_the_pieces(pieces, random):
    lengths = [length for piece in pieces for length in piece]
    tokens = np.arange(sum(lengths)).astype("<u2")

    def records(cuts):
        builder, found = DocumentRecordSplitter(np.dtype("<u2")), []
        bounds = [0, *sorted(cuts), len(lengths)]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        for first, last in itertools.pairwise(bounds):
            piece = np.array(lengths[first:last], np.uint16)
            found += list(builder.add(tokens[ends[first] : ends[last]], piece))
        return [*found, builder.flush()]

    whole = records([])
    again = records([random.randrange(len(lengths) + 1) for _ in range(3)])
    assert [list(sizes) for _, sizes in whole] == [list(sizes) for _, sizes in again]
    assert [size for _, sizes in whole for size in sizes] == lengths
    np.testing.assert_array_equal(np.concatenate([content for content, _ in again]), tokens)
    for (content, sizes), (_, following) in zip(whole, [*whole[1:], (None, None)], strict=True):
        assert 0 < len(content) == sum(sizes) <= MAX_RECORD_TOKENS
        if following is not None:
            assert len(content) + following[0] > MAX_RECORD_TOKENS
