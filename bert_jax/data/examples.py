"""Which sentences make which example: one compiled walk over sentence lengths per kind of format.

No record is read here. An example's draws hash (seed, example epoch, document, first sentence of its stretch of
the document), so that it hangs neither on what else is planned with it nor on how examples are packed.
Every document has a sentence and every sentence a token, which `plan.stretches` makes sure of.
"""

from typing import NamedTuple

import numba
import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.hash_random import HALF, add, draw, happens, mix, threshold

EXAMPLE = np.dtype(
    [
        ("a_start", np.int64),  # first sentence of segment A, before it is cut to fit
        ("a_stop", np.int64),  # one past the last
        ("b_start", np.int64),  # of segment B; 0 where there is none
        ("b_stop", np.int64),
        ("a_skip", np.int32),  # tokens between the start of sentence a_start and A's first one
        ("a_tokens", np.int32),
        ("b_skip", np.int32),
        ("b_tokens", np.int32),  # 0: there is no segment B
        ("a_offset", np.int32),  # A's first token, counted from the start of the window's tokens
        ("b_offset", np.int32),  # the same of B; -1 where B comes from another place
        ("length", np.int32),  # tokens with [CLS] and every [SEP]
        ("pair_label", np.int32),  # 0: B follows A; 1: B is random, or A and B are swapped; -1: no label
        ("example_id", np.int32),  # hash of corpus and place, not negative; masks hang on it
    ]
)

PAIR_SPECIALS, RUN_SPECIALS = 3, 2
"""[CLS] A [SEP] B [SEP], and [CLS] sentences [SEP]."""
SEGMENTS, SENTENCES, ORDER = range(3)
DOCUMENT = np.uint64(0xD0C)
PAIR_KINDS = {"segment_pair": SEGMENTS, "sentence_pair": SENTENCES, "sentence_order": ORDER}


class Layout(NamedTuple):
    """A corpus, as far as examples need it."""

    lengths: np.ndarray
    """tokens of each sentence, uint16 [num_sentences]"""
    documents: np.ndarray
    """first sentence of each document, int64 [num_documents + 1]"""


class Made(NamedTuple):
    """Examples of a window, and what became of its tokens."""

    examples: np.ndarray
    """structured array of `EXAMPLE`"""
    truncated: int
    """tokens that no example shows, because a pair was longer than its row"""
    singles: int
    """pairs whose chunk had one sentence, so that B had to be random"""


