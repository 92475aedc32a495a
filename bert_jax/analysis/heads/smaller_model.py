"""A model without some of its heads: smaller parameters that compute what the masked model computes.

Every layer keeps the same number of heads, because a layer's parameters are stacked with those of the others. Shapes:
L layers, N heads, K heads that are kept, G sets of parameters (L, or fewer where layers share them).
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import numpy as np

from bert_jax.analysis.capture import analysis_config, capture
from bert_jax.analysis.heads.losses import CONTEXT, Evaluation, Examples, evaluate
from bert_jax.analysis.rows import Batch
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.array_types import Float, Int
from bert_jax.config import ModelConfig
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert
from bert_jax.model.activations import Edit
from bert_jax.model.layer_plan import parameter_groups
from bert_jax.storage import StoredPath
from bert_jax.training.param_paths import map_with_paths
from bert_jax.training.task import Params

ROUNDS = 7
"""Timed passes of each model, one after the other in turn."""
TOLERANCE = 1e-3
"""Of the logits, relative to the largest one: float32 sums in another order; a wrong head differs by more."""
HEAD_AXES = {"qkv/kernel": 3, "qkv/bias": 2, "attention_out/kernel": 1}
HEAD_AXES |= {"query_key/kernel": 3, "query_key/bias": 2, "value/kernel": 2, "value/bias": 1}
"""The axis over heads of the parameters of the layers that have one."""


def choose_heads(importances: Float[np.ndarray, "L N"], config: ModelConfig, count: int) -> Int[np.ndarray, "L K"]:
    """The most important heads of every layer, ascending; layers with shared parameters keep the same ones.

    Args:
      importances: not normalised: those of layers that share parameters are added.
      config: of the model.
      count: heads that a layer keeps, K.
    """
    groups = np.array(parameter_groups(config))
    totals = np.stack([importances[groups == group].sum(0) for group in groups])
    return np.sort(np.argsort(-totals, axis=1, kind="stable")[:, :count], axis=1)


def remove_heads(config: ModelConfig, params: Params, kept: Int[np.ndarray, "L K"]) -> tuple[ModelConfig, Params]:
    """The config and NumPy parameters of the model without the other heads; layers with shared parameters keep the
    same ones.
    """
    groups = parameter_groups(config)
    by_group = np.stack([kept[groups.index(group)] for group in range(len(set(groups)))])

    def take(path: str, leaf: Any) -> np.ndarray:
        axis = next((axis for end, axis in HEAD_AXES.items() if path.endswith(f"encoder/layers/{end}")), None)
        if axis is None:
            return np.asarray(leaf)
        indices = by_group.reshape([len(by_group) if i == 0 else -1 if i == axis else 1 for i in range(leaf.ndim)])
        return np.take_along_axis(np.asarray(leaf), indices, axis)

    smaller = dataclasses.replace(
        config, num_heads=kept.shape[1], head_size=config.size_per_head, attention="reference"
    )
    return smaller, map_with_paths(take, params)


def write_smaller(
    inputs: SuiteInputs,
    examples: Examples,
    importances: Float[np.ndarray, "L N"],
    share: float,
    destination: StoredPath,
) -> dict[str, Any]:
    """Write the model with the most important heads of every layer, and compare it with the masked and whole model.

    Args:
      inputs: with the source of the model, whose tokenizer and settings are written too.
      examples: on which the models are compared.
      importances: of all heads.
      share: of each layer's heads to keep, rounded, at least one.
      destination: the directory to create.

    Raises:
      UserError: the destination exists or cannot be written.
    """
    require(inputs.source is not None, "heads.prune_to: the model was not read from a directory: give its source")
    whole = inputs.model
    kept = choose_heads(importances, whole.config, max(1, round(share * whole.config.num_heads)))
    smaller = _with(whole, *remove_heads(whole.config, whole.params, kept))
    mask = np.zeros(importances.shape, bool)
    np.put_along_axis(mask, kept, True, axis=1)
    difference, change = _compare(whole, smaller, examples, mask)
    with input_formats.open_model(inputs.source) as source_model:
        note = (
            f"{whole.config.num_heads - kept.shape[1]} of {whole.config.num_heads} heads of every layer were removed; "
            f"kept are (layers and heads from 0): {'; '.join(' '.join(map(str, heads)) for heads in kept)}."
        )
        native = source_model.model._replace(config=smaller.config, params=jax.tree.map(np.asarray, smaller.params))
        convert(
            dataclasses.replace(
                source_model, model=native, hf_model=None, optimizer_state=None, notes=(*source_model.notes, note)
            ),
            destination,
            "bert-jax",
        )
    evaluation: Evaluation = evaluate(smaller, examples, np.ones(kept.shape))
    return {
        "kept": kept,
        "loss": evaluation.loss,
        "score": evaluation.score,
        "parameters": {"whole": _size(whole), "smaller": _size(smaller)},
        "largest_logit_difference": difference,
        "largest_logit_change_by_mask": change,
        "speed": measure_speed(whole, smaller, examples),
    }


def _with(model: LoadedModel, config: ModelConfig, params: Params) -> LoadedModel:
    return LoadedModel(config, model.heads, params, model.tokenizer)


def _size(model: LoadedModel) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(model.params))


def _compare(whole: LoadedModel, smaller: LoadedModel, examples: Examples, mask: np.ndarray) -> tuple[float, float]:
    """Largest differences of logits: smaller and masked model, masked and whole model."""
    name = "mlm_logits" if examples.kind == "mlm" else "task_logits"
    edits = {CONTEXT: Edit(factor=mask.astype(np.float32)[:, None, None, :, None])}
    difference = change = 0.0
    for batch in examples.batches:
        rows, used = Batch(*batch.inputs, batch.indices), batch.indices >= 0
        masked, unmasked, pruned = (
            capture(model, rows, [name], edits=one, positions=batch.positions)[name][used]
            for model, one in ((whole, edits), (whole, None), (smaller, None))
        )
        if name == "task_logits" and masked.shape[1] > 1:  # of tokens; those of padding have no meaning
            present = batch.inputs[2][used] > 0
            masked, unmasked, pruned = masked[present], unmasked[present], pruned[present]
        assert np.abs(pruned - masked).max() <= TOLERANCE * np.abs(masked).max(), "heads were removed wrongly"
        difference = max(difference, float(np.abs(pruned - masked).max()))
        change = max(change, float(np.abs(unmasked - masked).max()))
    return difference, change


def measure_speed(whole: LoadedModel, smaller: LoadedModel, examples: Examples) -> dict[str, Any]:
    """Median milliseconds of a pass of the encoder over a batch of the longest rows, and tokens per second.

    The two models take turns, after one pass each that compiles.
    """
    inputs = examples.batches[-1].inputs
    models, times = {"whole": whole, "smaller": smaller}, {"whole": [], "smaller": []}
    for _ in range(1 + ROUNDS):
        for name, model in models.items():
            start = time.perf_counter()
            _last_states(analysis_config(model.config), model.heads, model.params, inputs).block_until_ready()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    return {
        "rows": len(inputs[0]),
        "tokens_per_row": inputs[0].shape[1],
        "device": jax.devices()[0].device_kind,
        "rounds": ROUNDS,
        "milliseconds": {name: 1000 * seconds for name, seconds in medians.items()},
        "ratio": medians["whole"] / medians["smaller"],
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _last_states(config, heads, params, inputs):
    return bert.model_from_params(config, heads, params).encoder(whole_rows(*inputs), pool=False).hidden
