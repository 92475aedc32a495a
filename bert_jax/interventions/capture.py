"""Reads activations of a model by name, with interventions, and gradients by activations.

Names, all float32; layers count from 0:

- ``embeddings`` [B, S, H], the input of layer 0, and ``hidden_states`` [L + 1, B, S, H], embeddings first, the last
  after the final norm of models that have one;
- ``layers.3.SITE``, or ``layers.*.SITE`` with a leading axis over the layers; sites and their axes are in
  `model.activations.SITES`, e.g. ``layers.*.attention.probabilities`` [L, B, N, S, T];
- ``mlm_logits`` [B, S, V], and ``layers.*.mlm_logits`` [L + 1, B, S, V]: what the MLM head says of every hidden state;
- ``pooled`` [B, H], ``pair_logits`` [B, 2], ``task_logits`` [B, n, C].

With `positions`, logits of the MLM head are computed at these positions only.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Float
from bert_jax.config import ModelConfig
from bert_jax.convert.parity.jax_forward import whole_rows
from bert_jax.errors import UserError, did_you_mean
from bert_jax.inference.embedding import pad_rows
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.intervention import Intervention, parse_site_pattern, to_edits
from bert_jax.interventions.rows import TextBatch
from bert_jax.model import bert
from bert_jax.model.activations import REFERENCE_SITES, Edit, Edits
from bert_jax.model.heads import Heads
from bert_jax.model.layers import gather_positions

OUTPUTS = ("embeddings", "hidden_states", "mlm_logits", "layers.*.mlm_logits", "pooled", "pair_logits", "task_logits")
"""Names that are not of a layer's site."""
Activations = dict[str, np.ndarray]


def capture(
    model: LoadedModel,
    batch: TextBatch,
    names: Sequence[str],
    interventions: Sequence[Intervention] = (),
    *,
    edits: Edits | None = None,
    positions: np.ndarray | None = None,
) -> Activations:
    """Run a batch and return activations by name. Values at padding have no meaning.

    Scores and probabilities of attention are computed by the `reference` implementation, whatever the config says.

    Args:
      model: from `inference.load`.
      batch: from `rows.batches`.
      names: see the module.
      interventions: changes of activations, the first one first.
      edits: changes as arrays, for what interventions do not express; not together with interventions.
      positions: int32 [B, M], where MLM logits are computed; None: everywhere.

    Raises:
      UserError: a name that does not exist or a head that the model does not have, or a wrong intervention.
    """
    assert edits is None or not interventions
    edits = edits or _edits_of(model, batch, interventions)
    config = analysis_config(model.config, names, edits)
    sites, outputs = _split_names(names, config, model.heads)
    found = _run(config, model.heads, sites, outputs, model.params, batch[:3], edits, positions)
    return {name: np.asarray(_pick(found, name)) for name in names}


def gradients(
    model: LoadedModel,
    batch: TextBatch,
    names: Sequence[str],
    loss: Callable[[dict[str, Array], Any], Float[Array, ""]],
    loss_inputs: Any = None,
    *,
    outputs: Sequence[str] = ("mlm_logits",),
    positions: np.ndarray | None = None,
) -> tuple[Activations, Activations]:
    """Gradients of a loss by activations.

    Args:
      model: from `inference.load`.
      batch: from `rows.batches`.
      names: ``layers.3.SITE`` or ``layers.*.SITE``.
      loss: (values of `outputs` by name, loss_inputs) -> a scalar; a function of a module, because it is compiled once
        for each function object.
      loss_inputs: a tree of arrays, e.g. labels.
      outputs: what the loss reads, see the module.
      positions: as in `capture`.

    Returns:
      the activations and the gradients, both by name.

    Raises:
      UserError: as `capture`.
    """
    config = analysis_config(model.config, names, {})
    sites, _ = _split_names(names, config, model.heads)
    _, wanted = _split_names(outputs, config, model.heads)
    arguments = (model.params, batch[:3], loss_inputs, positions)
    found = _gradients(config, model.heads, sites, wanted, loss, *arguments)
    values, by_offset = ({name: np.asarray(_pick(one, name)) for name in names} for one in found)
    return values, by_offset


def analysis_config(
    config: ModelConfig, names: Sequence[str] = (), edits: Mapping[str, Edit] | None = None
) -> ModelConfig:
    """The config of analyses: float32, no dropout; attention as inference runs it, or `reference` if that is needed."""
    touched = [*names, *(edits or {})]
    needs_reference = any(name.endswith(site) for name in touched for site in REFERENCE_SITES)
    attention = "reference" if needs_reference else "deferred" if jax.default_backend() == "cpu" else "xla"
    plain = {"compute_dtype": "float32", "remat": "none", "attention": attention}
    plain["dense_dtype"] = config.inference_dense_dtype
    return dataclasses.replace(config, **plain, attention_dropout=0.0, hidden_dropout=0.0)


def _edits_of(model: LoadedModel, batch: TextBatch, interventions: Sequence[Intervention]) -> dict[str, Edit]:
    rows, length = batch.input_ids.shape
    sources = []
    for one in interventions:
        site, _ = parse_site_pattern(one.name, model.config.num_layers)
        if one.source is None:
            sources.append(None)
            continue
        if len(one.source) != rows or any(len(ids) > length for ids in one.source):
            raise UserError(
                f"intervention on {one.name}: its source has {len(one.source)} rows of up to "
                f"{max(map(len, one.source), default=0)} tokens, the batch {rows} of {length}"
            )
        name = f"layers.*.{site}"
        sources.append(capture(model, _source_batch(one.source, batch, model.tokenizer.pad_id), [name])[name])
    return to_edits(interventions, model.config, length, sources)


