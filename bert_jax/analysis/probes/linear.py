"""Linear probes: softmax classifiers on word vectors, stopped early, and their description length.

They are not converged logistic regressions: Adam visits every example `epochs` times from weights of 0, and that bounds
the weights more than the penalty does. Scores are comparable between states and models with equal `epochs` only.

Shapes: w words, n examples of k words each, H hidden, C labels.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.analysis.probes.label_tasks import LabelTask
from bert_jax.analysis.probes.vectors import standardized
from bert_jax.array_types import Array, Float, Int, Key

BATCH = 256
LEARNING_RATE = 3e-3
"""Of Adam, decayed linearly to 0."""
MIN_STEPS = 200
CHUNK = 1024
"""Examples whose likelihood is computed at once."""
FRACTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""Shares of the training examples at which the online code fits a new probe (Voita and Titov 2020, section 2.2.2)."""


class LinearProbe(NamedTuple):
    """Parameters of a softmax classifier."""

    weights: Array
    """[k * H, C]."""
    bias: Array
    """[C]."""


def log_probabilities(
    probe: LinearProbe, vectors: Float[Array, "w H"], word_indices: Int[Array, "n k"]
) -> Float[Array, "n C"]:
    """Log-probabilities of the labels, nats."""
    inputs = vectors[word_indices].reshape(len(word_indices), -1)
    return jax.nn.log_softmax(inputs @ probe.weights + probe.bias[None])


