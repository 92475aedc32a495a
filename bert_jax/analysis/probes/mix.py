"""Edge probing with a scalar mix over hidden states 0 to l, for every l (Tenney et al. 2019, arXiv:1905.05950).

Shapes: w words, n examples of k words each, H hidden, C labels; L1 hidden states; p mixes, one for each l.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.analysis.probes.label_tasks import LabelTask
from bert_jax.analysis.probes.linear import BATCH, CHUNK, LEARNING_RATE, MIN_STEPS
from bert_jax.array_types import Array, Float, Int, Key

MIX_RATE_FACTOR = 10.0
"""Learning rate of the mix's scalars over that of the classifiers: the softmax has to travel further."""


class MixProbes(NamedTuple):
    """Parameters of all mixes."""

    scalars: Array
    """[p, L1], before the softmax."""
    weights: Array
    """[p, k * H, C]."""
    bias: Array
    """[p, C]."""


class CumulativeMixes(NamedTuple):
    """Of one task."""

    predictions: Int[np.ndarray, "p n"]
    """For the dev examples, of the mix of states 0 to l, by l."""
    weights: Float[np.ndarray, " p"]
    """Softmax weights of the mix of all states."""


def mix_weights(scalars: Float[Array, "p L1"]) -> Float[Array, "p L1"]:
    """Softmax over the states that a mix has: mix i has states 0 to i."""
    return jax.nn.softmax(jnp.where(jnp.tri(*scalars.shape, dtype=bool), scalars, -jnp.inf), axis=-1)


def _logits(probes: MixProbes, states: tuple[Array, ...], moments: tuple[Array, Array], word_indices: Array) -> Array:
    """[p, n, C]; moments are means [L1, H] and scales [L1]."""
    means, scales = moments
    chosen = jnp.stack([state[word_indices] for state in states])
    chosen = (chosen - means[:, None, None]) * scales[:, None, None, None]
    mixed = jnp.einsum("pl,lnkh->pnkh", mix_weights(probes.scalars), chosen)
    flat = mixed.reshape(*mixed.shape[:2], -1)
    return jnp.einsum("pnd,pdc->pnc", flat, probes.weights) + probes.bias[:, None]


