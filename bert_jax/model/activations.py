"""Names of a layer's activations, and how they are recorded and edited while the layer runs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from bert_jax.array_types import Array, Float

SITES = {
    "attention.query": "B S N D",
    "attention.key": "B S N D",
    "attention.value": "B S N D",
    "attention.scores": "B N S T",
    "attention.probabilities": "B N S T",
    "attention.context": "B S N D",
    "attention.output": "B S C",
    "feed_forward.activations": "B S F",
    "feed_forward.output": "B S C",
    "hidden": "B S H",
}
"""Axes of the activations of one layer, in the order of computation.

query and key are after rotary embedding; scores are scaled and not yet masked; probabilities are before dropout;
context is what a head sends to the output projection; the two outputs are before dropout and the residual connection;
hidden is what the layer returns. C is the width inside a layer, H unless the layer has a bottleneck. The sites of the
feed-forward are those of the last of several networks.
"""
REFERENCE_SITES = ("attention.scores", "attention.probabilities")
"""Only the `reference` attention computes these."""
PROJECTION_SITES = ("attention.query", "attention.key", "attention.value")


class Edit(NamedTuple):
    """A linear change of an activation: value * factor + offset; None for 1 and 0.

    Both have a leading axis over the layers, [L ...], and broadcast against the rest of the activation. A head mask is
    a factor of `attention.context`, [L, 1, 1, N, 1] (Michel et al. 2019); a patch is a factor of 0 where the offset
    has other values; the gradient by an offset of zeros is that by the activation.
    """

    factor: Float[Array, "L ..."] | None = None
    offset: Float[Array, "L ..."] | None = None


Edits = Mapping[str, Edit]
"""Edits by site."""


class LayerTap:
    """Records and edits the activations of one layer: the layer calls it with every activation that it computes."""

    def __init__(self, sites: Sequence[str] = (), edits: Edits | None = None):
        """Start without records.

        Args:
          sites: names of the activations to record, keys of SITES.
          edits: by site, without the axis over layers.
        """
        self.sites, self.edits = sites, edits or {}
        self.recorded: dict[str, Array] = {}

    def touches(self, sites: Sequence[str]) -> bool:
        """Whether one of the sites is recorded or edited."""
        return any(site in self.sites or site in self.edits for site in sites)

    def __call__(self, site: str, value: Float[Array, "..."]) -> Float[Array, "..."]:
        """The value, edited; it is recorded after the edit."""
        if site in self.edits:
            edit = self.edits[site]
            if edit.factor is not None:
                value = value * edit.factor.astype(value.dtype)
            if edit.offset is not None:
                value = value + jnp.asarray(edit.offset, value.dtype)
        if site in self.sites:
            self.recorded[site] = value
        return value
