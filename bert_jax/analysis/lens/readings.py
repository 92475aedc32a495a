"""Measures of the lens on arrays.

Shapes: L1 hidden states, the embeddings first; n masked tokens; V vocabulary.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, percentiles
from bert_jax.array_types import Float, Int
from bert_jax.interventions.task_evaluation import log_softmax

MEDIAN_RESAMPLES = 1_000


class Readings(NamedTuple):
    """What the MLM head says of every hidden state at masked tokens."""

    log_likelihoods: np.ndarray
    """[L1, n], of the masked token, nats."""
    ranks: np.ndarray
    """int64 [L1, n]: 1 + the number of tokens with a higher logit than the masked one."""
    top: np.ndarray
    """int64 [L1, n]: the token with the highest logit, of equal ones the first."""
    divergences: np.ndarray
    """[L1, n]: Kullback-Leibler divergence of this state's distribution from the last one's, KL(last || this), nats."""


def read_logits(logits: Float[np.ndarray, "L1 n V"], tokens: Int[np.ndarray, " n"]) -> Readings:
    """What logits say of tokens.

    Args:
      logits: of every hidden state, the last layer's last.
      tokens: the masked ones.
    """
    last = log_softmax(logits[-1])
    index = (np.arange(len(tokens)), tokens)
    likelihoods, ranks, top, divergences = [], [], [], []
    for state in logits:
        log_probabilities = log_softmax(state)
        likelihoods.append(log_probabilities[index])
        ranks.append(1 + (state > state[index][:, None]).sum(-1))
        top.append(state.argmax(-1))
        divergences.append((np.exp(last) * (last - log_probabilities)).sum(-1))
    return Readings(*(np.stack(values) for values in (likelihoods, ranks, top, divergences)))


def leads_since(top: Int[np.ndarray, "L1 n"], tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The first state from which a token leads and stays leading to the last one; L1 if it does not lead in the last.

    Args:
      top: leading token of every state.
      tokens: the masked ones, or the predictions of the last state.
    """
    wrong = top != tokens[None, :]
    return np.where(wrong.any(0), len(top) - wrong[::-1].argmax(0), 0)


def sums_of_texts(values: np.ndarray, texts: Int[np.ndarray, " n"]) -> Float[np.ndarray, "*L1 t"]:
    """Sums over the masked tokens of each text.

    Args:
      values: of the tokens, [..., n].
      texts: of each token, ascending.
    """
    return np.add.reduceat(np.asarray(values, np.float64), np.flatnonzero(np.diff(texts, prepend=-1)), axis=-1)


def median_ranks(ranks: Int[np.ndarray, "L1 n"], texts: Int[np.ndarray, " n"], *, seed: int = 0) -> BootstrapMean:
    """Medians over masked tokens, with intervals of the bootstrap over texts.

    The median of a bootstrap sample is its lower one, the smallest rank that half of the tokens do not exceed.

    Args:
      ranks: of the masked tokens by state.
      texts: of each token, ascending.
      seed: of the bootstrap.
    """
    text = np.unique(texts, return_inverse=True)[1]
    count = text[-1] + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), MEDIAN_RESAMPLES)
    resampled = []
    for of_state in ranks:
        order = np.argsort(of_state)
        tokens = drawn[:, text[order]].cumsum(1)
        resampled.append(of_state[order][(2 * tokens < tokens[:, -1:]).sum(1)])
    return BootstrapMean(np.median(ranks, axis=1), *percentiles(np.stack(resampled, axis=1)))


class UnigramReadings(NamedTuple):
    """What predicting by frequency alone gives at masked tokens."""

    correct: Float[np.ndarray, " n"]
    loss_nats: Float[np.ndarray, " n"]
    ranks: Int[np.ndarray, " n"]

    @property
    def means(self) -> dict[str, float]:
        """Accuracy, mean loss and median rank."""
        accuracy, loss = float(self.correct.mean()), float(self.loss_nats.mean())
        return {"accuracy": accuracy, "loss_nats": loss, "median_rank": float(np.median(self.ranks))}


def unigram_readings(tokens: Int[np.ndarray, " n"], counts: Int[np.ndarray, " V"]) -> UnigramReadings:
    """Predictions by frequency alone, with one added to every count.

    Args:
      tokens: the masked ones.
      counts: of every token of the vocabulary in the text that is not masked.
    """
    log_probabilities = np.log((counts + 1) / (counts + 1).sum())
    ranks = 1 + len(counts) - np.searchsorted(np.sort(counts), counts[tokens], side="right")
    return UnigramReadings((tokens == counts.argmax()).astype(float), -log_probabilities[tokens], ranks)
