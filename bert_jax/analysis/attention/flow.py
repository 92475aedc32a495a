"""Which tokens contribute to which, by attention weights, norms and value zeroing, and how far these agree, on text."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.attention import mixing
from bert_jax.analysis.attention.maps import PROBABILITIES, token_kinds
from bert_jax.analysis.attention.value_zeroing import value_zeroing_distances
from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.array_types import Float
from bert_jax.command.progress import progress_bar
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches
from bert_jax.model.layer_plan import NormPlacement, layer_plans, parameter_groups

VALUE, OUTPUT = "layers.*.attention.value", "layers.*.attention.output"
LAST = "attention, last layer"
LEAST_TOKENS = 4
"""Special ones included: with fewer, a query has too few other tokens to rank."""


class Contributions(NamedTuple):
    """Of each key to each query of a text, by layer, [L, n, n]; rows sum to 1."""

    attention: np.ndarray
    """Mean over heads."""
    norms: np.ndarray
    """Of alpha f(x) summed over heads (Kobayashi et al. 2020)."""
    residual_norms: np.ndarray
    """With residual connection and LayerNorm (Kobayashi et al. 2021)."""
    value_zeroing: np.ndarray

    @property
    def rollouts(self) -> dict[str, np.ndarray]:
        """Of all layers, [n, n], by name, and the attention of the last layer alone.

        The norms are those with residual. They and value zeroing include the residual connection, so only attention
        gets one added.
        """
        return {
            LAST: self.attention[-1],
            "rollout: attention": mixing.rollout(mixing.with_residual(self.attention))[-1],
            "rollout: norms": mixing.rollout(self.residual_norms)[-1],
            "rollout: value zeroing": mixing.rollout(self.value_zeroing)[-1],
        }


def text_contributions(
    model: LoadedModel, rows: Sequence[TextRow], *, progress: bool = False
) -> Iterator[tuple[int, Contributions]]:
    """The contributions in each row, with its index, shortest rows first.

    Args:
      model: from `inference.load`.
      rows: of texts; a row of n tokens costs about n forward passes.
      progress: show a progress bar on stderr.
    """
    with progress_bar("value zeroing", len(rows), "text", shown=progress) as bar:
        # Value zeroing runs many passes of one batch, so small batches use the machine as well as large ones.
        for batch in batches(rows, model.tokenizer.pad_id, 512):
            found = capture(model, batch, [PROBABILITIES, VALUE, OUTPUT, "hidden_states"])
            zeroed = value_zeroing_distances(model, batch)
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                n = int(batch.lengths[b])
                attention = found[PROBABILITIES][:, b, :, :n, :n]
                arrays = (found[name][:, b, :n] for name in (VALUE, OUTPUT, "hidden_states"))
                norms, residual_norms = layer_norms(model, attention, *arrays)
                measures = (attention.mean(1), norms, residual_norms, zeroed[:, b, :n, :n])
                yield int(index), Contributions(*map(mixing.normalised_rows, measures))
                bar.update(1)


def layer_norms(
    model: LoadedModel, attention: np.ndarray, value: np.ndarray, output: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Norm-weighted attention of every layer of a text, without and with residual connection and LayerNorm.

    Layers that normalise before the attention have no LayerNorm after the residual connection: there the second has the
    residual connection only. Adapters are not taken into account.

    Args:
      model: that computed the rest.
      attention: probabilities [L, N, n, n].
      value: [L, n, N, D].
      output: of the attention, [L, n, H].
      hidden: states [L + 1, n, H].

    Returns:
      norms [L, n, n] of both.
    """
    layers = model.params["encoder"]["layers"]
    without, with_residual = [], []
    for layer, (plan, group) in enumerate(zip(layer_plans(model.config), parameter_groups(model.config), strict=True)):
        kernel = np.asarray(layers["attention_out"]["kernel"][group], np.float32)
        transformed = mixing.transformed_values(value[layer], kernel)
        vectors = mixing.attended_vectors(attention[layer], transformed)
        total = mixing.add_residual(vectors, hidden[layer])
        if plan.norm_placement is NormPlacement.POST:
            scale = np.asarray(layers["attention_norm"]["scale"][group], np.float32)
            sums = hidden[layer] + output[layer]
            total = mixing.normalise_vectors(total, sums, scale, model.config.norm_epsilon)
        without.append(np.linalg.norm(vectors, axis=-1))
        with_residual.append(np.linalg.norm(total, axis=-1))
    return np.stack(without), np.stack(with_residual)


class Flow(NamedTuple):
    """Agreements and the shares of special tokens in every text; NaN where there is none."""

    agreement: dict[str, Float[np.ndarray, "texts L"]]
    """With value zeroing, by measure."""
    special: dict[str, Float[np.ndarray, "texts L"]]
    """Share of special tokens, by measure."""
    rollouts: list[str]
    rollout_agreement: Float[np.ndarray, "texts r r"]

    @property
    def summary(self) -> dict[str, Any]:
        """Means over texts with their intervals, as plain values."""
        rollouts = bootstrap_mean(np.moveaxis(self.rollout_agreement, 0, -1))
        return {
            "agreement_with_value_zeroing": {
                name: bootstrap_mean(values.T)._asdict() for name, values in self.agreement.items()
            },
            "share_on_special": {name: bootstrap_mean(values.T)._asdict() for name, values in self.special.items()},
            "rollouts": self.rollouts,
            "rollout_agreement": rollouts.value,
            "rollout_agreement_half_width": rollouts.half_width,
        }


def measure_flow(model: LoadedModel, rows: Sequence[TextRow], *, progress: bool = False) -> Flow:
    """Agreements and shares of every text.

    Args:
      model: from `inference.load`.
      rows: of at least LEAST_TOKENS tokens.
      progress: show a progress bar on stderr.
    """
    measures, layers = Contributions._fields, model.config.num_layers
    agreement, special = ({name: np.full((len(rows), layers), np.nan) for name in measures} for _ in range(2))
    del agreement["value_zeroing"]
    matrices: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for index, found in text_contributions(model, rows, progress=progress):
        kinds = token_kinds(rows[index], model.tokenizer)
        for name in agreement:
            agreement[name][index] = mixing.rank_agreement(getattr(found, name), found.value_zeroing)
        for name, shares in found._asdict().items():
            special[name][index] = shares[..., kinds.special].sum(-1).mean(-1)
        rolled = found.rollouts
        stacked = np.stack(list(rolled.values()))
        matrices[index] = mixing.rank_agreement(stacked[:, None], stacked[None])
    return Flow(agreement, special, list(rolled), np.stack(matrices))
