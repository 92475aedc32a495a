"""Which sentences make which row: a pure, compiled function of (corpus lengths, seq_len, seed, epoch).

No record is read here and nothing is random but counters: a row's draws hash (seed, example epoch, document),
the order of rows hashes (seed, epoch). The recipe is google-research/bert create_pretraining_data.py.
"""

from dataclasses import dataclass

import numba
import numpy as np

from bert_jax.config import DataConfig
from bert_jax.data.corpus import Corpus
from bert_jax.errors import UserError

ROW = np.dtype(
    [
        ("a_start", np.int64),  # first sentence of segment A
        ("a_stop", np.int64),  # one past its last
        ("b_start", np.int64),
        ("b_stop", np.int64),
        ("a_skip", np.int32),  # tokens cut off the front of A
        ("a_tokens", np.int32),  # tokens kept of A
        ("b_skip", np.int32),
        ("b_tokens", np.int32),
        ("pair_label", np.int32),  # 0: B follows A in its document; 1: B is from another document
    ]
)

EXAMPLE_STREAM, ORDER_STREAM = 0xE4A, 0x04D
SPECIAL_TOKENS = 3  # [CLS] A [SEP] B [SEP]


@dataclass(frozen=True)
class EpochPlan:
    """The rows of one epoch, in the corpus's order; `order` says where each comes in training."""

    rows: np.ndarray
    """Structured array of `ROW`; the index of a row is its example id."""
    truncated_tokens: int
    """Tokens that no row shows because a pair was longer than its row."""
    order_key: int

    def __len__(self) -> int:
        return len(self.rows)

    def example_at(self, position: int | np.ndarray) -> np.ndarray:
        """Example ids at places in this epoch's order; any place is found without the ones before it."""
        return _shuffle(np.atleast_1d(np.asarray(position, np.int64)), len(self.rows), np.uint64(self.order_key))


def plan_epoch(corpus: Corpus, data: DataConfig, seq_len: int, seed: int, epoch: int) -> EpochPlan:
    """Plan an epoch of segment pairs.

    Sentences of a document are collected up to a target length (the full row, or with probability
    `short_example_rate` a length drawn from [2, seq_len - 3]); a random cut makes A, and B is the rest, or
    with probability one half, and always where the chunk has one sentence, a random place of another
    document. What a random B displaces goes into the next row. Pairs are cut token by token from the longer
    segment, front or back.

    Args:
      corpus: needs at least two documents.
      data: rates and how often examples repeat.
      seq_len: tokens per row, special tokens included.
      seed: of the run.
      epoch: decides the order, and (modulo data.example_copies) the examples.

    Raises:
      UserError: fewer than two documents, so that no B could come from another one.
    """
    if corpus.num_documents < 2:
        raise UserError(
            f"corpus {corpus.directory}: split '{corpus.split}' has {corpus.num_documents} document(s), but sentence "
            "pairs need at least 2: add text, or separate documents by a blank line when building"
        )
    example_epoch = epoch if data.example_copies is None else epoch % data.example_copies
    lengths, documents = np.asarray(corpus.sentence_lengths), np.asarray(corpus.document_offsets)
    key = _key(seed, EXAMPLE_STREAM, example_epoch)
    short = np.uint64(min(round(data.short_example_rate * 2**53), 2**53))
    nothing = np.empty(0, ROW)
    count, _ = _segment_pairs(lengths, documents, seq_len - SPECIAL_TOKENS, short, key, nothing)
    rows = np.empty(count, ROW)
    _, truncated = _segment_pairs(lengths, documents, seq_len - SPECIAL_TOKENS, short, key, rows)
    return EpochPlan(rows, int(truncated), int(_key(seed, ORDER_STREAM, epoch)))


def _key(*words: int) -> np.uint64:
    key = np.uint64(0)
    for word in words:
        # Compiled functions return Python integers, which numba would take for signed ones.
        key = np.uint64(_mix(np.uint64(_add(key, np.uint64(word)))))
    return key