def _fit(vectors, word_indices, labels, count, classes, epochs, penalty, key) -> LinearProbe:
    """Steps of Adam on mean cross-entropy + penalty / (2 count) |weights|^2 of the first `count` examples.

    `count` may be traced, so that prefixes of all lengths share a program.
    """
    width = vectors.shape[1] * word_indices.shape[1]
    probe = LinearProbe(jnp.zeros((width, classes)), jnp.zeros(classes))
    steps = jnp.maximum(MIN_STEPS, (epochs * count) // BATCH)
    optimizer = optax.scale_by_adam()

    def loss(probe, chosen):
        log_p = log_probabilities(probe, vectors, word_indices[chosen])
        picked = jnp.take_along_axis(log_p, labels[chosen][:, None], axis=1)
        return -picked.mean() + penalty / (2 * count) * jnp.square(probe.weights).sum()

    def step(i, carry):
        probe, state = carry
        chosen = jax.random.randint(jax.random.fold_in(key, i), (BATCH,), 0, count)
        updates, state = optimizer.update(jax.grad(loss)(probe, chosen), state)
        rate = LEARNING_RATE * (1 - i / steps)
        return jax.tree.map(lambda x, u: x - rate * u, probe, updates), state

    return jax.lax.fori_loop(0, steps, step, (probe, optimizer.init(probe)))[0]


@functools.partial(jax.jit, static_argnames=("classes", "epochs", "penalty"))
def fit(
    vectors: Float[Array, "w H"],
    word_indices: Int[Array, "n k"],
    labels: Int[Array, " n"],
    *,
    classes: int,
    epochs: int,
    penalty: float,
    key: Key[Array, ""],
) -> LinearProbe:
    """A probe of all examples, by Adam on random batches; stopped early, not at the minimum.

    Args:
      vectors: of the words, standardised.
      word_indices: rows of `vectors` of each example.
      labels: from 0 to classes - 1.
      classes: C.
      epochs: visits of each example, on average.
      penalty: of half the squared norm of the weights, in nats over all examples.
      key: of the order of examples.
    """
    return _fit(vectors, word_indices, labels, len(labels), classes, epochs, penalty, key)


@functools.partial(jax.jit, static_argnames=("classes", "epochs", "penalty"))
def fit_prefixes(
    vectors: Float[Array, "w H"],
    word_indices: Int[Array, "n k"],
    labels: Int[Array, " n"],
    ends: Int[Array, " s"],
    *,
    classes: int,
    epochs: int,
    penalty: float,
    key: Key[Array, ""],
) -> tuple[Float[Array, " s"], LinearProbe]:
    """A probe for each prefix of the examples, and what it says of the block that follows; other arguments as `fit`.

    Args:
      ends: ascending lengths of the prefixes, the last one n.

    Returns:
      the negative log-likelihood of examples ends[i] to ends[i + 1] under the probe of the first ends[i], nats, 0 for
      the last, and
      the probe of all examples.
    """
    nexts = jnp.append(ends[1:], ends[-1])

    def stage(_, bounds):
        end, following = bounds
        probe = _fit(vectors, word_indices, labels, end, classes, epochs, penalty, key)

        def add_chunk(i, total):
            chosen = end + i * CHUNK + jnp.arange(CHUNK)
            inside, chosen = chosen < following, jnp.minimum(chosen, len(labels) - 1)
            log_p = log_probabilities(probe, vectors, word_indices[chosen])
            picked = jnp.take_along_axis(log_p, labels[chosen][:, None], axis=1)[:, 0]
            return total - jnp.where(inside, picked, 0).sum()

        return probe, jax.lax.fori_loop(0, -(-(following - end) // CHUNK), add_chunk, 0.0)

    empty = LinearProbe(jnp.zeros((vectors.shape[1] * word_indices.shape[1], classes)), jnp.zeros(classes))
    probe, blocks = jax.lax.scan(stage, empty, (ends, nexts))
    return blocks, probe


def prefix_ends(count: int) -> np.ndarray:
    """Lengths of the prefixes of FRACTIONS, each at least one example, without repetitions; int32, ascending."""
    return np.unique(np.maximum(1, np.round(np.array(FRACTIONS) * count))).astype(np.int32)


def online_code_bits(blocks_nats: np.ndarray, first: int, classes: int) -> float:
    """Length of the online code (Voita and Titov 2020, arXiv:2003.12298, equation 4), bits.

    Args:
      blocks_nats: negative log-likelihood of every block but the first, under the probe of all examples before it.
      first: examples of the first block, which has a uniform code.
      classes: number of labels.
    """
    return float(first * np.log2(classes) + np.sum(blocks_nats, dtype=np.float64) / np.log(2))


def uniform_code_bits(count: int, classes: int) -> float:
    """Length of the code that gives every label the same probability, bits."""
    return float(count * np.log2(classes))


class StateProbe(NamedTuple):
    """A linear probe of one hidden state."""

    predictions: np.ndarray
    """int32 [dev examples]."""
    control_predictions: np.ndarray
    """Of the control task."""
    code_bits: float


def probe_state(
    train: Array, dev: Array, task: LabelTask, control: LabelTask, *, epochs: int, penalty: float, seed: int
) -> StateProbe:
    """Probe one hidden state for a task and its control task.

    Args:
      train: word vectors of the training sentences, [w, H].
      dev: of the dev sentences.
      task: the linguistic task.
      control: from `control_task`.
      epochs: as in `fit`.
      penalty: as in `fit`.
      seed: of the order of examples.
    """
    train, dev = standardized(train, dev)
    classes, key = len(task.names), jax.random.key(seed)
    order = np.random.default_rng(seed).permutation(len(task.train.labels))
    words, ends = jnp.asarray(task.train.words[order]), prefix_ends(len(order))
    labels, control_labels = (jnp.asarray(one.train.labels[order]) for one in (task, control))
    settings: dict[str, Any] = {"classes": classes, "epochs": epochs, "penalty": penalty, "key": key}
    blocks, probe = fit_prefixes(train, words, labels, jnp.asarray(ends), **settings)
    of_control = fit(train, words, control_labels, **settings)
    predictions = [np.asarray(_predict(one, dev, jnp.asarray(task.dev.words))) for one in (probe, of_control)]
    return StateProbe(*predictions, online_code_bits(np.asarray(blocks), int(ends[0]), classes))


def fit_and_score(
    train: Float[np.ndarray, "w H"],
    dev: Float[np.ndarray, "v H"],
    train_labels: Int[np.ndarray, " w"],
    dev_labels: Int[np.ndarray, " v"],
    classes: int,
    *,
    epochs: int,
    penalty: float,
    seed: int,
) -> float:
    """Accuracy on dev vectors of a linear probe fitted on training vectors; settings as in `fit`."""
    train, dev = standardized(jnp.asarray(train), jnp.asarray(dev))
    train_words, dev_words = (jnp.arange(len(one))[:, None] for one in (train_labels, dev_labels))
    settings: dict[str, Any] = {"classes": classes, "epochs": epochs, "penalty": penalty, "key": jax.random.key(seed)}
    probe = fit(train, train_words, jnp.asarray(train_labels), **settings)
    return float((np.asarray(_predict(probe, dev, dev_words)) == dev_labels).mean())


@jax.jit
def _predict(probe: LinearProbe, vectors: Array, word_indices: Array) -> Int[Array, " n"]:
    return log_probabilities(probe, vectors, word_indices).argmax(-1)
