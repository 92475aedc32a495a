"""How much a loss depends on the attention to [SEP]: gradients by attention (Clark et al. 2019, section 3.2)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.attention.maps import PROBABILITIES, PROBABILITIES_IN_MEMORY, TokenKinds, token_kinds
from bert_jax.array_types import Array, Float
from bert_jax.command.progress import progress_bar
from bert_jax.inference.embedding import row_length
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import gradients
from bert_jax.interventions.rows import TOKENS_PER_BATCH, TextBatch, TextRow, batches
from bert_jax.model.heads import Heads

KINDS = ("sep", "cls", "punctuation", "other")
TASKS = ("classification", "tagging")
"""Kinds of task heads that `predicted_label_loss` suits."""


def loss_name(heads: Heads) -> str | None:
    """The loss that a model's heads allow: "masked tokens", "prediction" (of a task head), or None."""
    if heads.mlm:
        return "masked tokens"
    return "prediction" if heads.task is not None and heads.task.kind in TASKS else None


def summed_mlm_loss(found: dict[str, Array], masked: tuple[Array, Array]) -> Float[Array, ""]:
    """Sum over rows of the weighted negative log-likelihood of masked tokens.

    Args:
      found: ``mlm_logits`` [B, M, V] at the masked positions.
      masked: the tokens, int32 [B, M], and their weights [B, M].
    """
    tokens, weights = masked
    log_probabilities = jax.nn.log_softmax(found["mlm_logits"])
    return -(weights * jnp.take_along_axis(log_probabilities, tokens[..., None], axis=-1)[..., 0]).sum()


def predicted_label_loss(found: dict[str, Array], weights: Array) -> Float[Array, ""]:
    """Sum over rows of the negative log-likelihood of the label that a task head predicts; of a regression, its value.

    Args:
      found: ``task_logits`` [B, n, C].
      weights: [B, n], of the outputs of each row.
    """
    logits = found["task_logits"]
    of_output = logits[..., 0] if logits.shape[-1] == 1 else -jax.nn.log_softmax(logits).max(-1)
    return (weights * of_output).sum()


def gradients_by_kind(
    model: LoadedModel, rows: Sequence[TextRow], masked: Sequence[np.ndarray] | None, *, progress: bool = False
) -> dict[str, Float[np.ndarray, "texts L N"]]:
    """Mean absolute gradient of the loss of a text by an attention probability, for each kind of key.

    A text's loss is its mean over masked tokens, or over the outputs of the task head. The mean is over all queries and
    all keys of the kind of a text.

    Args:
      model: whose heads allow a loss (`loss_name`).
      rows: of texts.
      masked: positions that are replaced by the mask token in each row, with an MLM head; None: the task head's loss.
      progress: show a progress bar on stderr.

    Returns:
      by kind of key, float64; NaN where a text has no such keys.
    """
    config = model.config
    per_token = config.num_layers * config.num_heads * row_length(max(len(row.input_ids) for row in rows))
    # The backward pass keeps several arrays of this size.
    tokens_per_batch = min(TOKENS_PER_BATCH, PROBABILITIES_IN_MEMORY // (4 * per_token))
    found = {kind: np.full((len(rows), config.num_layers, config.num_heads), np.nan) for kind in KINDS}
    most = 0 if masked is None else max(map(len, masked))
    with progress_bar("gradients by attention", len(rows), "text", shown=progress) as bar:
        for batch in batches(rows, model.tokenizer.pad_id, tokens_per_batch):
            if masked is None:
                gradient = _of_prediction(model, batch)
            else:
                gradient = _of_masked(model, batch, masked, most)
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                kinds, n = token_kinds(rows[index], model.tokenizer), len(rows[index].input_ids)
                for kind, keys in _keys(kinds).items():
                    if keys.any():
                        found[kind][index] = np.abs(gradient[:, b, :, :n, :n][..., keys]).mean((-2, -1))
                bar.update(1)
    return found


def _keys(kinds: TokenKinds) -> dict[str, np.ndarray]:
    other = ~(kinds.special | kinds.punctuation)
    return {"sep": kinds.sep, "cls": kinds.cls, "punctuation": kinds.punctuation, "other": other}


def _of_masked(model: LoadedModel, batch: TextBatch, masked: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Gradients [L, B, N, S, T] of `summed_mlm_loss`."""
    positions = np.zeros((len(batch.indices), most), np.int32)
    weights = np.zeros(positions.shape, np.float32)
    for b, index in enumerate(batch.indices):
        chosen = masked[index if index >= 0 else batch.indices[0]]  # rows that fill the batch repeat the first one
        positions[b, : len(chosen)], weights[b, : len(chosen)] = chosen, 1 / len(chosen)
    hidden = batch.input_ids.copy()
    for b, weight in enumerate(weights):
        hidden[b, positions[b, weight > 0]] = model.tokenizer.mask_id
    tokens = np.take_along_axis(batch.input_ids, positions, axis=1)
    hidden_batch = batch._replace(input_ids=hidden)
    return gradients(model, hidden_batch, [PROBABILITIES], summed_mlm_loss, (tokens, weights), positions=positions)[1][
        PROBABILITIES
    ]


def _of_prediction(model: LoadedModel, batch: TextBatch) -> np.ndarray:
    """Gradients [L, B, N, S, T] of `predicted_label_loss`."""
    per_token = model.heads.task.kind == "tagging"
    weights = batch.attention_mask if per_token else np.ones((len(batch.indices), 1))
    weights = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    outputs = ("task_logits",)
    return gradients(model, batch, [PROBABILITIES], predicted_label_loss, weights, outputs=outputs)[1][PROBABILITIES]
