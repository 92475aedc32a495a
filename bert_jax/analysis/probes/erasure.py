"""What a model loses when parts of speech are erased from the outputs of a layer (amnesic probing with LEACE).

Elazar et al. 2021 (arXiv:2006.00995), Belrose et al. 2023 (arXiv:2306.03819).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.probes.leace import Eraser, control_eraser, fit_leace, random_eraser, whiten
from bert_jax.analysis.probes.linear import fit_and_score
from bert_jax.analysis.probes.vectors import Sample
from bert_jax.array_types import Float, Int
from bert_jax.command.progress import progress_bar
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextBatch, TextRow, batches, choose_masked, masked_positions
from bert_jax.interventions.task_evaluation import log_softmax
from bert_jax.model.activations import Edit

EPOCHS = 30
"""Of the probes: with few steps, the noise of the optimisation alone moves a probe of erased vectors off chance."""
HIDDEN, LOGITS = "layers.*.hidden", "mlm_logits"
ROWS = ("none", "leace", "control", "random")
"""What is erased: nothing, the parts of speech, shuffled parts of speech, a random subspace of equal rank."""
Erasers = Mapping[str, Sequence[Eraser]]
"""Those of a layer by ROWS but "none"; several draws of baselines."""


class Masked(NamedTuple):
    """Rows with masked tokens, and the part of speech of every token's word."""

    rows: list[TextRow]
    """With the mask token at the masked positions."""
    positions: list[np.ndarray]
    """Masked positions of each row, at least one."""
    originals: list[np.ndarray]
    """int32: tokens at these."""
    labels: list[np.ndarray]
    """int64: index of the tag of each token, -1 for special tokens and for tags that are not in `names`."""
    names: tuple[str, ...]


def mask(sample: Sample, names: tuple[str, ...], model: LoadedModel, share: float, seed: int) -> Masked:
    """Mask a share of the tokens of every sentence, all by the mask token.

    Args:
      sample: the sentences; those without a token that the vocabulary knows are left out.
      names: tags, in the order of the labels.
      model: whose mask token is used.
      share: of the tokens that are masked; at least one is.
      seed: of the choice.
    """
    index = {name: i for i, name in enumerate(names)}
    chosen = choose_masked(sample.rows, model.tokenizer.special_ids, share, seed)
    found = Masked([], [], [], [], names)
    for sentence, row, positions in zip(sample.sentences, sample.rows, chosen, strict=True):
        if not len(positions):
            continue
        of_words = np.array([*(index.get(tag, -1) for tag in sentence.upos), -1])
        ids = row.input_ids.copy()
        ids[positions] = model.tokenizer.mask_id
        found.rows.append(row._replace(input_ids=ids))
        found.positions.append(positions)
        found.originals.append(row.input_ids[positions])
        found.labels.append(of_words[row.word_ids])
    return found


