"""Texts to vectors: which texts share a row and which rows a forward pass, and the pooling of packed rows.

Where a text stands decides nothing about its vector: segments keep the texts of a row apart, positions count from each
[CLS]. Packing several into a row saves padding, and few lengths of rows save compilations; but attention looks at
all pairs of places in a row, so short texts get short rows as soon as there are enough of them.

Shapes in names: B rows, S positions, H hidden, K places for texts in a row, W width of a text's vector.
"""

import bisect
import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads, pool_examples
from bert_jax.shapes import Array, Float, Int

STEP = 32
"""Rows have a multiple of so many tokens, up to 8 steps; beyond that, of an eighth of the power of two above."""
OWN_ROWS = 16_384
"""Tokens for which rows of one more length are worth a compilation: about two seconds of two CPU cores each, with 6
layers of width 384."""
SHORTEST = 8
"""A row of S tokens has places for S / SHORTEST texts."""
LONG = 512
"""Tokens of a row whose attention scores, with batch_size rows, are the most that a pass may hold."""
PARTS = 8
"""The last pass over rows of a length has a multiple of 1 / PARTS of the rows that the others have."""
IN_FLIGHT = 2
"""Forward passes dispatched before the first is read."""


class Pass(NamedTuple):
    """One forward pass: the texts of each of its rows, by index, in the order in which they stand there."""

    seq_len: int
    num_rows: int
    """At least len(rows): the same on each device, and of few sizes, so that few shapes are compiled; the rest is
    padding."""
    rows: list[list[int]]


