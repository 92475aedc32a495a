"""Which sentences form which example: one compiled pass over sentence lengths per kind of format.

No record is read here. The random numbers of an example are hashes of (seed, example epoch, document, first sentence of
the document in its chunk), so an example does not depend on the other examples of its window or on packing.
Every document has a sentence and every sentence a token; `bert-data` writes no others.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.hash_random import HALF, bernoulli_threshold, draw_bernoulli, draw_uniform_int, hash64, hash_input
from bert_jax.data.word_starts import WordStarts, cut_between_words
from bert_jax.numba_cache import cached_njit

EXAMPLE_DTYPE = np.dtype(
    [
        ("a_start", np.int64),  # first sentence of segment A, before truncation
        ("a_stop", np.int64),  # one past the last
        ("b_start", np.int64),  # of segment B; 0 without segment B
        ("b_stop", np.int64),
        ("a_skip", np.int32),  # tokens from the start of sentence a_start to the first token of A
        ("a_tokens", np.int32),
        ("b_skip", np.int32),
        ("b_tokens", np.int32),  # 0: no segment B
        ("a_offset", np.int32),  # index of A's first token among the tokens of the window
        ("b_offset", np.int32),  # of B's first token; -1 if B is random
        ("length", np.int32),  # tokens with [CLS] and every [SEP]
        ("pair_label", np.int32),  # 0: B follows A; 1: B is random, or A and B are swapped; -1: no label
        ("example_id", np.int32),  # hash of corpus and position, not negative; determines the masks
    ]
)

PAIR_SPECIAL_TOKENS, SINGLE_SPECIAL_TOKENS = 3, 2
"""[CLS] A [SEP] B [SEP], and [CLS] A [SEP]."""
SEGMENTS, SENTENCES, ORDER = range(3)
MIN_PIECE_TOKENS, MAX_PIECE_TOKENS = 8, 32
"""Bounds of the pieces of a sentence that is too long for a row; 32 tokens are about a sentence of prose."""
DOCUMENT = np.uint64(0xD0C)
PAIR_KINDS = {"segment_pair": SEGMENTS, "sentence_pair": SENTENCES, "sentence_order": ORDER}


class CorpusLayout(NamedTuple):
    """Lengths of the sentences and documents of a corpus."""

    sentence_lengths: np.ndarray
    """tokens of each sentence, uint16 [num_sentences]"""
    document_offsets: np.ndarray
    """first sentence of each document, int64 [num_documents + 1]"""
    record_offsets: np.ndarray
    """first sentence of each record, which holds sentences of one document, int64 [num_records + 1]"""
    words: WordStarts
    """which tokens of long sentences begin a word"""
    groups: np.ndarray
    """of each document, as an index of `group_thresholds`, uint16 [num_documents]; empty: all are as likely"""
    group_thresholds: np.ndarray
    """`bernoulli_threshold` of the share of the documents of a group that are drawn, uint64 [num_groups]"""


def make_examples(
    layout: CorpusLayout,
    chunks: np.ndarray,
    data: DataConfig,
    seq_len: int,
    key: np.uint64,
    salt: np.uint64,
) -> tuple[np.ndarray, int, int]:
    """All examples of some chunks of a corpus, in order.

    Pairs (google-research/bert and google-research/albert, create_pretraining_data.py): sentences of a document are
    collected up to a target length (the full row, or a shorter length that is drawn once per document) and split at a
    random sentence into A and B. With probability one half, and always if there is only one sentence, B is replaced by
    a random segment of another document; the sentences that it replaces go into the next example. Pairs that are too
    long lose one token at a time from the longer segment, at its front or back. sentence_pair (Liu et al. 2019, section
    4.2) takes two sentences at a time. sentence_order swaps A and B instead; only a pair of one sentence has a random
    B, as in ALBERT's code. Unlike there, the random segments for the part of a document in a chunk come from one record
    of a random document, until they have as many tokens as it has, and then from another one, so that a process reads
    few records.

    A sentence that is longer than the room of a pair is taken in pieces, as if they were sentences: of about
    `_piece_tokens`, and at the end of a pair of as many as fit. So of text without sentence marks, few tokens are
    truncated, and pairs have a true B. A piece ends before a word, if one begins in its last half.

    Single segments (Liu et al. 2019, section 4.2): whole consecutive sentences up to the length of the row;
    full_sentences continue after a [SEP] at the end of a document. A sentence longer than a row is split into rows
    that end before a word, as pieces do (full rows if examples end with the row), and a remainder.

    Args:
      layout: of the corpus; pairs need at least two documents in it.
      chunks: sentences [first, last) of each chunk, int64 [n, 2]. No example extends over two chunks.
      data: format, rates and where single segments end.
      seq_len: tokens per row, special tokens included.
      key: hash of seed and example epoch.
      salt: hash of the corpus, for example ids.

    Returns:
      the examples, a structured array of `EXAMPLE_DTYPE`,
      the number of tokens that are in no example, because a pair was longer than its row, and
      the number of pairs of one sentence or piece, whose segment B can only be random.
    """
    sentences = int(np.diff(chunks).sum())
    tokens = sum(int(layout.sentence_lengths[a:b].sum(dtype=np.int64)) for a, b in chunks)
    if data.paired:
        short = bernoulli_threshold(data.short_example_rate)
        kind = PAIR_KINDS[data.format]
        room = seq_len - PAIR_SPECIAL_TOKENS
        # Every example takes the rest of a sentence, or at least a quarter of the shortest piece.
        out = np.empty(sentences + tokens // max(1, min(MIN_PIECE_TOKENS, room // 2) // 4), EXAMPLE_DTYPE)
        count, truncated, forced_random = _make_pairs(layout, chunks, kind, room, short, key, salt, out)
    else:
        budget = seq_len - SINGLE_SPECIAL_TOKENS
        out = np.empty(sentences + 2 * tokens // budget, EXAMPLE_DTYPE)
        crosses, cuts = data.format == "full_sentences", data.example_end == "row"
        count = _make_single_segments(layout, chunks, crosses, cuts, budget, salt, out)
        truncated, forced_random = 0, 0
    return out[:count].copy(), int(truncated), int(forced_random)


@cached_njit
def _example_id(salt, sentence, skip):
    return np.int32(hash64(hash_input(hash_input(salt, np.uint64(sentence)), np.uint64(skip))) >> np.uint64(33))


@cached_njit
def _make_pairs(layout, chunks, kind, room, short, key, salt, out):
    """Writes the examples; returns (number of examples, truncated tokens, pairs of one sentence)."""
    state, ends = np.zeros(2, np.uint64), np.empty((room, 3), np.int64)
    count, truncated, forced_random, offset = 0, 0, 0, 0
    lengths, documents, words = layout.sentence_lengths, layout.document_offsets, layout.words
    for chunk in range(len(chunks)):
        position, chunk_end = chunks[chunk]
        skip = 0  # tokens of sentence `position` that are in earlier examples
        document = np.searchsorted(documents, position, "right") - 1
        while position < chunk_end:
            end = min(documents[document + 1], chunk_end)
            target = _target_tokens(state, key, document, kind, room, short)
            limits = kind, target, room, _piece_tokens(kind, target, room)
            state[0] = hash64(hash_input(key, np.uint64(position)))
            state[1] = np.uint64(0)
            source, unused = (0, 0), 0
            while position < end:
                units = _take_sentences(lengths, words, position, skip, end, limits, ends)
                stop, stop_skip, tokens = ends[units - 1]
                a_units = 1
                if kind != SENTENCES and units >= 2:
                    a_units += draw_uniform_int(state, units - 1)
                a_stop, a_stop_skip, a_length = ends[a_units - 1]
                single = units == 1
                forced_random += single
                random = single or (kind != ORDER and draw_bernoulli(state, HALF))
                swapped = kind == ORDER and not single and draw_bernoulli(state, HALF)
                if random:
                    if unused <= 0:
                        source, unused = _random_record(state, layout, document)
                    b_start, b_first, b_stop, b_length = _random_segment(
                        state, lengths, words, source, limits, a_length
                    )
                    unused -= b_length
                else:
                    b_start, b_first, b_length = a_stop, a_stop_skip, tokens - a_length
                    b_stop = stop + (stop_skip > 0)
                a_skip, a_kept, b_skip, b_kept = _truncate_pair(state, a_length, b_length, room)
                truncated += a_length - a_kept
                if not random:
                    truncated += b_length - b_kept
                row = out[count]
                count += 1
                row.example_id = _example_id(salt, position, skip)
                row.length = a_kept + b_kept + PAIR_SPECIAL_TOKENS
                row.pair_label = random or swapped
                b_offset = -1 if random else offset + a_length + b_skip
                a_end = a_stop + (a_stop_skip > 0)
                if swapped:
                    row.a_start, row.a_stop, row.b_start, row.b_stop = b_start, b_stop, position, a_end
                    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = b_first + b_skip, b_kept, skip + a_skip, a_kept
                    row.a_offset, row.b_offset = b_offset, offset + a_skip
                else:
                    row.a_start, row.a_stop, row.b_start, row.b_stop = position, a_end, b_start, b_stop
                    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = skip + a_skip, a_kept, b_first + b_skip, b_kept
                    row.a_offset, row.b_offset = offset + a_skip, b_offset
                position, skip = (a_stop, a_stop_skip) if random else (stop, stop_skip)
                offset += a_length if random else tokens
            document += 1
    return count, truncated, forced_random


@cached_njit
def _target_tokens(state, key, document, kind, room, short):
    """Target length of the pairs of a document, in tokens; the same in all chunks that contain parts of it."""
    state[0] = hash64(hash_input(hash_input(key, DOCUMENT), np.uint64(document)))
    state[1] = np.uint64(0)
    if kind != SENTENCES and draw_bernoulli(state, short):
        return 2 + draw_uniform_int(state, room - 1)
    return room


@cached_njit
def _piece_tokens(kind, target, room):
    """Tokens of a piece of a sentence that is too long for a row: so few that a pair has two or more.

    segment_pair and sentence_order divide the room that is left into equal pieces of at most this
    size; if one ends early, before a word, the later ones share its tokens.
    """
    if kind == SENTENCES:
        return room // 2
    return min((room + 1) // 2, max(MIN_PIECE_TOKENS, min(MAX_PIECE_TOKENS, (target + 1) // 2)))


@cached_njit
def _take_sentences(lengths, words, sentence, skip, end, limits, ends):
    """Takes the sentences, or pieces of long ones, of a pair; returns their number.

    Writes to `ends`, for each: the sentence that follows and the tokens of it that are taken, and the tokens so far.
    """
    kind, target, room, piece = limits
    tokens, taken, pieces, full = 0, 0, 0, False
    while sentence < end and not full and (taken < 2 if kind == SENTENCES else tokens < target):
        size = lengths[sentence] - skip
        if lengths[sentence] > room:
            whole = size
            if kind != SENTENCES:
                size = min(size, target - tokens if tokens else max(target, piece))
            pieces = pieces - 1 if pieces > 1 and kind != SENTENCES else -(-size // piece)
            size = -(-size // pieces)
            full = pieces == 1 and size < whole  # what is left of the room is part of a word
            if size < whole:
                size = cut_between_words(words, lengths, sentence, skip, size)
                skip += size
            else:
                skip, pieces = 0, 0
        sentence += skip == 0
        tokens += size
        ends[taken] = sentence, skip, tokens
        taken += 1
    return taken


@cached_njit
def _random_record(state, layout, document):
    """A record of another document, that of a random sentence of a random document: (its sentences [first, last), its
    number of tokens).
    """
    lengths, documents, records = layout.sentence_lengths, layout.document_offsets, layout.record_offsets
    while True:
        other = draw_uniform_int(state, len(documents) - 2)
        if other >= document:
            other += 1
        if not len(layout.groups) or draw_bernoulli(state, layout.group_thresholds[layout.groups[other]]):
            break
    sentence = documents[other] + draw_uniform_int(state, documents[other + 1] - documents[other])
    record = np.searchsorted(records, sentence, "right") - 1
    first, last = records[record], records[record + 1]
    tokens = 0
    for inside in range(first, last):
        tokens += lengths[inside]
    return (first, last), tokens


@cached_njit
def _random_segment(state, lengths, words, source, limits, a_length):
    """Sentences of a record from a random one on: (start, tokens of it that come before, stop, tokens), at least one
    sentence or a piece of a long one.
    """
    kind, target, room, piece = limits
    first, last = source
    least = 0 if kind == SENTENCES else target - a_length
    start = first + draw_uniform_int(state, last - first)
    skip = 0
    if lengths[start] > room:
        skip = draw_uniform_int(state, lengths[start] - piece + 1)
        back = min(skip, piece)
        skip += cut_between_words(words, lengths, start, skip - back, back) - back
    stop, begin, length = start, skip, 0
    while stop < last and (stop == start or length < least):
        size = lengths[stop] - begin
        if lengths[stop] > room:
            fits = least - length if length else max(least, piece)
            if fits < size:
                return start, skip, stop + 1, length + cut_between_words(words, lengths, stop, begin, fits)
        stop, begin, length = stop + 1, 0, length + size
    return start, skip, stop, length


@cached_njit
def _truncate_pair(state, a_length, b_length, room):
    """Removes single tokens from the longer segment, at the front or back with equal probability, until both fit."""
    a_skip, b_skip = 0, 0
    while a_length + b_length > room:
        front = draw_bernoulli(state, HALF)
        if a_length > b_length:
            a_skip += front
            a_length -= 1
        else:
            b_skip += front
            b_length -= 1
    return a_skip, a_length, b_skip, b_length


@cached_njit
def _make_single_segments(layout, chunks, crosses, cuts, budget, salt, out):
    """Writes the examples; returns their number."""
    count = 0
    offset = 0  # of the next token, in the window
    lengths, documents, words = layout.sentence_lengths, layout.document_offsets, layout.words
    for chunk in range(len(chunks)):
        chunk_start, chunk_end = chunks[chunk]
        first, skip, size, separators = chunk_start, 0, 0, 0  # of the current example
        document = np.searchsorted(documents, first, "right") - 1
        for sentence in range(chunk_start, chunk_end):
            separator = 0
            if sentence == documents[document + 1]:
                document += 1
                if size and not crosses:
                    count = _write_single(out, count, salt, first, sentence, skip, offset - size, size, 0)
                    first, skip, size = sentence, 0, 0
                separator = 1 if size else 0
            left = np.int64(lengths[sentence])
            if size + separators + separator + left > budget:
                room = budget - size - separators - separator
                if cuts and size and room > 0:
                    size, offset, left = size + room, offset + room, left - room
                    count = _write_single(
                        out, count, salt, first, sentence + 1, skip, offset - size, size, separators + separator
                    )
                    first, skip, size, separators, separator = sentence, room, 0, 0, 0
                elif size:
                    count = _write_single(out, count, salt, first, sentence, skip, offset - size, size, separators)
                    first, skip, size, separators, separator = sentence, 0, 0, 0, 0
                while left > budget:
                    taken = budget if cuts else cut_between_words(words, lengths, sentence, skip, budget)
                    count = _write_single(out, count, salt, sentence, sentence + 1, skip, offset, taken, 0)
                    skip, offset, left = skip + taken, offset + taken, left - taken
            size, offset, separators = size + left, offset + left, separators + separator
        if size:
            count = _write_single(out, count, salt, first, chunk_end, skip, offset - size, size, separators)
    return count


@cached_njit
def _write_single(out, count, salt, start, stop, skip, offset, tokens, separators):
    row = out[count]
    row.a_start, row.a_stop, row.b_start, row.b_stop = start, stop, 0, 0
    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = skip, tokens, 0, 0
    row.a_offset, row.b_offset, row.pair_label = offset, -1, -1
    row.length = tokens + separators + SINGLE_SPECIAL_TOKENS
    row.example_id = _example_id(salt, start, skip)
    return count + 1
