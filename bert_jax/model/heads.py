"""Heads that stand on the encoder: masked language model, sentence pair, and what a task taught.

Shapes: B rows, S positions, M predictions per row, K packed examples per row, H hidden, E width of the tables,
V vocabulary, C labels.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import ModelConfig
from bert_jax.model.layers import ACTIVATIONS, Dense, LayerNorm, truncated_normal
from bert_jax.shapes import Array, Float, Int, Key


@dataclass(frozen=True)
class TaskHead:
    """What a head that was trained on a task is made of; published families build theirs in different ways."""

    kind: Literal["classification", "tagging", "span", "replaced"]
    """A label for an example (RTE) or for a token (NER), where an answer starts and ends (SQuAD), or whether a token
    was replaced (ELECTRA's discriminator; Clark et al. 2020)."""
    labels: tuple[str, ...]
    """One logit each; a single one is a regression, or with `replaced` the logit of a yes."""
    reads: Literal["pooled", "cls", "mean", "tokens"]
    """The pooler's output, the last layer at [CLS], its mean over an example, or every token of it."""
    hidden: Literal["none", "tanh", "relu", "gelu", "gelu_tanh"] = "none"
    """Activation of a dense layer as wide as the encoder in front of the output; `none`: there is no such layer."""
    norm: bool = False
    """Whether a LayerNorm follows the activation (ModernBERT)."""


@dataclass(frozen=True)
class Heads:
    """What stands on an encoder."""

    mlm: bool = True
    mlm_activation: Literal["gelu", "gelu_tanh", "relu"] | None = None
    """Of the MLM head's dense layer; None: model.activation. RoBERTa's and ELECTRA's heads always have `gelu`."""
    pair: bool = False
    pooler: bool = False
    """A pooler that no head reads, as published encoders have; one that a head reads is there anyway."""
    task: TaskHead | None = None

    @property
    def has_pooler(self) -> bool:
        """Whether the encoder ends in a pooler."""
        return self.pooler or self.pair or (self.task is not None and self.task.reads == "pooled")


class MlmHead(nnx.Module):
    """Dense, activation, LayerNorm; the decoder is the word embedding table plus a bias (BERT's modeling code).

    The dense layer ends in the table's width (ALBERT). The decoder keeps its bias whatever `model.biases` says, as
    ModernBERT's does.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""], activation: str | None = None):
        inputs, outputs = (config.hidden_size,), (config.embedding_width,)
        self.transform = Dense(inputs, outputs, truncated_normal(config.initializer_range), key, config.biases)
        self.norm = LayerNorm(config.embedding_width, config.norm_epsilon, config.biases)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32))
        self.activation = activation or config.activation

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


HIDDEN_ACTIVATIONS = ACTIVATIONS | {"tanh": jnp.tanh}


class TaskOutput(nnx.Module):
    """An optional dense layer with activation and LayerNorm, and one logit per label."""

    def __init__(self, config: ModelConfig, head: TaskHead, key: Key[Array, ""]):
        hidden, output = jax.random.split(key)
        width, init = (config.hidden_size,), truncated_normal(config.initializer_range)
        self.hidden = None if head.hidden == "none" else Dense(width, width, init, hidden, config.biases)
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon, config.biases) if head.norm else None
        self.output = Dense(width, (len(head.labels),), init, output)
        self.activation = head.hidden

    def __call__(self, hidden: Float[Array, "B n H"]) -> Float[Array, "B n C"]:
        """Logits in float32, for examples or for tokens."""
        if self.hidden is not None:
            hidden = HIDDEN_ACTIVATIONS[self.activation](self.hidden(hidden))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.output(hidden.astype(jnp.float32))


def pool_examples(
    hidden: Float[Array, "B S H"], segment_ids: Int[Array, "B S"], examples: int
) -> Float[Array, "B K H"]:
    """Mean over the tokens of each packed example; zeros for examples that a row does not have."""
    belongs_BSK = segment_ids[:, :, None] == jnp.arange(1, examples + 1)[None, None, :]
    weights_BSK = belongs_BSK.astype(jnp.float32)
    # Full precision: some accelerators would round the vectors to bfloat16 in this product.
    sums_BKH = jnp.einsum("bsk,bsh->bkh", weights_BSK, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return sums_BKH / jnp.maximum(weights_BSK.sum(1), 1.0)[:, :, None]


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
