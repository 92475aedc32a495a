"""Text embeddings: packs texts into rows and rows into forward passes, and pools the packed rows.

A text's vector does not depend on its row: segments separate the texts of a row, and positions count from each [CLS].
Packing reduces padding, and few row lengths reduce compilations. The cost of attention grows with the square of the row
length, so short texts get short rows if there are enough of them.

Shapes in names: B rows, S positions, H hidden, K text slots of a row, W width of a text's vector.
"""

import bisect
import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float, Int
from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads, mean_pool_examples

ROW_LENGTH_STEP = 32
"""Row lengths are multiples of this up to 8 times this; longer ones of an eighth of the next power of two."""
MIN_TOKENS_PER_LENGTH = 16_384
"""A row length is used only for at least this many tokens, because each length costs a compilation: about two seconds
on two CPU cores, with 6 layers of width 384."""
TOKENS_PER_TEXT_SLOT = 8
"""A row of S tokens has S / TOKENS_PER_TEXT_SLOT text slots."""
FULL_BATCH_LENGTH = 512
"""Longest row with the full batch size: longer rows get fewer per pass, which bounds the memory of attention scores."""
LAST_PASS_PARTS = 8
"""The last pass of a row length has a multiple of 1 / LAST_PASS_PARTS of the other passes' rows."""
IN_FLIGHT = 2
"""Number of forward passes that are dispatched before the first result is read."""


class ForwardPass(NamedTuple):
    """One forward pass: the indices of the texts of each row, in order."""

    seq_len: int
    num_rows: int
    """At least len(rows), divisible by the number of devices, and of few sizes, so that few shapes are compiled; the
    other rows are padding."""
    rows: list[list[int]]


