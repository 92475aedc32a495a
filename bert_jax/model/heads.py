"""Heads on the encoder: masked language model, sentence pair, and fine-tuned task."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Bool, Float, Int, Key
from bert_jax.config import ModelConfig, TaskHead
from bert_jax.model.cls_norm import ClsNorm, Statistics, SumOverDevices
from bert_jax.model.int8 import round_rows
from bert_jax.model.layers import ACTIVATIONS, Dense, normal, outer_dense_dtype, truncated_normal
from bert_jax.model.norms import LayerNorm

ALIGNMENT = 128
"""Classes of the decoder are a multiple of this on GPUs, whose products and sums are slow for others."""
IMPOSSIBLE = -1e30
"""Bias of an added class."""


@dataclass(frozen=True)
class Heads:
    """The heads of a model."""

    mlm: bool = True
    mlm_activation: Literal["gelu", "gelu_tanh", "relu"] | None = None
    """Activation of the MLM head's dense layer; None: model.activation. RoBERTa and ELECTRA always have `gelu`."""
    pair: bool = False
    pooler: bool = False
    """Whether to add a pooler that no head reads, as published encoders have; see `has_pooler`."""
    task: TaskHead | None = None

    @property
    def has_pooler(self) -> bool:
        """Whether the encoder has a pooler: requested, or read by a head."""
        return self.pooler or self.pair or (self.task is not None and self.task.reads == "pooled")

    @property
    def reads_cls_only(self) -> bool:
        """Whether the only head classifies the [CLS] of the last layer: graphs for serving then give logits only."""
        task = self.task
        return not (self.mlm or self.pair) and task is not None and not task.mix and task.reads in ("cls", "pooled")


class MlmHead(nnx.Module):
    """Dense, activation, LayerNorm; the decoder is the word embedding table plus a bias (BERT's modeling code).

    The output of the dense layer has the width of the table (ALBERT); with trigram embeddings it has the hidden size,
    and the decoder columns beyond the table, `extra_columns` (MobileBERT). The decoder has a bias for every value of
    `model.biases`, as in ModernBERT.
    """

    def __init__(self, config: ModelConfig, key: Key[Array, ""], activation: str | None = None):
        init, dense = truncated_normal(config.initializer_range), (config.biases, outer_dense_dtype(config.dense_dtype))
        width = config.decoder_width
        self.transform = Dense((config.hidden_size,), (width,), init, key, *dense)
        self.norm = LayerNorm(width, config.norm_epsilon, config.biases)
        extra = (config.vocab_size, width - config.embedding_width)
        self.extra_columns = nnx.Param(init(jax.random.fold_in(key, 1), extra)) if extra[1] else None
        self.rounds = config.dense_dtype == "int8"
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,), jnp.float32))
        self.activation = activation or config.activation
        self.num_classes = config.vocab_size + (-config.vocab_size % ALIGNMENT if config.has_gpu_kernels else 0)

    def __call__(self, hidden: Float[Array, "B M H"], table: Float[Array, "V E"]) -> Float[Array, "B M V"]:
        """Logits in float32; `table` is that of the word embeddings, to which the decoder is tied."""
        return decode(*self._decoder_inputs(hidden, table))

    def label_scores(
        self, hidden: Float[Array, "B M H"], table: Float[Array, "V E"], labels: Int[Array, "B M"]
    ) -> "LabelScores":
        """`label_log_likelihoods` of the logits, without their gradient, and their log-partitions."""
        return decode_label_scores(*self._decoder_inputs(hidden, table), labels, self.num_classes)

    def _decoder_inputs(self, hidden: Array, table: Array) -> tuple[Array, Array, Array]:
        """The arguments of `decode`."""
        if self.extra_columns is not None:
            extra = self.extra_columns[...]
            table = jnp.concatenate([table, round_rows(extra) if self.rounds else extra], axis=1)
        return self.norm(ACTIVATIONS[self.activation](self.transform(hidden))), table, self.bias[...]


