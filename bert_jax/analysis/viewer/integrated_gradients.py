"""Integrated gradients: how much each token of a text adds to one output of the model (Sundararajan et al. 2017).

The word embeddings move on a straight line from those of a baseline to those of the text. A token's attribution is the
integral of the output's gradient along this line, times the step (section 3, equation 1). All attributions sum to the
difference of the output between text and baseline (proposition 1, completeness); the integral is a sum over points of
Gauss-Legendre quadrature, and what is missing in the sum of the attributions is its error.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.analysis.attention.flow import text_contributions
from bert_jax.analysis.cloze.predictions import token_of_word
from bert_jax.analysis.viewer.attention_maps import encode_view
from bert_jax.array_types import Float
from bert_jax.errors import UserError, did_you_mean
from bert_jax.field_validation import Interval
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config, capture, compute
from bert_jax.interventions.rows import TOKENS_PER_BATCH, TextRow, batches
from bert_jax.model import bert

Baseline = Literal["mask", "pad"]
Steps = Annotated[int, Interval("[0, 1000]")]
ROLLOUTS = {"value zeroing": "rollout: value zeroing", "attention": "rollout: attention"}
"""What is shown beside the attributions, and its name among `Contributions.rollouts`."""


class AttributionSettings(NamedTuple):
    """Which output is explained, and how."""

    target: str | None = None
    """Token at the first mask, or label of a classification; None: the one that the model predicts."""
    baseline: Baseline = "mask"
    """In place of every token but [CLS], [SEP] and masks: [MASK], which pretraining has trained to say nothing about
    the word (Enguehard 2023, arXiv:2305.15853), or [PAD], whose embedding it has not trained."""
    steps: Steps = 50
    """Points of the quadrature; 0: no attribution."""


DEFAULTS = AttributionSettings()


class Output(NamedTuple):
    """A number that the model computes of a text."""

    of: str
    """"mlm_logits" or "task_logits", as in `interventions.capture`."""
    position: int
    """Of the mask; 0 for a task head."""
    index: int
    """Of the token or label."""
    name: str
    """With the unit, for people."""


class Attribution(NamedTuple):
    """What each token adds to an output."""

    output: str
    """Its name."""
    settings: AttributionSettings
    of_tokens: Float[np.ndarray, " T"]
    """In the unit of the output."""
    value: float
    """The output for the text."""
    baseline_value: float
    """The output for the baseline."""
    beside: Mapping[str, Float[np.ndarray, " T"]]
    """Shares of the tokens in what the output is computed from, by `ROLLOUTS`; not signed, each sums to 1."""

    @property
    def gap(self) -> float:
        """Sum of the attributions minus the difference of the outputs: 0, were the integral exact."""
        return float(self.of_tokens.sum()) - (self.value - self.baseline_value)


def attribute(
    model: LoadedModel, text: str, second: str | None = None, settings: AttributionSettings = DEFAULTS
) -> Attribution | None:
    """Attributions of a text's tokens; None for a text without a mask, if the model does not classify texts.

    Args:
      model: from `inference.load`.
      text, second: as of `read_attention`.
      settings: what is explained; with 0 steps there is no attribution.

    Raises:
      UserError: as `read_attention`, or a target that the model does not have.
    """
    row = encode_view(model, text, second)
    output = None if settings.steps == 0 else _choose_output(model, row, settings.target)
    if output is None:
        return None
    of_tokens, value, baseline_value = integrate(model, row, output, settings)
    ((_, found),) = text_contributions(model, [row])
    reads = model.heads.task.reads if output.of == "task_logits" else "tokens"
    queries = slice(None) if reads == "mean" else output.position
    rolled = {name: found.rollouts[key][queries].reshape(-1, len(of_tokens)).mean(0) for name, key in ROLLOUTS.items()}
    return Attribution(output.name, settings, of_tokens, value, baseline_value, rolled)


def _choose_output(model: LoadedModel, row: TextRow, target: str | None) -> Output | None:
    """The log-probability of a token at the first mask, else the logit of a label; None if the model has neither."""
    (batch,) = batches([row], model.tokenizer.pad_id, 1)
    masks, task = np.flatnonzero(row.input_ids == model.tokenizer.mask_id), model.heads.task
    if model.heads.mlm and len(masks) and model.config.direction == "bidirectional":
        position = int(masks[0])
        if target is None:
            logits = capture(model, batch, ["mlm_logits"], positions=masks[None, :1].astype(np.int32))["mlm_logits"]
            index = int(logits[0, 0, : model.tokenizer.vocab_size].argmax())
        else:
            index = token_of_word(target, model.tokenizer, begins_text=position == 1)
            if index is None:
                raise UserError(f"--view-target {target}: is not one token of the vocabulary: give another word")
        token = model.tokenizer.id_to_token(index)
        return Output("mlm_logits", position, index, f"log-probability of {token} at token {position} (nats)")
    if task is None or task.kind != "classification":
        if target is not None:
            raise UserError(
                f"--view-target {target}: nothing predicts it: write the mask token in place of a word, for a model "
                "with an MLM head, or give a model that classifies texts"
            )
        return None
    if target is None:
        index = int(capture(model, batch, ["task_logits"])["task_logits"][0, 0].argmax())
    elif target in task.labels:
        index = task.labels.index(target)
    else:
        hint = did_you_mean(target, task.labels) or f"there are {', '.join(task.labels)}"
        raise UserError(f"--view-target {target}: the model has no such label; {hint}")
    return Output("task_logits", 0, index, f"logit of {task.labels[index]}")


def integrate(
    model: LoadedModel, row: TextRow, output: Output, settings: AttributionSettings
) -> tuple[Float[np.ndarray, " T"], float, float]:
    """Attributions of the tokens of a row, and the output for the row and for its baseline.

    Args:
      model: with the head of the output.
      row: of one text or pair.
      output: to be explained.
      settings: with at least one step.
    """
    (batch,) = batches([row], model.tokenizer.pad_id, 1)
    filler = model.tokenizer.mask_id if settings.baseline == "mask" else model.tokenizer.pad_id
    kept = np.isin(batch.input_ids, [model.tokenizer.cls_id, model.tokenizer.sep_id, model.tokenizer.mask_id])
    baseline_ids = np.where(kept, batch.input_ids, filler).astype(np.int32)
    places, weights = np.polynomial.legendre.leggauss(settings.steps)  # from -1 to 1, the weights sum to 2
    points, weights = np.r_[0, 1, (1 + places) / 2], np.r_[0, 0, weights / 2]
    size = min(len(points), max(1, TOKENS_PER_BATCH // batch.input_ids.shape[1]))
    values, parts = np.zeros(len(points)), np.zeros((len(points), batch.input_ids.shape[1]))
    config, where = analysis_config(model.config, (output.of,)), np.array([output.position, output.index], np.int32)
    for start in range(0, len(points), size):
        chosen = np.resize(np.arange(start, min(start + size, len(points))), size)
        arguments = batch[:3], baseline_ids, points[chosen].astype(np.float32), where
        values[chosen], parts[chosen] = _values_and_parts(config, model.heads, output.of, model.params, *arguments)
    return (weights @ parts)[: len(row.input_ids)], float(values[1]), float(values[0])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _values_and_parts(config, heads, of, params, batch, baseline_ids, points_B, where):
    """The output [B] at points of the line, and its gradient by the embeddings times the whole line, [B, S]."""
    table_VE = bert.model_from_params(config, heads, params).encoder.embeddings.decoder_table()
    start_1SE, end_1SE = (jnp.take(table_VE, ids, axis=0) for ids in (baseline_ids, batch[0]))
    batch = tuple(jnp.repeat(x, len(points_B), axis=0) for x in batch)
    position, index = where
    positions = jnp.full((len(points_B), 1), position) if of == "mlm_logits" else None

    def run(embedded_BSE):
        found = compute(config, heads, (), (of,), params, batch, {}, positions, inputs_embeds=embedded_BSE)[of][:, 0]
        values_B = (jax.nn.log_softmax(found) if of == "mlm_logits" else found)[:, index]
        return values_B.sum(), values_B

    embedded_BSE = start_1SE + points_B[:, None, None] * (end_1SE - start_1SE)
    (_, values_B), gradient_BSE = jax.value_and_grad(run, has_aux=True)(embedded_BSE)
    return values_B, (gradient_BSE * (end_1SE - start_1SE)).sum(-1)
