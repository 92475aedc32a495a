"""Replaced-token detection (ELECTRA; Clark et al. 2020, section 2; google-research/electra run_pretraining.py).

The generator predicts masked tokens. A token sampled from each of its predictions replaces the masked one, and the
discriminator classifies every token as original or replaced; a sampled token that equals the original is original.
The sample is a function of the generator's logits and of (seed, epoch, example, offset in the example), as the masks
are. No gradient passes from the discriminator to the generator but through common embeddings.

Shapes: B rows, S positions, M predictions per row, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float, Int, UInt32
from bert_jax.config import Config, ModelConfig, TaskHead
from bert_jax.model.bert import BertModel
from bert_jax.model.dropout import hash_combine
from bert_jax.model.encoder import EncoderOutput
from bert_jax.objectives import masked_lm
from bert_jax.objectives.losses import Objective, WeightedSum, mlm_head_sums
from bert_jax.objectives.masking import SAMPLE, Batch, Vocabulary, position_keys

EVALUATION_MASKS = dataclasses.replace(masked_lm.EVALUATION_MASKS, mask_token_share=0.85, random_token_share=0.0)
BINS, HALF_WIDTH = 16384, 16.0
"""Bins of the histogram of logits, of equal width in [-HALF_WIDTH, HALF_WIDTH]; others are in the first or last one."""
_SIDE = 128  # BINS is its square


def prepare(
    batch: Batch,
    config: Config,
    phase: int,
    vocabulary: Vocabulary,
    seed: UInt32[Array, ""] | None,
    mask_counts: Int[Array, " n"] | None,
) -> Batch:
    """Mask tokens as `masked_lm.prepare`, and add `sample_keys` [B, M], the keys of the samples at the targets."""
    masked = masked_lm.prepare(batch, config, phase, vocabulary, seed, mask_counts, EVALUATION_MASKS)
    keys_BS = hash_combine(position_keys(batch, masked_lm.mask_key(seed)), SAMPLE)
    return {**masked, "sample_keys": jnp.take_along_axis(keys_BS, masked["target_positions"], axis=1)}


def sample_tokens(logits: Float[Array, "B M V"], keys: UInt32[Array, "B M"]) -> Int[Array, "B M"]:
    """A token of each softmax(logits): the argmax of logits + Gumbel noise, whose bits are a hash of (key, token)."""
    bits = hash_combine(keys[..., None], jnp.arange(logits.shape[-1], dtype=jnp.uint32)[None, None])
    # Large noise comes from small numbers, which float32 represents down to 2^-32; 1 would be minus infinity.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 1.0) * 2.0**-32, 1.0 - 2.0**-24)
    noise = -jnp.log(-jnp.log1p(-uniform))
    return jnp.argmax(jax.lax.stop_gradient(logits) + noise, axis=-1).astype(jnp.int32)


def replace_tokens(generator: BertModel, output: EncoderOutput, batch: Batch) -> Batch:
    """The rows that the discriminator reads.

    Args:
      generator: the generator.
      output: of its encoder, at the positions of the targets.
      batch: prepared rows.

    Returns:
      the batch with a sampled token in `input_ids` at every target, and `is_replaced` [B, S] float32: 1.0 where that
      token is another than the original.
    """
    logits = generator.mlm(output.hidden, generator.encoder.embeddings.decoder_table())
    return place_tokens(batch, sample_tokens(logits, batch["sample_keys"]))


def place_tokens(batch: Batch, sampled: Int[Array, "B M"]) -> Batch:
    """`replace_tokens` with given samples."""
    input_ids, positions, labels = batch["input_ids"], batch["target_positions"], batch["target_labels"]
    here_BMS = positions[:, :, None] == jnp.arange(input_ids.shape[1], dtype=positions.dtype)[None, None, :]
    here_BMS &= (batch["target_weights"] > 0)[:, :, None]
    # Not a scatter: unused entries of targets have a position, too.
    placed, original = (jnp.where(here_BMS, x[:, :, None], 0).sum(1) for x in (sampled, labels))
    is_target = here_BMS.any(1)
    is_replaced = (is_target & (placed != original)).astype(jnp.float32)
    return {**batch, "input_ids": jnp.where(is_target, placed, input_ids), "is_replaced": is_replaced}


def detection_sums(name: str, model: BertModel, output: EncoderOutput, batch: Batch) -> dict[str, WeightedSum]:
    """Sums over all tokens but padding, special tokens included, as in ELECTRA's code."""
    weights = (batch["segment_ids"] > 0).astype(jnp.float32)
    return logit_sums(name, model.task(output.hidden)[..., 0], batch["is_replaced"], weights)