def row_length(length: int) -> int:
    """The shortest row that holds so many tokens."""
    step = max(STEP, 2 ** (length - 1).bit_length() // 8)
    return -(-length // step) * step


def plan(lengths: Sequence[int], batch_size: int, devices: int = 1) -> list[Pass]:
    """Share texts out over rows and rows over passes, longest rows first.

    Best fit, longest text first (Krell et al. 2021, arXiv:2107.02027, look at lengths alone as well). A text opens a
    row of the length of its own class, or of the next one above that has OWN_ROWS tokens; the longest class is always
    there, and where it has fewer, its length is a power of two.

    Args:
      lengths: tokens of each text, special ones included.
      batch_size: rows of the longest kind in a pass, on each device; of shorter rows, as many more as have no more
        tokens; of rows beyond LONG tokens, fewer, so that the scores of attention take no more room.
      devices: that share the rows of a pass equally.
    """
    if not len(lengths):
        return []
    kinds = _kinds(lengths)
    rows: dict[int, list[list[int]]] = {kind: [] for kind in kinds}
    free: dict[int, list[tuple[int, list[int]]]] = collections.defaultdict(list)  # (kind, row) by tokens left in it
    rooms: list[int] = []  # the keys of `free`, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect.bisect_left(rooms, lengths[i])
        if place < len(rooms):
            room = rooms[place]
            kind, row = free[room].pop()
            if not free[room]:
                del rooms[place]
        else:
            room = kind = kinds[bisect.bisect_left(kinds, lengths[i])]
            row = []
            rows[kind].append(row)
        row.append(i)
        left = room - lengths[i]
        if left and len(row) < _places(kind):
            if not free[left]:
                bisect.insort(rooms, left)
            free[left].append((kind, row))
    passes = []
    for kind in reversed(kinds):
        most = min(batch_size * kinds[-1] // kind, max(1, batch_size * LONG**2 // kind**2))
        passes += _passes(kind, rows[kind], most, devices)
    return passes


def _kinds(lengths: Sequence[int]) -> list[int]:
    """Lengths of rows, ascending."""
    tokens: dict[int, int] = collections.Counter()
    for length in lengths:
        tokens[row_length(length)] += length
    kinds, waiting, longest = [], 0, max(tokens)
    for kind in sorted(tokens):
        waiting += tokens[kind]
        if waiting >= OWN_ROWS:
            kinds.append(kind)
            waiting = 0
    if kinds[-1:] != [longest]:
        kinds.append(max(STEP, 2 ** (longest - 1).bit_length()))
    return kinds


def _places(seq_len: int) -> int:
    return seq_len // SHORTEST


def _passes(seq_len: int, rows: list[list[int]], most: int, devices: int) -> Iterator[Pass]:
    most = 2 ** (most.bit_length() - 1)
    step = max(1, most // PARTS) * devices
    for start in range(0, len(rows), most * devices):
        chosen = rows[start : start + most * devices]
        yield Pass(seq_len, -(-len(chosen) // step) * step, chosen)


def assemble(one: Pass, ids: Sequence[np.ndarray], pad_id: int) -> EncoderInputs:
    """The arrays of a pass; `ids` are those of all texts, special ones included."""
    shape = (one.num_rows, one.seq_len)
    input_ids = np.full(shape, pad_id, np.int32)
    segment_ids, position_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    cls_positions = np.zeros((one.num_rows, _places(one.seq_len)), np.int32)
    for b, row in enumerate(one.rows):
        start = 0
        for k, i in enumerate(row):
            end = start + len(ids[i])
            input_ids[b, start:end], segment_ids[b, start:end] = ids[i], k + 1
            position_ids[b, start:end] = np.arange(end - start)
            cls_positions[b, k] = start
            start = end
    return EncoderInputs(input_ids, np.zeros(shape, np.int32), segment_ids, position_ids, cls_positions)


def pooled(
    config: ModelConfig,
    heads: Heads,
    modes: tuple[str, ...],
    params: bert.Params,
    inputs: EncoderInputs,
    skip: Int[Array, ""],
) -> Float[Array, "B K W"]:
    """A float32 vector for each place of each row, from the last layer.

    Args:
      config: shapes of the model.
      heads: the model's; none is computed.
      modes: each gives a vector of width H, in this order (Reimers and Gurevych 2019, arXiv:1908.10084, section 3):
        'cls', of the first token; 'max' and 'mean' over the tokens; 'mean_sqrt_len_tokens', their sum over the root of
        their number.
      params: of the model.
      inputs: a pass.
      skip: leading tokens of each text that are left out.
    """
    hidden_BSH = bert.bind(config, heads, params).encoder(inputs).hidden.astype(jnp.float32)
    places = inputs.cls_positions.shape[1]
    belongs_BS = jnp.where(inputs.position_ids >= skip, inputs.segment_ids, 0)

    def pool(mode: str) -> Float[Array, "B K H"]:
        if mode == "cls":
            return jnp.take_along_axis(hidden_BSH, inputs.cls_positions[:, :, None] + skip, axis=1, mode="clip")
        if mode == "max":
            of_place_BSK1 = (belongs_BS[:, :, None] == jnp.arange(1, places + 1)[None, None, :])[..., None]
            return jnp.where(of_place_BSK1, hidden_BSH[:, :, None], -jnp.inf).max(1)
        means_BKH = pool_examples(hidden_BSH, belongs_BS, places)
        if mode == "mean":
            return means_BKH
        counts_BK = (belongs_BS[:, :, None] == jnp.arange(1, places + 1)[None, None, :]).sum(1)
        return means_BKH * jnp.sqrt(counts_BK.astype(jnp.float32))[:, :, None]

    return jnp.concatenate([pool(mode) for mode in modes], axis=-1)


def vectors_of(
    ids: Sequence[np.ndarray],
    pad_id: int,
    batch_size: int,
    run: Callable[[EncoderInputs], Array],
    *,
    devices: int = 1,
    done: Callable[[int], None] = lambda texts: None,
) -> np.ndarray:
    """One vector per text, float32 [len(ids), width], in the order of the texts.

    Args:
      ids: of each text, special ones included, at least one; at least one text.
      pad_id: what fills up rows.
      batch_size: see `plan`.
      run: a pass to its vectors [B, K, width]; the next is dispatched before the last is read.
      devices: see `plan`.
      done: called with the number of texts of each pass that has been read.
    """
    vectors: np.ndarray | None = None
    in_flight: collections.deque[tuple[Pass, Array]] = collections.deque()

    def read() -> None:
        nonlocal vectors
        one, result = in_flight.popleft()
        vectors_BKW = np.asarray(result)
        if vectors is None:
            vectors = np.zeros((len(ids), vectors_BKW.shape[-1]), np.float32)
        for b, row in enumerate(one.rows):
            vectors[row] = vectors_BKW[b, : len(row)]
        done(sum(map(len, one.rows)))

    for one in plan([len(text) for text in ids], batch_size, devices):
        in_flight.append((one, run(assemble(one, ids, pad_id))))
        if len(in_flight) > IN_FLIGHT:
            read()
    while in_flight:
        read()
    assert vectors is not None
    return vectors
