"""Batches of a fine-tuning run: a fixed number of examples per step, packed into a fixed number of rows."""

from collections.abc import Iterator, Sequence

import numpy as np

from bert_jax.data.batch import Rows, SpecialIds, empty_rows
from bert_jax.data.hash_random import make_key, permute
from bert_jax.data.packing import pack
from bert_jax.finetune.encoding import EncodedExamples

ORDER, PACKING = 1, 2
"""Words of keys: what the random numbers are for."""


class ExampleRows:
    """The examples of a split as packed rows. Every batch is a function of (examples, seed, batch index).

    Several short examples share a row and do not attend to each other, so a step has the gradient of its examples,
    whatever the rows are.
    """

    def __init__(self, examples: EncodedExamples, seq_len: int, slots: int, special_ids: SpecialIds, seed: int):
        """Packs nothing yet.

        Args:
          examples: of the split, none longer than `seq_len`.
          seq_len: tokens per row, S.
          slots: largest number of examples in a row, K. The texts of a multiple choice do not attend to each other;
            `cls_positions` has those of all of them, [B, K * choices].
          special_ids: of the tokenizer.
          seed: of the order.
        """
        self.examples, self.special_ids, self.seed = examples, special_ids, seed
        self.seq_len, self.slots = seq_len, slots
        self._lengths = examples.lengths.reshape(-1, examples.choices).sum(1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def batches_per_epoch(self, batch_examples: int) -> int:
        """Batches of an epoch; the last one can have fewer examples."""
        return -(-len(self) // batch_examples)

    def members(self, index: int, batch_examples: int) -> np.ndarray:
        """Examples of a batch, int64; `index` counts over all epochs. Every epoch has another order."""
        epoch, batch = divmod(index, self.batches_per_epoch(batch_examples))
        positions = np.arange(batch * batch_examples, min((batch + 1) * batch_examples, len(self)))
        return permute(positions, len(self), make_key(self.seed, ORDER, epoch))

    def row_counts(self, batches: int, batch_examples: int) -> np.ndarray:
        """Rows that each of the first `batches` needs, int64."""
        return np.array([len(self._pack(self.members(i, batch_examples))[0]) - 1 for i in range(batches)])

    def training_rows(self, index: int, batch_examples: int, counts: Sequence[int]) -> Rows:
        """The rows of a batch, followed by padding up to the smallest sufficient one of `counts`, which ascend."""
        first, members = self._pack(self.members(index, batch_examples))
        return self._fill(first, members, next(count for count in counts if count >= len(first) - 1))

    def in_order(self, count: int) -> Iterator[Rows]:
        """All examples once, in batches of `count` rows."""
        everything = np.arange(len(self))
        first, members = self._pack(everything)
        for row in range(0, len(first) - 1, count):
            ends = first[row : row + count + 1]
            yield self._fill(ends - ends[0], members[ends[0] : ends[-1]], count)

    def blank_rows(self, count: int) -> Rows:
        """Rows of padding without labels."""
        rows = empty_rows(count, self.seq_len, self.slots, self.special_ids.pad_id)
        labels = self.examples.labels
        rows["cls_positions"] = np.zeros((count, self.slots * self.examples.choices), np.int32)
        shape = (count, self.seq_len if self.examples.labels_tokens else self.slots, *labels.shape[1:])
        rows["labels"] = np.full(shape, -1 if labels.dtype == np.int32 else np.nan, labels.dtype)
        return rows

    def _pack(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First member of each row, and the members in the order of rows."""
        first, order = pack(self._lengths[members], self.seq_len, self.slots, make_key(self.seed, PACKING))
        return first, members[order]

    def _fill(self, first: np.ndarray, members: np.ndarray, count: int) -> Rows:
        rows, labels, by_token = self.blank_rows(count), self.examples.labels, self.examples.labels_tokens
        starts, choices = self.examples.starts, self.examples.choices
        for row in range(len(first) - 1):
            end = 0
            for slot, example in enumerate(members[first[row] : first[row + 1]]):
                rows["example_id"][row, slot] = example
                if not by_token:
                    rows["labels"][row, slot] = labels[example]
                for choice in range(choices):
                    text, segment = example * choices + choice, slot * choices + choice
                    source = slice(starts[text], starts[text + 1])
                    start, end = end, end + int(starts[text + 1] - starts[text])
                    rows["input_ids"][row, start:end] = self.examples.input_ids[source]
                    rows["token_type_ids"][row, start:end] = self.examples.token_type_ids[source]
                    rows["segment_ids"][row, start:end] = segment + 1
                    rows["position_ids"][row, start:end] = np.arange(end - start)
                    rows["cls_positions"][row, segment] = start
                    if by_token:
                        rows["labels"][row, start:end] = labels[source]
        return rows
