"""Heads that stand on the encoder: masked language model and sentence pair.

Shapes: B rows, M predictions per row, K packed examples per row, H hidden, E width of the tables, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import ModelConfig
from bert_jax.model.layers import ACTIVATIONS, Dense, LayerNorm, truncated_normal
from bert_jax.shapes import Array, Float, Int, Key


class MlmHead(nnx.Module):
    """Dense, activation, LayerNorm; the decoder is the word embedding table plus a bias (BERT's modeling code).

    The dense layer ends in the table's width (ALBERT). The decoder keeps its bias whatever `model.biases` says, as
    ModernBERT's does.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        inputs, outputs = (config.hidden_size,), (config.embedding_width,)
        self.transform = Dense(inputs, outputs, truncated_normal(config.initializer_range), key, config.biases)
        self.norm = LayerNorm(config.embedding_width, config.norm_epsilon, config.biases)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32))
        self.activation = config.activation

    def __call__(self, hidden: Float[Array, "B M H"], attend) -> Float[Array, "B M V"]:
        """Logits in float32; `attend` maps [B, M, E] to the vocabulary with the tied table."""
        transformed = self.norm(ACTIVATIONS[self.activation](self.transform(hidden)))
        return attend(transformed) + self.bias[...][None, None]


class PairHead(nnx.Module):
    """Two classes on the pooled [CLS]: 0, B follows A; 1, it does not (NSP), or stands before it (SOP)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        self.dense = Dense((config.hidden_size,), (2,), truncated_normal(config.initializer_range), key)

    def __call__(self, pooled: Float[Array, "B K H"]) -> Float[Array, "B K 2"]:
        """Logits in float32."""
        return self.dense(pooled.astype(jnp.float32))


def gather_positions(hidden: Float[Array, "B S H"], positions: Int[Array, "B M"]) -> Float[Array, "B M H"]:
    """The hidden vectors at the positions to predict, before the costly product with the vocabulary."""
    return jnp.take_along_axis(hidden, positions[:, :, None], axis=1, mode="clip")


def score_labels(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Natural-log likelihood of each label, and 1.0 where no other class scores higher.

    Comparing with the maximum, which the softmax needs anyway, instead of taking an argmax: over 8,000
    classes the argmax alone was 7 % of bert_tiny's step on a CPU.
    """
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip")[..., 0]
    right = chosen >= jax.lax.stop_gradient(logits).max(-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1), right.astype(jnp.float32)
