"""Losses between a student and its teacher, as functions on arrays.

Every loss is a `WeightedSum`: the weighted sum over its items (examples, tokens, or pairs of tokens) and the sum of
the weights. The mean over the items with weight 1 is sum / weight. An item of weight 0, such as padding, counts
neither in the sum nor in the weight, and has no gradient.
"""

import jax
import jax.numpy as jnp

from bert_jax.array_types import Array, Float, Int
from bert_jax.objectives.losses import WeightedSum

NORM_FLOOR = 1e-12
"""Smallest norm that a vector is divided by, as in torch.nn.functional.normalize; also added to variances."""


def soft_targets(
    student: Float[Array, "*items C"],
    teacher: Float[Array, "*items C"],
    weights: Float[Array, "*items"],
    temperature: float,
) -> WeightedSum:
    """Divergence of the student's distribution from the teacher's (Hinton et al. 2015, section 2).

    KL(softmax(teacher / T) || softmax(student / T)) times T^2, which keeps the size of gradients when T changes. The
    sum is over classes and the mean over items: torch's "batchmean". PKD's code divides by the number of classes, too.

    Args:
      student: logits.
      teacher: logits.
      weights: of the items.
      temperature: T.
    """
    student, teacher = (jax.nn.log_softmax(x.astype(jnp.float32) / temperature) for x in (student, teacher))
    return _weighted((jnp.exp(teacher) * (teacher - student)).sum(-1) * temperature**2, weights)


def mse(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """Squared difference, mean over the width H (TinyBERT, Jiao et al. 2020, equations 8 and 9)."""
    return _weighted(jnp.square(student.astype(jnp.float32) - teacher.astype(jnp.float32)).mean(-1), weights)


def normalised_mse(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """`mse` of the vectors divided by their 2-norms (PKD, Sun et al. 2019, equation 7).

    The mean over the width is that of PKD's code; the paper's equation has the sum.
    """
    return mse(_normalised(student), _normalised(teacher), weights)


def cosine(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """1 minus the cosine of the two vectors (DistilBERT, Sanh et al. 2019, section 2)."""
    return _weighted(1.0 - (_normalised(student) * _normalised(teacher)).sum(-1), weights)


def attention_scores_mse(
    student: Float[Array, "B N S S"], teacher: Float[Array, "B N S S"], pair_weights: Float[Array, "B S S"]
) -> WeightedSum:
    """Squared difference of attention scores before softmax, mean over heads (TinyBERT, equation 7).

    Items are pairs of query and key. TinyBERT's code counts pairs with padding as 0, here they are excluded.

    Args:
      student: scores, scaled and not masked.
      teacher: the same.
      pair_weights: `same_example`.
    """
    return mse(*(jnp.moveaxis(x, 1, -1) for x in (student, teacher)), pair_weights)


def similarity_mse(
    student: Float[Array, "B S H"], teacher: Float[Array, "B S G"], pair_weights: Float[Array, "B S S"]
) -> WeightedSum:
    """Squared difference of similarity matrices (TextBrewer, Yang et al. 2020; `mmd` in its code).

    The similarity of two tokens is the product of their hidden states divided by the width, so the widths of student
    and teacher can differ. Items are pairs of tokens.
    """
    similarities = (_similarities(x)[..., None] for x in (student, teacher))
    return mse(*similarities, pair_weights)


def standardised_mse(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """`mse` of the vectors with mean 0 and variance 1 over the width: feature maps (MobileBERT, Sun et al. 2020).

    The paper's equation has the hidden states as they are; its code normalises them first, as here, and has
    `mse_of_means` and `variance_l1` for what that removes (google-research/mobilebert run_pretraining.py).
    """
    return mse(_standardised(student), _standardised(teacher), weights)


def mse_of_means(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """Squared difference of the means over the width (MobileBERT, as `standardised_mse`)."""
    means = (_moments(x)[1] for x in (student, teacher))
    return mse(*means, weights)


def variance_l1(
    student: Float[Array, "*items H"], teacher: Float[Array, "*items H"], weights: Float[Array, "*items"]
) -> WeightedSum:
    """Absolute difference of the variances over the width (MobileBERT, as `standardised_mse`)."""
    student, teacher = (_moments(x)[2] for x in (student, teacher))
    return _weighted(jnp.abs(student - teacher)[..., 0], weights)


def attention_kl(
    student: Float[Array, "B N S S"], teacher: Float[Array, "B N S S"], pair_weights: Float[Array, "B S S"]
) -> WeightedSum:
    """KL divergence of the student's attention from the teacher's, mean over heads (MobileBERT, Sun et al. 2020).

    Items are queries. The code of MobileBERT has the cross-entropy, which differs by a constant.

    Args:
      student: scores, scaled and not masked.
      teacher: the same.
      pair_weights: `same_example`: the keys that a query attends to.
    """
    visible = pair_weights[:, None] > 0
    is_query = visible.any(-1)
    # Queries of padding see no key; they get one, so that nothing is infinite.
    visible |= ~is_query[..., None]
    student, teacher = (
        jax.nn.log_softmax(jnp.where(visible, x.astype(jnp.float32), jnp.finfo(jnp.float32).min))
        for x in (student, teacher)
    )
    divergence = jnp.where(visible, jnp.exp(teacher) * (teacher - student), 0.0).sum(-1)
    return _weighted(divergence.mean(1), is_query[:, 0].astype(jnp.float32))


def same_example(segment_ids: Int[Array, "B S"]) -> Float[Array, "B S S"]:
    """1.0 for pairs of tokens of the same packed example, 0.0 for all others and for padding."""
    is_same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] > 0)
    return is_same.astype(jnp.float32)


def _weighted(losses: Float[Array, "*items"], weights: Float[Array, "*items"]) -> WeightedSum:
    return WeightedSum(jnp.where(weights > 0, losses * weights, 0.0).sum(), weights.sum())


def _moments(x: Float[Array, "*items H"]) -> tuple[Array, Array, Array]:
    """The vectors in float32, their means and their variances over the width, which becomes 1."""
    x = x.astype(jnp.float32)
    return x, x.mean(-1, keepdims=True), x.var(-1, keepdims=True)


def _standardised(x: Float[Array, "*items H"]) -> Float[Array, "*items H"]:
    x, mean, variance = _moments(x)
    return (x - mean) * jax.lax.rsqrt(variance + NORM_FLOOR)


def _normalised(x: Float[Array, "*items H"]) -> Float[Array, "*items H"]:
    """Vectors of norm 1, float32. The square is bounded before the root, whose gradient at 0 is not finite."""
    x = x.astype(jnp.float32)
    squares = jnp.square(x).sum(-1, keepdims=True)
    return x / jnp.sqrt(jnp.maximum(squares, NORM_FLOOR**2))


def _similarities(x: Float[Array, "B S H"]) -> Float[Array, "B S S"]:
    x = x.astype(jnp.float32)
    return jnp.einsum("bsh,bth->bst", x, x) / x.shape[-1]
