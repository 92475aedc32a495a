"""The page of an analysis: what was analysed, a section per suite, and curves over the checkpoints."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict

from bert_jax import provenance
from bert_jax.analysis.item_scores import uncertainty_blocks
from bert_jax.analysis.result_files import ResultFile
from bert_jax.analysis.suite import UNCERTAINTY, Suite, SuiteResult
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.report import Curves, Note, ReportBlock, Section, Series, Table
from bert_jax.report.cells import make_table


class CheckpointResults(NamedTuple):
    """Results of one checkpoint, by suite."""

    step: int | None
    """Of the checkpoint; None: a model that is no run."""
    files: Mapping[str, ResultFile]


def sections(
    title: str,
    model: LoadedModel,
    suites: Sequence[Suite],
    points: Sequence[CheckpointResults],
    left_out: Mapping[str, str],
) -> list[Section]:
    """The sections of the page.

    Args:
      title: of the page.
      model: the newest one.
      suites: that were run.
      points: results by checkpoint, ascending; the last one is shown in full.
      left_out: why a suite was left out, by its name.
    """
    newest = points[-1]
    blocks: list[ReportBlock] = [_model_table(model, newest)]
    blocks += [Note(f"{name} was left out: {why}") for name, why in left_out.items()]
    blocks += [_cost_table(suites, newest)]
    about = [Section(suite.name, _blocks(suite, newest.files[suite.name]["result"])) for suite in suites]
    bands = Note(
        "Bands: 95 % over the items of the tests, of centres of gravity over the seeds of probes; another seed of "
        "pretraining can change more."
    )
    over_time = (
        [Section("over the checkpoints", (bands, *_emergence_curves(suites, points)))] if len(points) > 1 else []
    )
    made = provenance.sections({suite.name: newest.files[suite.name]["provenance"] for suite in suites})
    return [Section(title, tuple(blocks), level=1), *over_time, *about, *made]


def _blocks(suite: Suite, result: SuiteResult) -> tuple[ReportBlock, ...]:
    uncertain = uncertainty_blocks(result[UNCERTAINTY]) if UNCERTAINTY in result else ()
    return (*uncertain, *suite.blocks(result))


class Emergence(TypedDict):
    """A number over checkpoints, by step; steps at which it is undefined are left out."""

    values: dict[int, float]
    baselines: dict[str, dict[int, float]]
    """What it is compared with, by name."""
    intervals: dict[int, tuple[float, float]]
    """Of 95 %; NaN at steps without one."""


def emergence(suites: Sequence[Suite], points: Sequence[CheckpointResults]) -> dict[str, dict[str, Emergence]]:
    """Numbers over checkpoints, by suite and name."""
    curves: dict[str, dict[str, Emergence]] = {}
    for suite in suites:
        curves[suite.name] = {}
        for point in points:
            for name, scalar in suite.scalars(point.files[suite.name]["result"]).items():
                curve = curves[suite.name].setdefault(name, Emergence(values={}, baselines={}, intervals={}))
                _put(curve["values"], point.step, scalar.value)
                curve["intervals"][point.step] = scalar.interval or (math.nan, math.nan)
                for baseline, value in scalar.baselines.items():
                    _put(curve["baselines"].setdefault(baseline, {}), point.step, value)
    return curves


def flatten_baselines(curves: Mapping[str, Mapping[str, Emergence]]) -> dict[str, dict[str, dict[int, float]]]:
    """Values by suite, name and step; names of baselines are NAME (BASELINE)."""
    flat: dict[str, dict[str, dict[int, float]]] = {}
    for suite, by_name in curves.items():
        flat[suite] = {name: curve["values"] for name, curve in by_name.items()}
        flat[suite] |= {
            f"{name} ({baseline})": by_step
            for name, curve in by_name.items()
            for baseline, by_step in curve["baselines"].items()
        }
    return flat


def _put(by_step: dict[int, float], step: int, value: float) -> None:
    if math.isfinite(value):
        by_step[step] = float(value)


def _emergence_curves(suites: Sequence[Suite], points: Sequence[CheckpointResults]) -> Iterator[ReportBlock]:
    """A figure for each number that a checkpoint has, with a band of its intervals, and its baselines dashed."""
    for suite, curves in emergence(suites, points).items():
        for name, curve in curves.items():
            if not curve["values"]:
                continue
            steps, values = zip(*curve["values"].items(), strict=True)
            low, high = zip(*(curve["intervals"][step] for step in steps), strict=True)
            ends = (low, high) if any(map(math.isfinite, low)) else ()
            series = [Series("model", tuple(map(float, steps)), values, *ends)]
            series += [
                Series(line, tuple(map(float, by_step)), tuple(by_step.values()), dashed=True)
                for line, by_step in curve["baselines"].items()
                if by_step
            ]
            yield Curves(f"{suite}: {name}", tuple(series), "step")


def _model_table(model: LoadedModel, point: CheckpointResults) -> Table:
    config = model.config
    heads = model.heads
    named = [name for name, present in (("MLM", heads.mlm), ("sentence pair", heads.pair)) if present]
    named += [heads.task.kind] if heads.task else []
    rows = [
        ("layers", str(config.num_layers)),
        ("heads of a layer", str(config.num_heads)),
        ("hidden size", str(config.hidden_size)),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("heads on top", ", ".join(named) or "none"),
        *([("checkpoint", f"step {point.step:,}")] if point.step is not None else []),
    ]
    return Table(("", "model"), tuple(rows), words=True)


def _cost_table(suites: Sequence[Suite], point: CheckpointResults) -> Table:
    """Time and memory of each suite."""
    columns = {"suite": "{suite}", "seconds": "{seconds:.1f}", "peak memory (MB)": "{peak_memory_mb:,}"}
    rows = [{"suite": suite.name, **point.files[suite.name]} for suite in suites]
    return make_table(rows, columns | {"seed": "{request[seed]}"})