def token_vectors(model: LoadedModel, masked: Masked, *, progress: bool) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of all layers at the tokens of words, float32 [L, n, H], and the tags of these, int64 [n]."""
    vectors: list[np.ndarray] = [np.zeros(0)] * len(masked.rows)
    labels = [labels[labels >= 0] for labels in masked.labels]
    with progress_bar("vectors, erasure", len(masked.rows), "sentence", shown=progress) as bar:
        for batch in batches(masked.rows, model.tokenizer.pad_id):
            hidden = capture(model, batch, [HIDDEN])[HIDDEN]
            for b, index in enumerate(batch.indices):
                if index >= 0:
                    vectors[index] = hidden[:, b, np.flatnonzero(masked.labels[index] >= 0)]
            bar.update(int((batch.indices >= 0).sum()))
    return np.concatenate(vectors, axis=1), np.concatenate(labels)


def measure(
    model: LoadedModel,
    fitted_on: Masked,
    scored_on: Masked,
    *,
    draws: int,
    penalty: float,
    seed: int,
    progress: bool,
) -> dict[str, Any]:
    """Erase parts of speech from the outputs of each layer, one layer at a time.

    Args:
      model: from `inference.load`; without an MLM head there is no loss.
      fitted_on: sentences on which erasers and probes are fitted.
      scored_on: sentences on which probes and the model are scored.
      draws: random subspaces, and shuffles of the labels, in each layer.
      penalty: of the probes.
      seed: of the probes, the random subspaces and the shuffles.
      progress: show progress bars on stderr.

    Returns:
      ranks of the erasers by layer; by ROWS, layer and draw, the share of the variance of the fitted tokens that is
      removed, the accuracy of a linear probe, and, at masked tokens, the loss of the MLM head in nats and its accuracy.
    """
    train, train_labels = token_vectors(model, fitted_on, progress=progress)
    dev, dev_labels = token_vectors(model, scored_on, progress=progress)
    classes, erasers = len(fitted_on.names), []
    variance: dict[str, list[list[float]]] = {name: [] for name in ROWS}
    probe: dict[str, list[list[float]]] = {name: [] for name in ROWS}
    with progress_bar("erasers", len(train) * (2 + 2 * draws), "layer and draw", shown=progress) as bar:
        for layer, (of_train, of_dev) in enumerate(zip(train, dev, strict=True)):
            erasers.append(fit_erasers(of_train, train_labels, classes, draws, [seed, layer]))
            for name in ROWS:
                accuracies = []
                for eraser in erasers[-1].get(name, [None]):
                    erased = (of_train, of_dev) if eraser is None else (eraser(of_train), eraser(of_dev))
                    scores = (*erased, train_labels, dev_labels, classes)
                    accuracies.append(fit_and_score(*scores, epochs=EPOCHS, penalty=penalty, seed=seed))
                    bar.update()
                probe[name].append(accuracies)
                variance[name].append([one.variance_removed(of_train) for one in erasers[-1].get(name, ())] or [0.0])
    majority = int(np.bincount(train_labels).argmax())
    found = {
        "fitted_tokens": len(train_labels),
        "scored_tokens": len(dev_labels),
        "majority_accuracy": float((dev_labels == majority).mean()),
        "ranks": [of_layer["leace"][0].rank for of_layer in erasers],
        "variance_removed": variance,
        "probe_accuracy": probe,
        "mlm": None,
    }
    if model.heads.mlm and model.config.direction == "bidirectional":
        found["mlm"] = mlm_scores(model, scored_on, erasers, progress=progress)
    return found


def fit_erasers(
    vectors: Float[np.ndarray, "n H"], labels: Int[np.ndarray, " n"], classes: int, draws: int, seed: Sequence[int]
) -> dict[str, list[Eraser]]:
    """The erasers of one layer: of a concept, of shuffled labels, and of random subspaces of equal rank.

    Args:
      vectors: of the tokens on which they are fitted.
      labels: of these, from 0 to classes - 1.
      classes: number of labels.
      draws: of each baseline.
      seed: of the draws.
    """
    whitening = whiten(vectors)
    leace = fit_leace(whitening, labels, classes)
    seeds = [[*seed, draw] for draw in range(draws)]
    return {
        "leace": [leace],
        "control": [control_eraser(whitening, labels, classes, one) for one in seeds],
        "random": [random_eraser(whitening, leace.rank, one) for one in seeds],
    }


def mlm_scores(
    model: LoadedModel, masked: Masked, erasers: Sequence[Erasers], *, progress: bool = False
) -> dict[str, Any]:
    """Loss and accuracy of the MLM head at masked tokens, with erasure at all tokens of words in one layer's output.

    Args:
      model: with an MLM head.
      masked: the sentences.
      erasers: by layer.
      progress: show a progress bar on stderr.

    Returns:
      numbers of masked tokens and of sentences; by ROWS, layer and draw, the loss in nats and the accuracy; and `rises`
      of the loss.
    """
    most, layers = max(map(len, masked.positions)), model.config.num_layers
    scores: dict[tuple[str, int, int], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
    sentences: list[np.ndarray] = []
    with progress_bar("erasure", len(masked.rows) * layers, "sentence and layer", shown=progress) as bar:
        for batch in batches(masked.rows, model.tokenizer.pad_id):
            positions, valid = masked_positions(batch, masked.positions, most)
            tokens = np.concatenate([masked.originals[index] for index in batch.indices if index >= 0])
            sentences.append(np.repeat(batch.indices, valid.sum(1)))
            captured = capture(model, batch, [HIDDEN, LOGITS], positions=positions)
            hidden, of_words = captured[HIDDEN], _at_words(batch, masked)[..., None]
            unchanged = _token_scores(captured[LOGITS][valid][:, : model.tokenizer.vocab_size], tokens)
            offsets = np.zeros_like(hidden)
            for layer in range(layers):
                scores["none", layer, 0].append(unchanged)
                for name, of_layer in erasers[layer].items():
                    for draw, eraser in enumerate(of_layer):
                        offsets[:] = 0
                        offsets[layer] = eraser.offsets(hidden[layer]) * of_words
                        edits = {"hidden": Edit(offset=offsets)}
                        logits = capture(model, batch, [LOGITS], edits=edits, positions=positions)[LOGITS][valid]
                        found = _token_scores(logits[:, : model.tokenizer.vocab_size], tokens)
                        scores[name, layer, draw].append(found)
                bar.update(int((batch.indices >= 0).sum()))

    def means(which: int) -> dict[str, list[list[float]]]:
        by_row: dict[str, list[list[float]]] = {name: [[] for _ in range(layers)] for name in ROWS}
        for (name, layer, _), of_batches in scores.items():
            by_row[name][layer].append(float(np.concatenate([one[which] for one in of_batches]).mean()))
        return by_row

    order, tokens = np.concatenate(sentences), np.array(list(map(len, masked.positions)), np.float64)
    losses: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(layers)] for name in ROWS}
    for (name, layer, _), of_batches in scores.items():
        of_tokens = np.concatenate([one[0] for one in of_batches])
        losses[name][layer].append(np.bincount(order, of_tokens, len(tokens)))
    of_sentences = {name: np.array([np.mean(draws, axis=0) for draws in by_layer]) for name, by_layer in losses.items()}
    found = {"masked_tokens": int(tokens.sum()), "sentences": len(tokens), "loss_nats": means(0), "accuracy": means(1)}
    return found | {"rise_nats": rises(of_sentences, tokens)}


def rises(losses: Mapping[str, Float[np.ndarray, "L m"]], tokens: Float[np.ndarray, " m"]) -> dict[str, dict[str, Any]]:
    """How much more than without erasure a masked token's loss is in nats, by layer, with intervals over sentences; and
    how much more with the parts of speech erased than with a baseline.

    Args:
      losses: by ROWS, sums over the masked tokens of a sentence, mean over draws.
      tokens: masked tokens of each sentence.
    """
    differences = {name: values - losses["none"] for name, values in losses.items() if name != "none"}
    differences |= {f"leace_minus_{name}": losses["leace"] - losses[name] for name in ("control", "random")}
    return {name: bootstrap_mean(values, None, tokens)._asdict() for name, values in differences.items()}


def _at_words(batch: TextBatch, masked: Masked) -> np.ndarray:
    """1 at tokens of words, float32 [B, S]; 0 in rows that only fill the batch."""
    found = np.zeros(batch.input_ids.shape, np.float32)
    for b, index in enumerate(batch.indices):
        if index >= 0:
            found[b, : len(masked.rows[index].word_ids)] = masked.rows[index].word_ids >= 0
    return found


def _token_scores(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood of each token, nats, and whether it leads."""
    return -log_softmax(logits)[np.arange(len(tokens)), tokens], logits.argmax(-1) == tokens