@jax.custom_vjp
def decode(
    hidden: Float[Array, "*rows E"], table: Float[Array, "V E"], bias: Float[Array, " V"]
) -> Float[Array, "*rows V"]:
    """hidden @ table.T + bias, float32, with factors in the type of `hidden`.

    The backward pass is written out. The gradient of the bias is a product with ones, because XLA for CPUs takes 150 ms
    for the reduction of [1216, 30522] over its rows, and 6 ms for this product (docs/log/model.md,
    2026-11-23). The other products have factors in the type of `hidden`, where jax would multiply float32 by bfloat16.
    """
    products = jnp.einsum("...e,ve->...v", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return products + jnp.broadcast_to(bias, products.shape)


def _decode_forward(hidden, table, bias):
    return decode(hidden, table, bias), (hidden, table)


def _decode_backward(residuals, gradient):
    hidden, table = residuals
    gradient_nV, hidden_nE = (x.reshape(-1, x.shape[-1]) for x in (gradient, hidden))
    ones_1n = jnp.ones((1, len(gradient_nV)), gradient.dtype)
    (bias_gradient,) = jnp.matmul(ones_1n, gradient_nV, precision=jax.lax.Precision.HIGHEST)
    factor_nV = gradient_nV.astype(hidden.dtype)
    hidden_gradient = (factor_nV @ table.astype(hidden.dtype)).reshape(hidden.shape)
    return hidden_gradient, jnp.matmul(factor_nV.T, hidden_nE, preferred_element_type=jnp.float32), bias_gradient


decode.defvjp(_decode_forward, _decode_backward)


class LabelScores(NamedTuple):
    """What losses need of the logits at each position."""

    likelihood: Float[Array, "*rows"]
    """Log-likelihood of the label, in nats."""
    correct: Float[Array, "*rows"]
    """1.0 where no other class has a higher logit."""
    log_partition: Float[Array, "*rows"]
    """Logarithm of the sum of the exponentials of all logits."""


def decode_label_scores(
    hidden: Float[Array, "*rows E"],
    table: Float[Array, "V E"],
    bias: Float[Array, " V"],
    labels: Int[Array, "*rows"],
    num_classes: int,
) -> LabelScores:
    """`label_log_likelihoods` of the logits of `decode`, and their log-partitions.

    Args:
      hidden, table, bias: as of `decode`.
      labels: below V.
      num_classes: V, or more: classes of probability 0 are added, in a copy of the table.
    """
    added = num_classes - len(table)
    table, bias = jnp.pad(table, ((0, added), (0, 0))), jnp.pad(bias, (0, added), constant_values=IMPOSSIBLE)
    return LabelScores(*_label_scores(hidden, table, bias, labels))


@jax.custom_vjp
def _label_scores(hidden, table, bias, labels):
    """`decode_label_scores` of a whole table.

    The backward pass is written out: one pass over the logits computes their gradient, in the type of the products. The
    transpose of the gather would add zeros of the size of the logits to it.
    """
    return _label_scores_forward(hidden, table, bias, labels)[0]


def _label_scores_forward(hidden, table, bias, labels):
    logits = decode(hidden, table, bias)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip")[..., 0]
    largest = logits.max(-1)
    log_sums = largest + jnp.log(jnp.exp(logits - largest[..., None]).sum(-1))
    scores = chosen - log_sums, (chosen >= largest).astype(jnp.float32), log_sums
    return scores, (hidden, table, labels, logits, log_sums)


def _label_scores_backward(residuals, gradients):
    hidden, table, labels, logits, log_sums = residuals
    is_label = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    of_likelihood, _, of_log_sum = gradients
    shares = jnp.exp(logits - log_sums[..., None])
    gradient = is_label * of_likelihood[..., None] - shares * (of_likelihood - of_log_sum)[..., None]
    return *_decode_backward((hidden, table), gradient), None


_label_scores.defvjp(_label_scores_forward, _label_scores_backward)


class PairHead(nnx.Module):
    """Two classes on the pooled [CLS]: 0, B follows A; 1, B does not follow A (NSP) or precedes it (SOP)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""]):
        self.dense = Dense((config.hidden_size,), (2,), truncated_normal(config.initializer_range), key)

    def __call__(self, pooled: Float[Array, "B K H"]) -> Float[Array, "B K 2"]:
        """Logits in float32."""
        return self.dense(pooled.astype(jnp.float32))


TASK_ACTIVATIONS = ACTIVATIONS | {"tanh": jnp.tanh}


class TaskHeadModule(nnx.Module):
    """The layers of a `TaskHead`: optional dense layer with activation, optional LayerNorm, one logit per label.

    `BertModel.task_features` applies `mix` and `normalise` before, the other layers are applied by calling the module.
    """

    def __init__(self, config: ModelConfig, head: TaskHead, key: Key[Array, ""]):
        dense, output = jax.random.split(key)
        # As the heads of transformers, with which scores are compared; Google's run_classifier.py truncates.
        width, init = (config.hidden_size,), normal(config.initializer_range)
        types = (config.biases, outer_dense_dtype(config.dense_dtype))
        self.dense = None if head.activation == "none" else Dense(width, width, init, dense, *types)
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon, config.biases) if head.norm else None
        self.output = Dense(width, (len(head.labels),), init, output)
        self.activation = head.activation
        self.mix = ScalarMix(config.num_layers + 1) if head.mix else None
        self.cls_norm = _make_cls_norm(config, head.cls_norm)

    def normalise(
        self, cls: Float[Array, "B K H"], has_example: Bool[Array, "B K"], sum_over_devices: SumOverDevices | None
    ) -> tuple[Float[Array, "B K H"], Statistics]:
        """Apply `cls_norm`; arguments and results are those of `ClsNorm`."""
        if isinstance(self.cls_norm, ClsNorm):
            return self.cls_norm(cls, has_example, sum_over_devices)
        return cls if self.cls_norm is None else self.cls_norm(cls), {}

    def __call__(self, hidden: Float[Array, "B n H"]) -> Float[Array, "B n C"]:
        """Logits in float32, for examples or for tokens."""
        if self.dense is not None:
            hidden = TASK_ACTIVATIONS[self.activation](self.dense(hidden))
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.output(hidden.astype(jnp.float32))


def _make_cls_norm(config: ModelConfig, kind: str) -> ClsNorm | LayerNorm | None:
    if kind == "layer":
        return LayerNorm(config.hidden_size, config.norm_epsilon)
    return None if kind == "none" else ClsNorm(kind, config.hidden_size)


class ScalarMix(nnx.Module):
    """gamma times the sum over l of softmax(s)_l h_l (Peters et al. 2018, equation 1); s starts at 0, gamma at 1."""

    def __init__(self, states: int):
        self.weights = nnx.Param(jnp.zeros((states,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((), jnp.float32))

    def __call__(self, states: Float[Array, "L1 B n H"]) -> Float[Array, "B n H"]:
        """Mix; float32 inside, the result has the type of `states`."""
        weights = self.scale[...] * jax.nn.softmax(self.weights[...])
        # Not a matrix product, which would first write a float32 copy of all states.
        return (weights[:, None, None, None] * states.astype(jnp.float32)).sum(0).astype(states.dtype)


def mean_pool_examples(
    hidden: Float[Array, "B S H"], segment_ids: Int[Array, "B S"], examples: int
) -> Float[Array, "B K H"]:
    """Mean over the tokens of each packed example; zeros in unused slots of a row."""
    belongs_BSK = segment_ids[:, :, None] == jnp.arange(1, examples + 1)[None, None, :]
    weights_BSK = belongs_BSK.astype(jnp.float32)
    # Full precision, because some accelerators round the operands of a product to bfloat16.
    sums_BKH = jnp.einsum("bsk,bsh->bkh", weights_BSK, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return sums_BKH / jnp.maximum(weights_BSK.sum(1), 1.0)[:, :, None]


def label_log_likelihoods(
    logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Log-likelihood of each label, in nats, and 1.0 where no other class has a higher logit.

    The label's logit is compared with the maximum, which the softmax needs too, instead of taking an argmax: over
    8,000 classes the argmax was 7 % of the time of bert_tiny's step on a CPU.
    """
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="clip")[..., 0]
    correct = chosen >= jax.lax.stop_gradient(logits).max(-1)
    return chosen - jax.nn.logsumexp(logits, axis=-1), correct.astype(jnp.float32)
