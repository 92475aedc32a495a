"""A trained model in a user's hands: ``load``, ``fill_mask``, ``encode``."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.convert import formats
from bert_jax.errors import UserError
from bert_jax.model import whole
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.storage import StoredPath
from bert_jax.tokenizer import Tokenizer

Params = dict[str, Any]
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
        ids = self._with_specials([self.tokenizer.encode(text, specials=True)], "the text")
        positions = [i for i, token in enumerate(ids[0]) if token == self.tokenizer.mask_id]
        if not positions:
            raise UserError(f"the text has no [MASK]: write one where a word is missing, as in '{text} [MASK]'")
        logits = _mlm_logits(self.config, self.heads, self.params, self._batch(ids))
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
        self, texts: Sequence[str], pooling: Literal["mean", "cls"] = "mean", batch_size: int = 32
    ) -> np.ndarray:
        """One vector per text, float32 [len(texts), hidden_size], from the last layer.

        Args:
          texts: each becomes ``[CLS] text [SEP]``.
          pooling: mean over all its tokens, or the vector of [CLS]; a causal model has only the mean.
          batch_size: texts per forward pass; texts of similar length share one.

        Raises:
          UserError: a text has more tokens than the model has positions, or pooling 'cls' of a causal model.
        """
        if pooling == "cls" and self.config.direction == "causal":
            raise UserError("a causal model shows [CLS] no token of the text: use pooling 'mean'")
        vectors = np.zeros((len(texts), self.config.hidden_size), np.float32)
        pieces = [list(ids) for ids in self.tokenizer.encode_batch(list(texts))]
        ids = self._with_specials(pieces, "text {}")
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            batch = self._batch([ids[i] for i in chosen], rows=batch_size)
            vectors[chosen] = np.asarray(_vectors(self.config, self.heads, pooling, self.params, batch))[: len(chosen)]
        return vectors

    def _with_specials(self, pieces: list[list[int]], name: str) -> list[list[int]]:
        limit = self.config.max_positions
        for i, ids in enumerate(pieces):
            if len(ids) + 2 > limit:
                raise UserError(
                    f"{name.format(i)} has {len(ids) + 2} tokens, the model's position table {limit}: shorten it"
                )
        return [[self.tokenizer.cls_id, *ids, self.tokenizer.sep_id] for ids in pieces]

    def _batch(self, ids: list[list[int]], rows: int | None = None) -> EncoderInputs:
        """Padded to a power of two, so that few lengths are compiled."""
        longest = max(map(len, ids))
        seq_len = SHORTEST_BUCKET
        while seq_len < longest:
            seq_len *= 2
        seq_len = min(seq_len, max(self.config.max_positions, longest))
        rows = rows or len(ids)
        input_ids = np.full((rows, seq_len), self.tokenizer.pad_id, np.int32)
        segment_ids = np.zeros((rows, seq_len), np.int32)
        for i, row in enumerate(ids):
            input_ids[i, : len(row)], segment_ids[i, : len(row)] = row, 1
        zeros = np.zeros((rows, seq_len), np.int32)
        positions = zeros + np.arange(seq_len, dtype=np.int32)
        return EncoderInputs(input_ids, zeros, segment_ids, positions, np.zeros((rows, 1), np.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mlm_logits(config: ModelConfig, heads: Heads, params: Params, inputs: EncoderInputs) -> jax.Array:
    model = whole.bind(config, heads, params)
    return model.mlm(model.encoder(inputs).hidden, model.encoder.embeddings.attend)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _vectors(config: ModelConfig, heads: Heads, pooling: str, params: Params, inputs: EncoderInputs) -> jax.Array:
    hidden = whole.bind(config, heads, params).encoder(inputs).hidden.astype(jnp.float32)
    if pooling == "cls":
        return hidden[:, 0]
    real = (inputs.segment_ids > 0).astype(jnp.float32)[:, :, None]
    return (hidden * real).sum(1) / jnp.maximum(real.sum(1), 1.0)


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
