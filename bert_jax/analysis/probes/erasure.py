"""What a model loses when parts of speech are erased from the outputs of a layer (amnesic probing with LEACE).

Elazar et al. 2021 (arXiv:2006.00995), Belrose et al. 2023 (arXiv:2306.03819).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.capture import capture
from bert_jax.analysis.probes.leace import Eraser, fit_leace, random_eraser
from bert_jax.analysis.probes.linear import fit_and_score
from bert_jax.analysis.probes.vectors import Sample
from bert_jax.analysis.rows import Batch, Row, batches, choose_masked, masked_positions
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model.activations import Edit
from bert_jax.progress import progress_bar

EPOCHS = 30
"""Of the probes: with few steps, the noise of the optimisation alone moves a probe of erased vectors off chance."""
HIDDEN, LOGITS = "layers.*.hidden", "mlm_logits"
ROWS = ("none", "leace", "random")
"""What is erased: nothing, the parts of speech, a random subspace of equal rank."""


class Masked(NamedTuple):
    """Rows with masked tokens, and the part of speech of every token's word."""

    rows: list[Row]
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
    model: LoadedModel, fitted_on: Masked, scored_on: Masked, *, penalty: float, seed: int, progress: bool
) -> dict[str, Any]:
    """Erase parts of speech from the outputs of each layer, one layer at a time.

    Args:
      model: from `inference.load`; without an MLM head there is no loss.
      fitted_on: sentences on which erasers and probes are fitted.
      scored_on: sentences on which probes and the model are scored.
      penalty: of the probes.
      seed: of the probes and the random subspaces.
      progress: show progress bars on stderr.

    Returns:
      ranks of the erasers by layer; by what is erased, the accuracy of a linear probe by layer, and, at masked tokens,
      the loss of the MLM head in nats and its accuracy.
    """
    train, train_labels = token_vectors(model, fitted_on, progress=progress)
    dev, dev_labels = token_vectors(model, scored_on, progress=progress)
    classes, erasers = len(fitted_on.names), []
    probe: dict[str, list[float]] = {name: [] for name in ROWS}
    with progress_bar("erasers", len(train), "layer", shown=progress) as bar:
        for layer, (of_train, of_dev) in enumerate(zip(train, dev, strict=True)):
            leace = fit_leace(of_train, train_labels, classes)
            pair = (leace, random_eraser(of_train, leace.rank, seed + layer))
            for name, eraser in zip(ROWS, (None, *pair), strict=True):
                erased = (of_train, of_dev) if eraser is None else (eraser(of_train), eraser(of_dev))
                scores = (*erased, train_labels, dev_labels, classes)
                probe[name].append(fit_and_score(*scores, epochs=EPOCHS, penalty=penalty, seed=seed))
            erasers.append(pair)
            bar.update()
    majority = int(np.bincount(train_labels).argmax())
    found = {
        "fitted_tokens": len(train_labels),
        "scored_tokens": len(dev_labels),
        "majority_accuracy": float((dev_labels == majority).mean()),
        "ranks": [leace.rank for leace, _ in erasers],
        "probe_accuracy": probe,
        "mlm": None,
    }
    if model.heads.mlm and model.config.direction == "bidirectional":
        found["mlm"] = mlm_scores(model, scored_on, erasers, progress=progress)
    return found


def mlm_scores(
    model: LoadedModel, masked: Masked, erasers: Sequence[tuple[Eraser, Eraser]], *, progress: bool = False
) -> dict[str, Any]:
    """Loss and accuracy of the MLM head at masked tokens, with erasure at all tokens of words in one layer's output.

    Args:
      model: with an MLM head.
      masked: the sentences.
      erasers: by layer, of the concept and of a random subspace.
      progress: show a progress bar on stderr.
    """
    most, layers = max(map(len, masked.positions)), model.config.num_layers
    losses: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(layers)] for name in ROWS}
    hits: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in range(layers)] for name in ROWS}
    with progress_bar("erasure", len(masked.rows) * layers, "sentence and layer", shown=progress) as bar:
        for batch in batches(masked.rows, model.tokenizer.pad_id):
            positions, valid = masked_positions(batch, masked.positions, most)
            tokens = np.concatenate([masked.originals[index] for index in batch.indices if index >= 0])
            hidden = capture(model, batch, [HIDDEN])[HIDDEN]
            of_words = _at_words(batch, masked)[..., None]
            offsets = np.zeros_like(hidden)
            for layer in range(layers):
                for name, eraser in zip(ROWS, (None, *erasers[layer]), strict=True):
                    if eraser is None and layer > 0:
                        continue
                    offsets[:] = 0
                    if eraser is not None:
                        offsets[layer] = eraser.offsets(hidden[layer]) * of_words
                    edits = {"hidden": Edit(offset=offsets)}
                    logits = capture(model, batch, [LOGITS], edits=edits, positions=positions)[LOGITS][valid]
                    loss, hit = _token_scores(logits[:, : model.tokenizer.vocab_size], tokens)
                    for at in range(layers) if eraser is None else [layer]:
                        losses[name][at].append(loss)
                        hits[name][at].append(hit)
                bar.update(int((batch.indices >= 0).sum()))
    return {
        "masked_tokens": sum(map(len, masked.positions)),
        "loss_nats": {name: [float(np.concatenate(one).mean()) for one in losses[name]] for name in ROWS},
        "accuracy": {name: [float(np.concatenate(one).mean()) for one in hits[name]] for name in ROWS},
    }


def _at_words(batch: Batch, masked: Masked) -> np.ndarray:
    """1 at tokens of words, float32 [B, S]; 0 in rows that only fill the batch."""
    found = np.zeros(batch.input_ids.shape, np.float32)
    for b, index in enumerate(batch.indices):
        if index >= 0:
            found[b, : len(masked.rows[index].word_ids)] = masked.rows[index].word_ids >= 0
    return found


def _token_scores(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood of each token, nats, and whether it leads."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -log_p[np.arange(len(tokens)), tokens], logits.argmax(-1) == tokens
