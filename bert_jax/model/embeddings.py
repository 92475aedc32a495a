"""Embeddings of a batch: words, positions and token types."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Float, Int, Key
from bert_jax.config import ModelConfig
from bert_jax.model.dropout import DropoutKey, dropout
from bert_jax.model.int8 import round_rows
from bert_jax.model.layers import Dense, outer_dense_dtype, truncated_normal
from bert_jax.model.norms import make_norm


class EncoderInputs(NamedTuple):
    """Inputs of the encoder; the names are those of a batch."""

    input_ids: Int[Array, "B S"]
    token_type_ids: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    """Index of the packed example that a token belongs to, from 1; 0 is padding."""
    position_ids: Int[Array, "B S"]
    cls_positions: Int[Array, "B K"]
    """Position of the [CLS] of each packed example."""


class Embeddings(nnx.Module):
    """Sum of word, position and token-type embeddings, normalised (Devlin et al. 2019, figure 2).

    Tables narrower than the layers are projected to the hidden size after dropout (google-research/albert modeling.py).
    With trigrams only the word table is narrow: its projection comes before the sum (google-research/mobilebert
    modeling.py).
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        init = truncated_normal(config.initializer_range)
        word, position, token_type, projection = jax.random.split(key, 4)
        width, outputs, trigrams = config.embedding_width, (config.hidden_size,), config.embeddings == "trigrams"
        self.word = nnx.Param(init(word, (config.vocab_size, width)))
        inputs, width = ((3 * width,), config.hidden_size) if trigrams else ((width,), width)
        shape = (config.position_offset + config.max_positions, width)
        self.position = nnx.Param(init(position, shape)) if config.positions == "learned" else None
        types = config.type_vocab_size
        self.token_type = nnx.Param(init(token_type, (types, width))) if types else None
        self.norm = make_norm(config, width)
        factorised = config.embedding_size is not None
        dense = (config.biases, outer_dense_dtype(config.dense_dtype))
        self.projection = Dense(inputs, outputs, init, projection, *dense) if factorised else None
        self.rounds = config.dense_dtype == "int8"
        self.trigrams = trigrams
        self.position_offset = config.position_offset
        self.dropout = config.hidden_dropout
        self.dtype = jnp.dtype(config.compute_dtype)

    def __call__(
        self, inputs: EncoderInputs, inputs_embeds: Float[Array, "B S E"] | None, dropout_key: DropoutKey | None
    ) -> Float[Array, "B S H"]:
        """Embed a batch; `inputs_embeds` replaces the word embeddings."""
        # Ids are checked on the host (data/row_reader.py); "clip" prevents a NaN fill in XLA.
        if inputs_embeds is None:
            inputs_embeds = self._round(jnp.take(self.word[...], inputs.input_ids, axis=0, mode="clip"))
        if self.trigrams:
            inputs_embeds = self.projection(with_neighbours(inputs_embeds, inputs.segment_ids).astype(self.dtype))
        total = inputs_embeds.astype(jnp.float32)
        if self.position is not None:
            rows = inputs.position_ids + self.position_offset
            total += self._round(jnp.take(self.position[...], rows, axis=0, mode="clip"))
        if self.token_type is not None:
            total += rows_of_few(self._round(self.token_type[...]), inputs.token_type_ids)
        embedded = dropout(self.norm(total).astype(self.dtype), self.dropout, dropout_key)
        return embedded if self.projection is None or self.trigrams else self.projection(embedded)

    def decoder_table(self) -> Float[Array, "V E"]:
        """The word embeddings as the tied decoder of the MLM head multiplies them: rounded as in the lookup."""
        return self._round(self.word[...])

    def _round(self, rows: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
        return round_rows(rows) if self.rounds else rows


@jax.custom_vjp
def rows_of_few(table: Float[Array, "T E"], ids: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """The rows of a table with few.

    Its gradient is a product with one-hot rows; that of a gather would scatter-add B x S rows onto T.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


def _rows_of_few_backward(residuals, gradient):
    ids, like_table = residuals
    # A product of matrices: with two axes of rows, XLA for CPUs transposes the gradient.
    one_hot_nT = jax.nn.one_hot(ids.reshape(-1), len(like_table), dtype=gradient.dtype)
    return one_hot_nT.T @ gradient.reshape(-1, gradient.shape[-1]), None


rows_of_few.defvjp(lambda table, ids: (rows_of_few(table, ids), (ids, table)), _rows_of_few_backward)


def with_neighbours(words: Float[Array, "B S E"], segment_ids: Int[Array, "B S"]) -> Float[Array, "B S T"]:
    """Word embeddings of the next, this and the previous token of the same packed example, side by side: T = 3 E.

    Zeros where an example has no such token: the reference has them at the ends of a row. There the neighbour of an
    example's last token may be padding, whose embedding it reads; here the result does not depend on what follows.
    """
    neighbours = []
    for shift in (-1, 1):
        is_same = jnp.roll(segment_ids, shift, axis=1) == segment_ids
        is_same = is_same.at[:, -1 if shift < 0 else 0].set(False)
        neighbours.append(jnp.where(is_same[:, :, None], jnp.roll(words, shift, axis=1), 0.0))
    return jnp.concatenate([neighbours[0], words, neighbours[1]], axis=-1)
