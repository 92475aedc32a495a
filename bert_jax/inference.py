"""A trained model in a user's hands: ``load``, ``fill_mask``, ``encode``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import embedding
from bert_jax.config import ModelConfig
from bert_jax.convert import formats
from bert_jax.errors import UserError
from bert_jax.model import whole
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.storage import StoredPath
from bert_jax.tokenizer import Tokenizer

Params = dict[str, Any]
POOLINGS = ("mean", "cls")
SHORTEST_BUCKET = 16


class Candidate(NamedTuple):
    """What the model would write at a [MASK]."""

    token: str
    token_id: int
    probability: float


class Model:
    """An encoder with its heads and tokenizer. Make one with `load`.

    Attributes:
      config: shapes of the model.
      heads: what stands on it.
      params: nested dict of arrays (model/whole.py).
      tokenizer: text to ids.
    """

    def __init__(self, config: ModelConfig, heads: Heads, params: Params, tokenizer: Tokenizer):
        self.config, self.heads, self.params, self.tokenizer = config, heads, params, tokenizer

    def fill_mask(self, text: str, top: int = 5) -> list[list[Candidate]]:
        """The likeliest tokens for every [MASK] in the text, likeliest first.

        Raises:
          UserError: no [MASK] in the text, more tokens than the model has positions, a causal model, or one without an
            MLM head.
        """
        if not self.heads.mlm:
            raise UserError("the model has no MLM head to fill a [MASK] with: load one that was pretrained with one")
        if self.config.direction == "causal":
            raise UserError("a causal model fills no [MASK]: use one trained with model.direction bidirectional")
        inputs = self._row(self.tokenizer.encode(text, specials=True))
        positions = np.flatnonzero(inputs.input_ids[0] == self.tokenizer.mask_id).tolist()
        if not positions:
            raise UserError(f"the text has no [MASK]: write one where a word is missing, as in '{text} [MASK]'")
        logits = _mlm_logits(self.config, self.heads, self.params, inputs)
        # A model may have more rows in its table than the tokenizer has tokens; they stand for nothing.
        logits = logits[..., : self.tokenizer.vocab_size]
        probabilities = np.asarray(jax.nn.softmax(logits, axis=-1))[0]
        filled = []
        for position in positions:
            best = np.argsort(-probabilities[position], kind="stable")[:top]
            filled.append(
                [Candidate(self.tokenizer.id_to_token(int(i)), int(i), float(probabilities[position, i])) for i in best]
            )
        return filled

    def encode(
        self,
        texts: Sequence[str],
        pooling: str = "mean",
        batch_size: int = 16,
        max_length: int | None = None,
    ) -> np.ndarray:
        """One vector per text, float32 [len(texts), hidden_size], from the last layer.

        A vector hangs on its text alone: neither order nor batch_size changes it by more than rounding.

        Args:
          texts: each becomes ``[CLS] text [SEP]``.
          pooling: "mean" over all its tokens, or "cls", the vector of [CLS]; a causal model has only the mean.
          batch_size: rows of the longest kind in a forward pass. A row holds a long text or several short ones, and
            a pass of shorter rows has as many more; so it bounds the memory, not the number of texts.
          max_length: tokens, [CLS] and [SEP] among them, to which longer texts are cut; None refuses texts that the
            model has no positions for.

        Raises:
          UserError: a text has more tokens than the model has positions and max_length is None, a max_length or
            batch_size that is impossible, an unknown pooling, or pooling 'cls' of a causal model.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise UserError("texts must be a list of texts: put a single one into brackets, as in encode([text])")
        if pooling not in POOLINGS:
            raise UserError(f"pooling '{pooling}' is not one of {', '.join(POOLINGS)}")
        if pooling == "cls" and self.config.direction == "causal":
            raise UserError("a causal model shows [CLS] no token of the text: use pooling 'mean'")
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} is no number of rows: give at least 1")
        limit = self.config.max_positions
        if max_length is not None and not 3 <= max_length <= limit:
            raise UserError(f"max_length {max_length} is outside 3 to {limit}, the model's position table: change it")
        if not len(texts):
            return np.zeros((0, self.config.hidden_size), np.float32)
        config, pad = _quick(self.config), self.tokenizer.pad_id
        return embedding.vectors_of(
            self._cut(texts, max_length),
            config.hidden_size,
            pad,
            batch_size,
            lambda inputs: _vectors(config, self.heads, pooling, self.params, inputs),
        )

    def _cut(self, texts: Sequence[str], max_length: int | None) -> list[np.ndarray]:
        """The ids of every text, special ones around them."""
        limit = self.config.max_positions
        flat, lengths = self.tokenizer.encode_flat(list(texts))
        ends = np.cumsum(lengths)
        if max_length is None:
            if (tall := lengths + 2 > limit).any():
                i = int(tall.argmax())
                raise UserError(
                    f"text {i} has {lengths[i] + 2} tokens, the model's position table {limit}: shorten it, or give "
                    f"max_length {limit} to cut it"
                )
            max_length = limit
        cls, sep = np.uint32(self.tokenizer.cls_id), np.uint32(self.tokenizer.sep_id)
        starts, kept = ends - lengths, np.minimum(lengths, max_length - 2)
        return [np.r_[cls, flat[start : start + n], sep] for start, n in zip(starts, kept, strict=True)]

    def _row(self, ids: list[int]) -> EncoderInputs:
        """One row, padded to a power of two, so that few lengths are compiled."""
        limit = self.config.max_positions
        if len(ids) + 2 > limit:
            raise UserError(f"the text has {len(ids) + 2} tokens, the model's position table {limit}: shorten it")
        length = len(ids) + 2
        seq_len = max(SHORTEST_BUCKET, min(2 ** (length - 1).bit_length(), limit))
        input_ids = np.full((1, seq_len), self.tokenizer.pad_id, np.int32)
        input_ids[0, :length] = self.tokenizer.cls_id, *ids, self.tokenizer.sep_id
        places, zeros = np.arange(seq_len, dtype=np.int32)[None], np.zeros((1, seq_len), np.int32)
        return EncoderInputs(input_ids, zeros, (places < length).astype(np.int32), places, zeros[:, :1])


def _quick(config: ModelConfig) -> ModelConfig:
    """The same function without dropout, with the attention that was fastest here (docs/LOG.md)."""
    attention = "late" if jax.default_backend() == "cpu" else config.attention
    return dataclasses.replace(config, attention=attention, attention_dropout=0.0, hidden_dropout=0.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlm_logits(config: ModelConfig, heads: Heads, params: Params, inputs: EncoderInputs) -> jax.Array:
    model = whole.bind(config, heads, params)
    return model.mlm(model.encoder(inputs).hidden, model.encoder.embeddings.attend)


_vectors = functools.partial(jax.jit, static_argnums=(0, 1, 2))(embedding.pooled)


def load(source: str | StoredPath) -> Model:
    """A model from a run's work directory (its newest intact checkpoint), or from any file that `convert` reads.

    Raises:
      UserError: none is there, what is there is damaged, it has no tokenizer, or its store does not answer.
    """
    with formats.opened(source) as contents:
        if contents.tokenizer is None:
            raise UserError(f"{source} has no tokenizer: put its tokenizer.json, or what it has of the kind, beside it")
        _, config, heads, params = contents.model
        return Model(config, heads, jax.tree.map(jnp.asarray, params), Tokenizer.load(contents.tokenizer))