def _source_batch(source: Sequence[Sequence[int]], batch: TextBatch, pad_id: int) -> TextBatch:
    ids, mask = pad_rows(source, batch.input_ids.shape[1], pad_id)
    return batch._replace(input_ids=ids, attention_mask=mask)


def _split_names(names: Sequence[str], config: ModelConfig, heads: Heads) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sites and outputs that the names need, sorted, so that their order does not compile again."""
    present = {"mlm_logits": heads.mlm, "layers.*.mlm_logits": heads.mlm, "pair_logits": heads.pair}
    present |= {"pooled": heads.has_pooler, "task_logits": heads.task is not None}
    sites, outputs = set(), set()
    for name in names:
        if name in OUTPUTS:
            if not present.get(name, True):
                raise UserError(f"activation '{name}': the model has no head that computes it")
            outputs.add(name)
        elif name.startswith("layers."):
            sites.add(parse_site_pattern(name, config.num_layers)[0])
        else:
            raise UserError(f"activation '{name}' does not exist: {did_you_mean(name, OUTPUTS) or ', '.join(OUTPUTS)}")
    return tuple(sorted(sites)), tuple(sorted(outputs))


def _pick(found: dict[str, Any], name: str) -> Array:
    """The value of a name, from values by output and by ``layers.*.SITE``."""
    if name in found:
        return found[name]
    _, layer, site = name.split(".", 2)
    return found[f"layers.*.{site}"][int(layer)]


def compute(
    config: ModelConfig,
    heads: Heads,
    sites: tuple[str, ...],
    outputs: tuple[str, ...],
    params: bert.Params,
    batch: tuple[Array, Array, Array],
    edits: Edits,
    positions: Array | None = None,
    *,
    inputs_embeds: Float[Array, "B S E"] | None = None,
) -> dict[str, Array]:
    """The values of `capture` as a pure function: outputs by name, sites as ``layers.*.SITE``; jit it where it is used.

    Args:
      config: from `analysis_config`.
      heads: of the model.
      sites: keys of `model.activations.SITES`.
      outputs: some of OUTPUTS.
      params: of the model.
      batch: input ids, token types and attention mask, int32 [B, S].
      edits: changes of activations.
      positions: as in `capture`.
      inputs_embeds: replaces the word embeddings.
    """
    model, inputs = bert.model_from_params(config, heads, params), whole_rows(*map(jnp.asarray, batch))
    needs_states = not {"embeddings", "hidden_states", "layers.*.mlm_logits"}.isdisjoint(outputs)
    mixes = heads.task is not None and heads.task.mix
    with jax.default_matmul_precision("highest"):
        # The last layer is computed only where it is read. Edits may differ by position.
        only_there = positions is not None and outputs == ("mlm_logits",) and not (sites or edits or mixes)
        output = model.encoder(
            inputs,
            inputs_embeds=inputs_embeds,
            hidden_states=needs_states or mixes,
            activations=sites,
            edits=edits,
            positions=jnp.asarray(positions) if only_there else None,
            pool=not only_there,
        )
        found = {f"layers.*.{site}": value for site, value in output.activations.items()}
        if needs_states:
            found |= {"hidden_states": output.hidden_states, "embeddings": output.hidden_states[0]}
        if output.pooled is not None:
            found["pooled"] = output.pooled[:, 0]
        if "mlm_logits" in outputs:
            found["mlm_logits"] = _mlm_logits(model, output.hidden, None if only_there else positions)
        if "layers.*.mlm_logits" in outputs:
            found["layers.*.mlm_logits"] = jax.vmap(lambda state: _mlm_logits(model, state, positions))(
                _normalised_states(model, output.hidden_states)
            )
        if "pair_logits" in outputs:
            found["pair_logits"] = model.pair(output.pooled)[:, 0]
        if "task_logits" in outputs:
            found["task_logits"] = model.task_logits(inputs, model.task_view(inputs, output))
    wanted = {*outputs, *(f"layers.*.{site}" for site in sites)}
    return {name: value.astype(jnp.float32) for name, value in found.items() if name in wanted}


def _normalised_states(model: bert.BertModel, states: Float[Array, "L1 B S H"]) -> Float[Array, "L1 B S H"]:
    """Hidden states as the MLM head reads the last one; the last one has had its final norm."""
    if model.encoder.final_norm is None:
        return states
    return model.encoder.final_norm(states).at[-1].set(states[-1])


def _mlm_logits(model: bert.BertModel, hidden: Float[Array, "B S H"], positions: Array | None) -> Float[Array, "B n V"]:
    if positions is not None:
        hidden = gather_positions(hidden, jnp.asarray(positions))
    return model.mlm(hidden, model.encoder.embeddings.decoder_table())


_run = functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))(compute)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _gradients(config, heads, sites, outputs, loss, params, batch, loss_inputs, positions):
    def run(offsets):
        edits = {site: Edit(offset=offset) for site, offset in offsets.items()}
        found = compute(config, heads, sites, outputs, params, batch, edits, positions)
        return loss(found, loss_inputs), found

    shapes = jax.eval_shape(lambda: compute(config, heads, sites, (), params, batch, {}))
    zeros = {site: jnp.zeros(shapes[f"layers.*.{site}"].shape) for site in sites}
    (_, found), gradient = jax.value_and_grad(run, has_aux=True)(zeros)
    return found, {f"layers.*.{site}": value for site, value in gradient.items()}