@numba.njit(cache=True)
def _add(a, b):
    return a * np.uint64(0x9E3779B97F4A7C15) + b + np.uint64(1)


@numba.njit(cache=True)
def _mix(z):
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@numba.njit(cache=True)
def _draw(state, bound):
    """A uniform integer in [0, bound); advances the counter in ``state[1]``."""
    state[1] += np.uint64(1)
    high = _mix(_add(state[0], state[1])) >> np.uint64(32)
    return np.int64((high * np.uint64(bound)) >> np.uint64(32))


@numba.njit(cache=True)
def _happens(state, threshold):
    """True with probability threshold / 2^53."""
    state[1] += np.uint64(1)
    return (_mix(_add(state[0], state[1])) >> np.uint64(11)) < threshold


@numba.njit(cache=True)
def _segment_pairs(lengths, documents, room, short, key, rows):
    """Write rows if there is room for them in `rows`; returns (rows made, tokens truncated)."""
    half = np.uint64(2**52)
    state = np.zeros(2, np.uint64)
    made = 0
    truncated = 0
    num_documents = len(documents) - 1
    for document in range(num_documents):
        state[0] = _mix(_add(key, np.uint64(document)))
        state[1] = np.uint64(0)
        start, end = documents[document], documents[document + 1]
        while start < end:
            target = room
            if _happens(state, short):
                target = 2 + _draw(state, room - 1)
            stop = start
            tokens = 0
            while stop < end and tokens < target:
                tokens += lengths[stop]
                stop += 1
            a_stop = start + 1
            if stop - start >= 2:
                a_stop = start + 1 + _draw(state, stop - start - 1)
            a_length = 0
            for sentence in range(start, a_stop):
                a_length += lengths[sentence]
            if stop - start == 1 or _happens(state, half):
                label = 1
                other = _draw(state, num_documents - 1)
                if other >= document:
                    other += 1
                first, last = documents[other], documents[other + 1]
                b_start = first + _draw(state, last - first)
                b_stop = b_start
                b_length = 0
                while b_stop < last and (b_stop == b_start or b_length < target - a_length):
                    b_length += lengths[b_stop]
                    b_stop += 1
                following = a_stop
            else:
                label = 0
                b_start, b_stop = a_stop, stop
                b_length = tokens - a_length
                following = stop
            a_skip, a_kept, b_skip, b_kept = _truncate(state, a_length, b_length, room)
            truncated += a_length - a_kept
            if label == 0:
                truncated += b_length - b_kept
            if made < len(rows):
                row = rows[made]
                row.a_start, row.a_stop, row.b_start, row.b_stop = start, a_stop, b_start, b_stop
                row.a_skip, row.a_tokens, row.b_skip, row.b_tokens = a_skip, a_kept, b_skip, b_kept
                row.pair_label = label
            made += 1
            start = following
    return made, truncated


@numba.njit(cache=True)
def _truncate(state, a_length, b_length, room):
    """Cut single tokens from the longer segment, front or back with equal chance, until both fit."""
    half = np.uint64(2**52)
    a_skip, b_skip = 0, 0
    while a_length + b_length > room:
        front = _happens(state, half)
        if a_length > b_length:
            a_skip += front
            a_length -= 1
        else:
            b_skip += front
            b_length -= 1
    return a_skip, a_length, b_skip, b_length


@numba.njit(cache=True)
def _shuffle(positions, size, key):
    """A keyed permutation of range(size): four Feistel rounds, walked until the value is below size."""
    bits = 1
    while (1 << (2 * bits)) < size:
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    shift = np.uint64(bits)
    out = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        value = np.uint64(positions[i])
        while True:
            left, right = value >> shift, value & mask
            for turn in range(4):
                left, right = right, left ^ (_mix(_add(key ^ np.uint64(turn), right)) & mask)
            value = (left << shift) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)
    return out