def make_examples(
    layout: Layout,
    starts: np.ndarray,
    stops: np.ndarray,
    data: DataConfig,
    seq_len: int,
    key: np.uint64,
    salt: np.uint64,
) -> Made:
    """All examples of some stretches of a corpus, in order.

    Pairs (google-research/bert and google-research/albert, create_pretraining_data.py): sentences of a
    document are collected up to a target length (the full row, or, drawn once for the document, a shorter
    one), a random cut makes A, and B is the rest, or with probability one half, and always where the chunk
    has one sentence, a random place of another document; what a random B displaces goes into the next
    example. Pairs are cut token by token from the longer
    segment, front or back. sentence_pair (Liu et al. 2019, section 4.2) takes two sentences at a time.
    sentence_order swaps A and B instead; only a chunk of one sentence has a random B, as in ALBERT's code.

    Runs (Liu et al. 2019, section 4.2): whole consecutive sentences up to the row's length; full_sentences go
    on behind a [SEP] where a document ends. A sentence longer than a row is cut into whole rows and a rest.

    Args:
      layout: of the corpus; pairs need at least two documents in it.
      starts, stops: sentences of each stretch, int64 [n]. No example crosses from one into another.
      data: format, rates and where runs end.
      seq_len: tokens per row, special tokens included.
      key: of seed and example epoch.
      salt: of the corpus, for example ids.
    """
    sentences = int((stops - starts).sum())
    if data.paired:
        short = threshold(data.short_example_rate)
        out = np.empty(sentences, EXAMPLE)
        kind = PAIR_KINDS[data.format]
        count, truncated, singles = _pairs(*layout, starts, stops, kind, seq_len - PAIR_SPECIALS, short, key, salt, out)
    else:
        budget = seq_len - RUN_SPECIALS
        tokens = sum(int(layout.lengths[a:b].sum(dtype=np.int64)) for a, b in zip(starts, stops, strict=True))
        out = np.empty(sentences + tokens // budget, EXAMPLE)
        crosses, cuts = data.format == "full_sentences", data.example_end == "row"
        count, truncated, singles = _runs(*layout, starts, stops, crosses, cuts, budget, salt, out), 0, 0
    return Made(out[:count].copy(), int(truncated), int(singles))


@numba.njit(cache=True, nogil=True)
def _id(salt, sentence, skip):
    return np.int32(mix(add(add(salt, np.uint64(sentence)), np.uint64(skip))) >> np.uint64(33))


@numba.njit(cache=True, nogil=True)
def _pairs(lengths, documents, starts, stops, kind, room, short, key, salt, out):
    """Writes the examples; returns (how many, tokens truncated, chunks of one sentence)."""
    state = np.zeros(2, np.uint64)
    made, truncated, singles = 0, 0, 0
    offset = 0
    for stretch in range(len(starts)):
        position = starts[stretch]
        document = np.searchsorted(documents, position, "right") - 1
        while position < stops[stretch]:
            end = min(documents[document + 1], stops[stretch])
            target = _target(state, key, document, kind, room, short)
            state[0] = mix(add(key, np.uint64(position)))
            state[1] = np.uint64(0)
            while position < end:
                stop, tokens, a_stop = _chunk(state, lengths, position, end, kind, target)
                a_length = 0
                for sentence in range(position, a_stop):
                    a_length += lengths[sentence]
                single = stop - position == 1
                singles += single
                random = single or (kind != ORDER and happens(state, HALF))
                swapped = kind == ORDER and not single and happens(state, HALF)
                if random:
                    b_start, b_stop, b_length = _other(
                        state, lengths, documents, document, 0 if kind == SENTENCES else target - a_length
                    )
                else:
                    b_start, b_stop, b_length = a_stop, stop, tokens - a_length
                a_skip, a_kept, b_skip, b_kept = _truncate(state, a_length, b_length, room)
                truncated += a_length - a_kept
                if not random:
                    truncated += b_length - b_kept
                row = out[made]
                made += 1
                row.example_id = _id(salt, position, 0)
                row.length = a_kept + b_kept + PAIR_SPECIALS
                row.pair_label = random or swapped
                b_offset = -1 if random else offset + a_length + b_skip
                if swapped:
                    row.a_start, row.a_stop, row.b_start, row.b_stop = b_start, b_stop, position, a_stop
                    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = b_skip, b_kept, a_skip, a_kept
                    row.a_offset, row.b_offset = b_offset, offset + a_skip
                else:
                    row.a_start, row.a_stop, row.b_start, row.b_stop = position, a_stop, b_start, b_stop
                    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = a_skip, a_kept, b_skip, b_kept
                    row.a_offset, row.b_offset = offset + a_skip, b_offset
                position = a_stop if random else stop
                offset += a_length if random else tokens
            document += 1
    return made, truncated, singles


@numba.njit(cache=True, nogil=True)
def _target(state, key, document, kind, room, short):
    """How many tokens the chunks of a document are to have; the same in all stretches that share it."""
    state[0] = mix(add(add(key, DOCUMENT), np.uint64(document)))
    state[1] = np.uint64(0)
    if kind != SENTENCES and happens(state, short):
        return 2 + draw(state, room - 1)
    return room


@numba.njit(cache=True, nogil=True)
def _chunk(state, lengths, start, end, kind, target):
    """(end of the chunk, its tokens, end of A)."""
    stop = start
    tokens = 0
    while stop < end and (stop - start < 2 if kind == SENTENCES else tokens < target):
        tokens += lengths[stop]
        stop += 1
    a_stop = start + 1
    if kind != SENTENCES and stop - start >= 2:
        a_stop = start + 1 + draw(state, stop - start - 1)
    return stop, tokens, a_stop


@numba.njit(cache=True, nogil=True)
def _other(state, lengths, documents, document, wanted):
    """A random place of another document: (start, stop, tokens), at least one sentence, to its end at most."""
    other = draw(state, len(documents) - 2)
    if other >= document:
        other += 1
    first, last = documents[other], documents[other + 1]
    start = first + draw(state, last - first)
    stop = start
    length = 0
    while stop < last and (stop == start or length < wanted):
        length += lengths[stop]
        stop += 1
    return start, stop, length


@numba.njit(cache=True, nogil=True)
def _truncate(state, a_length, b_length, room):
    """Cut single tokens from the longer segment, front or back with equal chance, until both fit."""
    a_skip, b_skip = 0, 0
    while a_length + b_length > room:
        front = happens(state, HALF)
        if a_length > b_length:
            a_skip += front
            a_length -= 1
        else:
            b_skip += front
            b_length -= 1
    return a_skip, a_length, b_skip, b_length


@numba.njit(cache=True, nogil=True)
def _runs(lengths, documents, starts, stops, crosses, cuts, budget, salt, out):
    """Writes the examples; returns how many."""
    made = 0
    offset = 0  # of the next token, in the window
    for stretch in range(len(starts)):
        first, skip, size, separators = starts[stretch], 0, 0, 0  # of the example under way
        document = np.searchsorted(documents, first, "right") - 1
        for sentence in range(starts[stretch], stops[stretch]):
            separator = 0
            if sentence == documents[document + 1]:
                document += 1
                if size and not crosses:
                    made = _close(out, made, salt, first, sentence, skip, offset - size, size, 0)
                    first, skip, size = sentence, 0, 0
                separator = 1 if size else 0
            left = np.int64(lengths[sentence])
            if size + separators + separator + left > budget:
                room = budget - size - separators - separator
                if cuts and size and room > 0:
                    size, offset, left = size + room, offset + room, left - room
                    made = _close(
                        out, made, salt, first, sentence + 1, skip, offset - size, size, separators + separator
                    )
                    first, skip, size, separators, separator = sentence, room, 0, 0, 0
                elif size:
                    made = _close(out, made, salt, first, sentence, skip, offset - size, size, separators)
                    first, skip, size, separators, separator = sentence, 0, 0, 0, 0
                while left > budget:
                    made = _close(out, made, salt, sentence, sentence + 1, skip, offset, budget, 0)
                    skip, offset, left = skip + budget, offset + budget, left - budget
            size, offset, separators = size + left, offset + left, separators + separator
        if size:
            made = _close(out, made, salt, first, stops[stretch], skip, offset - size, size, separators)
    return made


@numba.njit(cache=True, nogil=True)
def _close(out, made, salt, start, stop, skip, offset, tokens, separators):
    row = out[made]
    row.a_start, row.a_stop, row.b_start, row.b_stop = start, stop, 0, 0
    row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = skip, tokens, 0, 0
    row.a_offset, row.b_offset, row.pair_label = offset, -1, -1
    row.length = tokens + separators + RUN_SPECIALS
    row.example_id = _id(salt, start, skip)
    return made + 1