def row_length(length: int, least_step: int = ROW_LENGTH_STEP) -> int:
    """The smallest row length for this many tokens; all are multiples of `least_step`."""
    step = max(least_step, 2 ** (length - 1).bit_length() // 8)
    return -(-length // step) * step


def plan_passes(lengths: Sequence[int], batch_size: int, devices: int = 1) -> list[ForwardPass]:
    """Distribute texts over rows and rows over passes, longest rows first.

    Best fit, longest text first (Krell et al. 2021, arXiv:2107.02027, also pack by length alone). A text opens a row of
    its own row length, or of the next longer one that has MIN_TOKENS_PER_LENGTH tokens. The longest length is always
    used; if it has fewer tokens, it is a power of two.

    Args:
      lengths: number of tokens of each text, special ones included.
      batch_size: rows per pass and device at the longest row length; shorter rows get proportionally more, rows above
        FULL_BATCH_LENGTH tokens fewer, so that attention scores need no more memory.
      devices: number of devices, which get equal numbers of rows.
    """
    if not len(lengths):
        return []
    row_lengths = _row_lengths(lengths)
    rows: dict[int, list[list[int]]] = {row_len: [] for row_len in row_lengths}
    free: dict[int, list[tuple[int, list[int]]]] = collections.defaultdict(list)  # (row length, row) by free tokens
    free_token_counts: list[int] = []  # the keys of `free`, sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = bisect.bisect_left(free_token_counts, lengths[i])
        if index < len(free_token_counts):
            free_tokens = free_token_counts[index]
            row_len, row = free[free_tokens].pop()
            if not free[free_tokens]:
                del free_token_counts[index]
        else:
            free_tokens = row_len = row_lengths[bisect.bisect_left(row_lengths, lengths[i])]
            row = []
            rows[row_len].append(row)
        row.append(i)
        remaining = free_tokens - lengths[i]
        if remaining and len(row) < _text_slots(row_len):
            if not free[remaining]:
                bisect.insort(free_token_counts, remaining)
            free[remaining].append((row_len, row))
    passes = []
    for row_len in reversed(row_lengths):
        max_rows = min(batch_size * row_lengths[-1] // row_len, max(1, batch_size * FULL_BATCH_LENGTH**2 // row_len**2))
        passes += _passes(row_len, rows[row_len], max_rows, devices)
    return passes


def _row_lengths(lengths: Sequence[int]) -> list[int]:
    """The row lengths to use, ascending."""
    tokens: dict[int, int] = collections.Counter()
    for length in lengths:
        tokens[row_length(length)] += length
    row_lengths, pending_tokens, longest = [], 0, max(tokens)
    for row_len in sorted(tokens):
        pending_tokens += tokens[row_len]
        if pending_tokens >= MIN_TOKENS_PER_LENGTH:
            row_lengths.append(row_len)
            pending_tokens = 0
    if row_lengths[-1:] != [longest]:
        row_lengths.append(max(ROW_LENGTH_STEP, 2 ** (longest - 1).bit_length()))
    return row_lengths


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], length: int, fill: int
) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B S"]]:
    """Rows in arrays [rows, length], and 1 where a row has values, both int32; `fill` elsewhere."""
    values, mask = np.full((len(rows), length), fill, np.int32), np.zeros((len(rows), length), np.int32)
    for b, row in enumerate(rows):
        values[b, : len(row)], mask[b, : len(row)] = row, 1
    return values, mask


def _text_slots(seq_len: int) -> int:
    return seq_len // TOKENS_PER_TEXT_SLOT


def _passes(seq_len: int, rows: list[list[int]], max_rows: int, devices: int) -> Iterator[ForwardPass]:
    max_rows = 2 ** (max_rows.bit_length() - 1)
    step = max(1, max_rows // LAST_PASS_PARTS) * devices
    for start in range(0, len(rows), max_rows * devices):
        chosen = rows[start : start + max_rows * devices]
        yield ForwardPass(seq_len, -(-len(chosen) // step) * step, chosen)


def assemble(forward_pass: ForwardPass, ids: Sequence[np.ndarray], pad_id: int) -> EncoderInputs:
    """The input arrays of a pass; `ids` are those of all texts, special ones included."""
    shape = (forward_pass.num_rows, forward_pass.seq_len)
    input_ids = np.full(shape, pad_id, np.int32)
    segment_ids, position_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    cls_positions = np.zeros((forward_pass.num_rows, _text_slots(forward_pass.seq_len)), np.int32)
    for b, row in enumerate(forward_pass.rows):
        start = 0
        for k, i in enumerate(row):
            end = start + len(ids[i])
            input_ids[b, start:end], segment_ids[b, start:end] = ids[i], k + 1
            position_ids[b, start:end] = np.arange(end - start)
            cls_positions[b, k] = start
            start = end
    return EncoderInputs(input_ids, np.zeros(shape, np.int32), segment_ids, position_ids, cls_positions)


def embed_packed_inputs(
    config: ModelConfig,
    heads: Heads,
    modes: tuple[str, ...],
    params: bert.Params,
    inputs: EncoderInputs,
    skip: Int[Array, ""],
) -> Float[Array, "B K W"]:
    """A float32 vector for each text slot of each row, from the last layer.

    Args:
      config: shapes of the model.
      heads: of the model; they are not computed.
      modes: each gives a vector of width H, concatenated (Reimers and Gurevych 2019, arXiv:1908.10084, section 3):
        'cls', of the first token; 'max' and 'mean' over the tokens; 'mean_sqrt_len_tokens', their sum divided by the
        square root of their number.
      params: of the model.
      inputs: a pass.
      skip: number of leading tokens of each text that are not pooled.
    """
    hidden_BSH = bert.model_from_params(config, heads, params).encoder(inputs).hidden.astype(jnp.float32)
    num_slots = inputs.cls_positions.shape[1]
    text_numbers_BS = jnp.where(inputs.position_ids >= skip, inputs.segment_ids, 0)

    def pool(mode: str) -> Float[Array, "B K H"]:
        if mode == "cls":
            return jnp.take_along_axis(hidden_BSH, inputs.cls_positions[:, :, None] + skip, axis=1, mode="clip")
        if mode == "max":
            in_slot_BSK1 = (text_numbers_BS[:, :, None] == jnp.arange(1, num_slots + 1)[None, None, :])[..., None]
            return jnp.where(in_slot_BSK1, hidden_BSH[:, :, None], -jnp.inf).max(1)
        means_BKH = mean_pool_examples(hidden_BSH, text_numbers_BS, num_slots)
        if mode == "mean":
            return means_BKH
        counts_BK = (text_numbers_BS[:, :, None] == jnp.arange(1, num_slots + 1)[None, None, :]).sum(1)
        return means_BKH * jnp.sqrt(counts_BK.astype(jnp.float32))[:, :, None]

    return jnp.concatenate([pool(mode) for mode in modes], axis=-1)


def encode_ids(
    ids: Sequence[np.ndarray],
    pad_id: int,
    batch_size: int,
    run: Callable[[EncoderInputs], Array],
    *,
    devices: int = 1,
    on_texts_done: Callable[[int], None] = lambda texts: None,
) -> np.ndarray:
    """One vector per text, float32 [len(ids), width], in the order of the texts.

    Args:
      ids: of each text, special ones included; at least one text, none empty.
      pad_id: id of the padding token.
      batch_size: see `plan_passes`.
      run: from a pass to its vectors [B, K, width]; dispatched asynchronously.
      devices: see `plan_passes`.
      on_texts_done: called with the number of texts of each pass whose result was read.
    """
    vectors: np.ndarray | None = None
    in_flight: collections.deque[tuple[ForwardPass, Array]] = collections.deque()

    def read() -> None:
        nonlocal vectors
        forward_pass, result = in_flight.popleft()
        vectors_BKW = np.asarray(result)
        if vectors is None:
            vectors = np.zeros((len(ids), vectors_BKW.shape[-1]), np.float32)
        for b, row in enumerate(forward_pass.rows):
            vectors[row] = vectors_BKW[b, : len(row)]
        on_texts_done(sum(map(len, forward_pass.rows)))

    for forward_pass in plan_passes([len(text) for text in ids], batch_size, devices):
        in_flight.append((forward_pass, run(assemble(forward_pass, ids, pad_id))))
        if len(in_flight) > IN_FLIGHT:
            read()
    while in_flight:
        read()
    assert vectors is not None
    return vectors
