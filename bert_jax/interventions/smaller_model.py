"""A model without some heads and feed-forward units: smaller parameters that compute what the masked model computes.

Every layer keeps the same numbers, because a layer's parameters are stacked with those of the others. Shapes: L layers,
n heads or units of a layer, K of them that are kept.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bert_jax.array_types import Bool, Int
from bert_jax.config import ModelConfig
from bert_jax.convert.conversion import convert
from bert_jax.convert.formats import input_formats
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import analysis_config, capture
from bert_jax.interventions.pruning_masks import ACTIVATIONS, CONTEXT, Evaluation, Examples, evaluate, mask_edits
from bert_jax.interventions.rows import TextBatch
from bert_jax.model import bert
from bert_jax.model.activations import Edits
from bert_jax.model.layer_plan import parameter_groups
from bert_jax.storage.paths import StoredPath
from bert_jax.training.param_paths import map_with_paths
from bert_jax.training.task import Params

Kept = Mapping[str, Int[np.ndarray, "L K"]]
"""What every layer keeps by site, ascending: heads (CONTEXT) or units (ACTIVATIONS); all where a site is missing."""
ROUNDS = 15
"""Timed passes of each model, one after the other in turn."""
COMPARED_BATCHES = 16
"""Batches on which logits are compared, at most: of all lengths."""
TOLERANCE = 1e-5
"""Of the logits, absolute up to 1 and relative to the largest one above: float32 sums in another order."""
AXES = {
    CONTEXT: {"qkv/kernel": 3, "qkv/bias": 2, "attention_out/kernel": 1}
    | {"query_key/kernel": 3, "query_key/bias": 2, "value/kernel": 2, "value/bias": 1},
    ACTIVATIONS: {"up/kernel": 2, "up/bias": 1, "gate/kernel": 2, "gate/bias": 1, "down/kernel": 1},
}
"""By site, the axis over its heads or units of the parameters of the layers that have one."""


def heads_and_units(config: ModelConfig) -> dict[str, int]:
    """Heads and units of a layer, by site."""
    return {CONTEXT: config.num_heads, ACTIVATIONS: config.intermediate_size}


def mask_of(kept: Int[np.ndarray, "L K"], size: int) -> Bool[np.ndarray, "L n"]:
    """The mask of what is kept, of `size` heads or units in a layer."""
    mask = np.zeros((len(kept), size), bool)
    np.put_along_axis(mask, kept, True, axis=1)
    return mask


def remove(config: ModelConfig, params: Params, kept: Kept) -> tuple[ModelConfig, Params]:
    """The config and NumPy parameters of the model without the other heads and units; layers with shared parameters
    keep the same ones.
    """
    groups = parameter_groups(config)
    first = [groups.index(group) for group in range(len(set(groups)))]
    axes = {
        f"encoder/layers/{end}": (axis, chosen[first])
        for site, chosen in kept.items()
        for end, axis in AXES[site].items()
    }

    def take(path: str, leaf: Any) -> np.ndarray:
        if path not in axes:
            return np.asarray(leaf)
        axis, by_group = axes[path]
        indices = by_group.reshape([len(by_group) if i == 0 else -1 if i == axis else 1 for i in range(leaf.ndim)])
        return np.take_along_axis(np.asarray(leaf), indices, axis)

    changes: dict[str, Any] = {}
    if CONTEXT in kept:
        changes = {"num_heads": kept[CONTEXT].shape[1], "head_size": config.size_per_head, "attention": "reference"}
    if ACTIVATIONS in kept:
        changes["intermediate_size"] = kept[ACTIVATIONS].shape[1]
    return dataclasses.replace(config, **changes), map_with_paths(take, params)


def write_smaller(
    whole: LoadedModel, source: StoredPath, examples: Examples, kept: Kept, destination: StoredPath
) -> dict[str, Any]:
    """Write the model without the other heads and units, and compare it with the masked and the whole model.

    Args:
      whole: the model.
      source: what it was read from, whose tokenizer and settings are written too.
      examples: on which the models are compared.
      kept: heads and units.
      destination: the directory to create.

    Returns:
      plain values: loss and score of the smaller model, parameters and milliseconds of both, differences of logits.

    Raises:
      UserError: the destination exists or cannot be written.
    """
    smaller = _with(whole, *remove(whole.config, whole.params, kept))
    masks = {site: mask_of(chosen, heads_and_units(whole.config)[site]) for site, chosen in kept.items()}
    difference, change = _compare(whole, smaller, examples, mask_edits(masks))
    evaluation: Evaluation = evaluate(smaller, examples, {})
    speed = measure_speed(whole, smaller, examples)
    with input_formats.open_model(source) as source_model:
        native = source_model.model._replace(config=smaller.config, params=jax.tree.map(np.asarray, smaller.params))
        notes = (*source_model.notes, *_notes(whole.config, kept))
        smaller_source = dataclasses.replace(
            source_model, model=native, hf_model=None, optimizer_state=None, notes=notes
        )
        convert(smaller_source, destination, "bert-jax")
    return {
        "loss": evaluation.loss,
        "score": evaluation.score,
        "parameters": {"whole": _size(whole), "smaller": _size(smaller)},
        "largest_logit_difference": difference,
        "largest_logit_change_by_mask": change,
        "speed": speed,
    }


def _notes(config: ModelConfig, kept: Kept) -> list[str]:
    """Sentences for the model card."""
    notes = []
    if CONTEXT in kept:
        heads = kept[CONTEXT]
        notes.append(
            f"{config.num_heads - heads.shape[1]} of {config.num_heads} heads of every layer were removed; kept are "
            f"(layers and heads from 0): {'; '.join(' '.join(map(str, one)) for one in heads)}."
        )
    if ACTIVATIONS in kept:
        units = config.intermediate_size
        notes.append(
            f"{units - kept[ACTIVATIONS].shape[1]:,} of {units:,} units of every feed-forward layer were removed."
        )
    return notes


def _with(model: LoadedModel, config: ModelConfig, params: Params) -> LoadedModel:
    return LoadedModel(config, model.heads, params, model.tokenizer)


def _size(model: LoadedModel) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(model.params))


def _compare(whole: LoadedModel, smaller: LoadedModel, examples: Examples, edits: Edits) -> tuple[float, float]:
    """Largest differences of logits: smaller and masked model, masked and whole model."""
    name = "mlm_logits" if examples.kind == "mlm" else "task_logits"
    difference = change = 0.0
    for batch in examples.batches[:: -(-len(examples.batches) // COMPARED_BATCHES)]:
        rows, used = TextBatch(*batch.inputs, batch.indices), batch.indices >= 0
        masked, unmasked, pruned = (
            capture(model, rows, [name], edits=one, positions=batch.positions)[name][used]
            for model, one in ((whole, edits), (whole, None), (smaller, None))
        )
        if name == "task_logits" and masked.shape[1] > 1:  # of tokens; those of padding have no meaning
            present = batch.inputs[2][used] > 0
            masked, unmasked, pruned = masked[present], unmasked[present], pruned[present]
        here = float(np.abs(pruned - masked).max())
        assert here <= TOLERANCE * max(1.0, np.abs(masked).max()), f"logits differ by {here:.1e} from the masked model"
        difference = max(difference, here)
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
