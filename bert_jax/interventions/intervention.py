"""Interventions: changes of a model's activations as plain data that can be saved beside a result."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError, did_you_mean
from bert_jax.field_validation import from_json
from bert_jax.model.activations import SITES, Edit


@dataclass(frozen=True)
class Intervention:
    """A linear change of a part of an activation: value * factor + add.

    The whole activation is changed, or only some heads and positions of it.
    ``Intervention("layers.3.attention.context", heads=(2,))`` removes a head; with `source`, activations of another
    input replace those of the batch (patching).
    """

    name: str
    """``layers.3.SITE``, or ``layers.*.SITE`` for all layers; layers count from 0, sites are those of
    `model.activations.SITES`."""
    heads: tuple[int, ...] | None = None
    """None: all."""
    positions: tuple[int, ...] | None = None
    """Tokens, [CLS] is 0; of scores and probabilities, the queries. None: all."""
    keys: tuple[int, ...] | None = None
    """Of scores and probabilities, the positions of the keys. None: all."""
    factor: float = 0.0
    """1.0 keeps the value, 0.0 removes it."""
    add: float = 0.0
    """Added everywhere in the changed part."""
    source: tuple[tuple[int, ...], ...] | None = None
    """Input ids of other rows, as many and as long as those of the batch: their activations are added. None: nothing
    is."""


def parse_site_pattern(name: str, num_layers: int) -> tuple[str, int | None]:
    """Site and layer of a name such as ``layers.3.attention.context``; None for all layers.

    Raises:
      UserError: there is no such layer or site.
    """
    prefix, _, rest = name.partition(".")
    layer, _, site = rest.partition(".")
    if prefix != "layers" or not (layer == "*" or layer.isdecimal()):
        raise UserError(f"activation '{name}': write layers.N.SITE, as in layers.0.attention.context, or layers.*.SITE")
    if site not in SITES:
        hint = did_you_mean(site, SITES) or f"there are {', '.join(SITES)}"
        raise UserError(f"activation '{name}': no site '{site}'; {hint}")
    if layer != "*" and int(layer) >= num_layers:
        raise UserError(f"activation '{name}': the model has layers 0 to {num_layers - 1}")
    return site, None if layer == "*" else int(layer)


def to_edits(
    interventions: Sequence[Intervention], config: ModelConfig, length: int, sources: Sequence[np.ndarray | None] = ()
) -> dict[str, Edit]:
    """The edits of the encoder that carry out interventions, the first one first.

    Args:
      interventions: any number, also of one site.
      config: of the model.
      length: S of the batch.
      sources: for each intervention the activations that it adds, [L, ...], or None.

    Raises:
      UserError: a name, head or position that does not exist.
    """
    edits: dict[str, Edit] = {}
    for i, one in enumerate(interventions):
        site, layer = parse_site_pattern(one.name, config.num_layers)
        chosen = _chosen(one, site, layer, config, length)
        source = sources[i] if sources else None
        factor = np.where(chosen, np.float32(one.factor), np.float32(1))
        offset = np.where(chosen, np.float32(one.add) + (0 if source is None else source), np.float32(0))
        if site in edits:
            factor, offset = edits[site].factor * factor, edits[site].offset * factor + offset
        edits[site] = Edit(factor.astype(np.float32), offset.astype(np.float32))
    return edits


def _chosen(one: Intervention, site: str, layer: int | None, config: ModelConfig, length: int) -> np.ndarray:
    """Where an intervention changes an activation: [L, ...], of size 1 along axes that it does not select from."""
    axes = SITES[site].split()
    chosen = np.ones((1,) * (1 + len(axes)), bool)
    selections = [("layer", 0, config.num_layers, None if layer is None else (layer,))]
    for what, axis, size, wanted in (
        ("head", "N", config.num_heads, one.heads),
        ("position", "S", length, one.positions),
        ("key", "T", length, one.keys),
    ):
        if wanted is not None and axis not in axes:
            raise UserError(f"intervention on {one.name}: it has no axis of {what}s; leave {what}s out")
        selections.append((what, 1 + axes.index(axis) if axis in axes else 0, size, wanted))
    for what, axis, size, wanted in selections:
        if wanted is None:
            continue
        if not wanted or not all(0 <= i < size for i in wanted):
            raise UserError(f"intervention on {one.name}: {what}s {list(wanted)} are not from 0 to {size - 1}")
        along = np.zeros(size, bool)
        along[list(wanted)] = True
        chosen = chosen & along.reshape([size if i == axis else 1 for i in range(chosen.ndim)])
    # The scan over the layers slices the leading axis.
    return np.broadcast_to(chosen, (config.num_layers, *chosen.shape[1:]))


def to_json(interventions: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Plain values, without fields that have their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Intervention)}
    plain = [json.loads(json.dumps(dataclasses.asdict(one))) for one in interventions]
    return [{name: value for name, value in one.items() if value != defaults[name]} for one in plain]


def read_json(values: list[dict[str, Any]]) -> list[Intervention]:
    """The interventions of `to_json`.

    Raises:
      UserError: an unknown field, or a value of another type.
    """
    return [from_json(Intervention, value, "intervention") for value in values]
