"""Held-out loss by tokens, of the checkpoints that a study's runs have kept, and two numbers of a curve to compare."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from bert_jax.experiments.budget import Cell
from bert_jax.experiments.cell_records import CurvePoint, Records, RunRecord
from bert_jax.experiments.study import AREA, TOKENS_TO_LOSS, Study


class CurveScale(TypedDict):
    """What the curves of all runs of a study are measured by."""

    target_loss: float | None
    """Of `TOKENS_TO_LOSS`, in nats; None: it is not stated, and no run of the baseline has a curve."""
    first_tokens: int
    """Where the interval of `AREA` begins: the latest first checkpoint of a run, in positions of rows."""
    last_tokens: int
    """Where it ends: the earliest last checkpoint."""


class ScoredRecord(RunRecord):
    """The record of a run, with the metrics of its curve."""

    reached_loss: bool | None
    """Whether the curve reaches the target loss; None: the run has no curve."""


ScoredRecords = dict[str, Sequence[ScoredRecord | None]]


def score_curves(study: Study, cells: list[Cell], records: Records) -> tuple[ScoredRecords, CurveScale | None]:
    """The records with the metrics of `CURVE_METRICS` that their cells have.

    Args:
      study: the study.
      cells: all of its cells, the baseline first.
      records: of all runs.

    Returns:
      the records, and
      the scale of all curves; None: no run has a curve.
    """
    curves = [record["curve"] for of_cell in records.values() for record in of_cell if record and record["curve"]]
    scale = None
    if curves:
        of_baseline = [one["curve"][-1]["mlm_loss"] for one in records[cells[0].name] if one and one["curve"]]
        scale = CurveScale(
            target_loss=max(of_baseline, default=None) if study.target_loss is None else study.target_loss,
            first_tokens=max(curve[0]["tokens"] for curve in curves),
            last_tokens=min(curve[-1]["tokens"] for curve in curves),
        )
    scored = {cell.name: [one and _scored(one, cell, scale) for one in records[cell.name]] for cell in cells}
    return scored, scale


def _scored(record: RunRecord, cell: Cell, scale: CurveScale | None) -> ScoredRecord:
    curve, metrics, reached = record["curve"], dict(record["metrics"]), None
    if curve and scale is not None:
        if AREA in cell.metrics and scale["first_tokens"] < scale["last_tokens"]:
            metrics[AREA] = mean_loss(curve, scale["first_tokens"], scale["last_tokens"])
        if (target := scale["target_loss"]) is not None:
            tokens = tokens_to_loss(curve, target)
            reached = tokens is not None
            if TOKENS_TO_LOSS in cell.metrics:
                metrics[TOKENS_TO_LOSS] = float(curve[-1]["tokens"]) if tokens is None else tokens
    return ScoredRecord(**(record | {"metrics": metrics}), reached_loss=reached)


def mean_loss(curve: Sequence[CurvePoint], first: float, last: float) -> float:
    """Mean loss over the tokens of an interval in which the curve has checkpoints: the area under it, by the width."""
    tokens, losses = (np.array([point[name] for point in curve], np.float64) for name in ("tokens", "mlm_loss"))
    inside = np.concatenate([[first], tokens[(tokens > first) & (tokens < last)], [last]])
    return float(np.trapezoid(np.interp(inside, tokens, losses), inside) / (last - first))


def tokens_to_loss(curve: Sequence[CurvePoint], target: float) -> float | None:
    """Tokens after which the loss is first at most the target, linear between checkpoints.

    None: it never is. A first checkpoint below the target counts with its own tokens, which are then an upper limit.
    """
    for before, point in zip([None, *curve], curve, strict=False):
        if point["mlm_loss"] > target:
            continue
        if before is None:
            return float(point["tokens"])
        share = (before["mlm_loss"] - target) / (before["mlm_loss"] - point["mlm_loss"])
        return before["tokens"] + share * (point["tokens"] - before["tokens"])
    return None