def logit_sums(
    name: str, logits: Float[Array, "B S"], labels: Float[Array, "B S"], weights: Float[Array, "B S"]
) -> dict[str, WeightedSum]:
    """Binary cross-entropy and what else is measured of logits of "replaced".

    Accuracy, precision and recall at logit 0; `NAME_replaced`, the share of replaced tokens; and `NAME_histogram`
    [2, BINS], numbers of original and of replaced tokens by logit, from which NAME_auc is derived.
    """
    losses = jnp.maximum(logits, 0.0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    guesses = (logits > 0).astype(jnp.float32) * weights
    hits, tokens = (guesses * labels).sum(), weights.sum()
    return {
        f"{name}_loss": WeightedSum((losses * weights).sum(), tokens),
        f"{name}_accuracy": WeightedSum(((guesses == labels) * weights).sum(), tokens),
        f"{name}_precision": WeightedSum(hits, guesses.sum()),
        f"{name}_recall": WeightedSum(hits, labels.sum()),
        f"{name}_replaced": WeightedSum(labels.sum(), tokens),
        f"{name}_histogram": WeightedSum(logit_histogram(logits, labels, weights), tokens),
    }


def logit_histogram(
    logits: Float[Array, "B S"], labels: Float[Array, "B S"], weights: Float[Array, "B S"]
) -> Float[Array, "2 bins"]:
    """Weight of the tokens with label 0 and with label 1 in each bin; whole numbers, so that their sums are exact."""
    scaled = (jax.lax.stop_gradient(logits) + HALF_WIDTH) * (BINS / (2 * HALF_WIDTH))
    bins = jnp.clip(jnp.floor(scaled), 0, BINS - 1).astype(jnp.int32)
    # A product of one-hot digits, not a scatter, which is slow on GPUs with deterministic operations.
    high, low = (jax.nn.one_hot(digit, _SIDE) for digit in (bins // _SIDE, bins % _SIDE))
    by_label = jnp.stack([(1.0 - labels) * weights, labels * weights], axis=-1)
    counts = jnp.einsum("bsh,bsl,bsc->chl", high, low, by_label, precision=jax.lax.Precision.HIGHEST)
    return counts.reshape(2, BINS)


def discriminator_head(model: ModelConfig) -> TaskHead:
    """The head of a discriminator, as in transformers (ElectraDiscriminatorPredictions)."""
    return TaskHead("replaced", ("replaced",), "tokens", activation=model.activation)


GENERATOR_OBJECTIVE = Objective(
    is_active=lambda model, objective: objective.token == "rtd",
    prepare=prepare,
    weight=lambda batch: batch["target_weights"].sum(),
    sums=mlm_head_sums,
    of_generator=True,
    predicts_tokens=True,
    predictions=masked_lm.predictions_per_example,
)
DISCRIMINATOR_OBJECTIVE = Objective(
    is_active=lambda model, objective: objective.token == "rtd",
    weight=lambda batch: (batch["segment_ids"] > 0).sum(dtype=jnp.float32),
    sums=detection_sums,
    loss_weight=lambda objective: objective.discriminator_weight,
    heads=lambda model: {"mlm": False, "task": discriminator_head(model)},
)