@functools.partial(jax.jit, static_argnames=("classes", "epochs"))
def fit(
    states: tuple[Float[Array, "w H"], ...],
    moments: tuple[Float[Array, "L1 H"], Float[Array, " L1"]],
    word_indices: Int[Array, "n k"],
    labels: Int[Array, " n"],
    *,
    classes: int,
    epochs: int,
    key: Key[Array, ""],
) -> MixProbes:
    """Fit the probes of all mixes side by side on the same batches, by Adam on the cross-entropy.

    Args:
      states: word vectors of the hidden states.
      moments: from `state_moments`.
      word_indices: rows of `states` of each example.
      labels: from 0 to classes - 1.
      classes: C.
      epochs: visits of each example, on average.
      key: of the order.
    """
    mixes, width, count = len(states), states[0].shape[1] * word_indices.shape[1], len(labels)
    probes = MixProbes(jnp.zeros((mixes, mixes)), jnp.zeros((mixes, width, classes)), jnp.zeros((mixes, classes)))
    steps = jnp.maximum(MIN_STEPS, epochs * count // BATCH)
    optimizer = optax.scale_by_adam()
    factors = MixProbes(MIX_RATE_FACTOR, 1.0, 1.0)

    def loss(probes, chosen):
        log_p = jax.nn.log_softmax(_logits(probes, states, moments, word_indices[chosen]))
        # The sum over mixes: their parameters are separate.
        return -jnp.take_along_axis(log_p, labels[chosen][None, :, None], axis=-1).sum(0).mean()

    def step(i, carry):
        probes, state = carry
        chosen = jax.random.randint(jax.random.fold_in(key, i), (BATCH,), 0, count)
        updates, state = optimizer.update(jax.grad(loss)(probes, chosen), state)
        rate = LEARNING_RATE * (1 - i / steps)
        return jax.tree.map(lambda x, u, factor: x - rate * factor * u, probes, updates, factors), state

    return jax.lax.fori_loop(0, steps, step, (probes, optimizer.init(probes)))[0]


@jax.jit
def state_moments(states: tuple[Float[Array, "w H"], ...]) -> tuple[Float[Array, "L1 H"], Float[Array, " L1"]]:
    """Mean of each state, and the factor that gives it the variance 1 over all dimensions.

    Without it, the states of models whose norms grow with depth would have unequal parts in the mix.
    """
    means = jnp.stack([state.mean(0) for state in states])
    variances = [jnp.square(state - mean[None]).mean() for state, mean in zip(states, means, strict=True)]
    return means, 1 / jnp.maximum(jnp.sqrt(jnp.stack(variances)), 1e-6)


def probe_mixes(
    train: Sequence[Float[Array, "w H"]], dev: Sequence[Float[Array, "v H"]], task: LabelTask, *, epochs: int, seed: int
) -> CumulativeMixes:
    """Probe the mixes of states 0 to l for all l.

    Args:
      train: word vectors of the training sentences, by hidden state.
      dev: of the dev sentences.
      task: the task.
      epochs: as in `fit`.
      seed: of the order.
    """
    moments = state_moments(tuple(train))
    settings = {"classes": len(task.names), "epochs": epochs, "key": jax.random.key(seed)}
    examples = jnp.asarray(task.train.words), jnp.asarray(task.train.labels)
    probes = fit(tuple(train), moments, *examples, **settings)
    predictions = []
    for start in range(0, len(task.dev.labels), CHUNK):
        words = task.dev.words[start : start + CHUNK]
        padded = jnp.asarray(np.pad(words, ((0, CHUNK - len(words)), (0, 0))))
        predictions.append(np.asarray(_predict(probes, tuple(dev), moments, padded))[:, : len(words)])
    weights = np.asarray(mix_weights(probes.scalars))[-1].astype(float)
    return CumulativeMixes(np.concatenate(predictions, axis=1), weights)


@jax.jit
def _predict(probes: MixProbes, states: tuple[Array, ...], moments: tuple[Array, Array], word_indices: Array) -> Array:
    return _logits(probes, states, moments, word_indices).argmax(-1)


def centre_of_gravity(weights: Sequence[float] | np.ndarray) -> float:
    """Mean state under the weights of a mix (Tenney et al. 2019, equation 2)."""
    return float(np.arange(len(weights)) @ np.asarray(weights))


def expected_layer(scores: Sequence[float] | np.ndarray) -> float:
    """Mean state under the differential scores of cumulative mixes, negative ones included (their equation 4).

    NaN if the mix of all states is not better than state 0.

    Args:
      scores: of the mix of states 0 to l, by l.
    """
    gains = np.diff(np.asarray(scores, np.float64))
    total = gains.sum()
    return float(np.arange(1, len(scores)) @ gains / total) if total > 0 else float("nan")


def gain_concentration_bits(scores: Sequence[float] | np.ndarray) -> float:
    """K(Delta): divergence of the differential scores, negative ones set to 0, from the uniform distribution, bits.

    0 if all layers contribute equally, log2(L) if one does all. NaN if no layer contributes.

    Args:
      scores: of the mix of states 0 to l, by l.
    """
    return divergence_from_uniform_bits(np.maximum(np.diff(np.asarray(scores, np.float64)), 0))


def divergence_from_uniform_bits(weights: Sequence[float] | np.ndarray) -> float:
    """Kullback-Leibler divergence of weights, divided by their sum, from the uniform distribution, bits; K(s) of a mix.

    Args:
      weights: at least 0; NaN if all are 0.
    """
    values = np.asarray(weights, np.float64)
    if values.sum() <= 0:
        return float("nan")
    p = values[values > 0] / values.sum()
    return float(np.sum(p * np.log2(p * len(values))))
