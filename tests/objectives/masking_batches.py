"""Rows of made-up examples for the tests of masking and of the losses."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ObjectiveConfig
from bert_jax.model.dropout import hash_combine
from bert_jax.objectives.masking import Vocabulary, mask_tokens

PAD, UNK, CLS, SEP, MASK = 0, 7, 30, 31, 60
VOCABULARY = Vocabulary(size=64, mask_id=MASK, special_ids=(PAD, UNK, CLS, SEP, MASK))
ORDINARY = np.setdiff1d(np.arange(64), VOCABULARY.special_ids)
KEY = hash_combine(jnp.uint32(0), 1)
OBJECTIVE = ObjectiveConfig()

masked = functools.partial(jax.jit, static_argnums=(2, 3))(mask_tokens)

Pack = Sequence[tuple[int, Sequence[int]]]


def pack_rows(packs: Sequence[Pack], seq_len: int, epoch: int = 0, slots: int | None = None) -> dict:
    """Rows of packed examples, each (example id, token ids)."""
    slots = slots or max(map(len, packs))
    shape = len(packs), seq_len
    batch = {n: np.zeros(shape, np.int32) for n in ("segment_ids", "position_ids", "token_type_ids")}
    batch["input_ids"] = np.full(shape, PAD, np.int32)
    batch |= {n: np.zeros((len(packs), slots), np.int32) for n in ("pair_labels", "cls_positions")}
    batch["example_id"] = np.full((len(packs), slots), -1, np.int32)
    batch["mask_epoch"] = np.full(len(packs), epoch, np.int32)
    for row, pack in enumerate(packs):
        start = 0
        for k, (example, tokens) in enumerate(pack):
            length = len(tokens)
            positions = slice(start, start + length)
            batch["input_ids"][row, positions] = tokens
            batch["segment_ids"][row, positions], batch["position_ids"][row, positions] = k + 1, np.arange(length)
            batch["token_type_ids"][row, start + length // 2 + 1 : start + length] = 1
            batch["example_id"][row, k], batch["cls_positions"][row, k] = example, start
            batch["pair_labels"][row, k] = example % 2
            start += length
        assert start <= seq_len
    return {name: jnp.asarray(array) for name, array in batch.items()}


def make_batch(packs: list[list[tuple[int, int]]], seq_len: int, epoch: int = 0, slots: int | None = None) -> dict:
    """Rows of packed examples, each (example id, length); the tokens of an example depend only on its id."""

    def tokens(example: int, length: int) -> np.ndarray:
        ids = np.random.default_rng(example).choice(ORDINARY, length)
        ids[0], ids[length // 2], ids[-1] = CLS, SEP, SEP
        return ids

    rows = [[(example, tokens(example, length)) for example, length in pack] for pack in packs]
    return pack_rows(rows, seq_len, epoch, slots)
