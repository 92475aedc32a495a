"""`bert-jax doctor --against`: repeats the steps of a shipped reference curve and compares the metrics.

A curve holds the metrics of 200 steps of a small model on a reproducible corpus. The user chooses how the steps are
computed; the curve fixes everything that decides their results. docs/reference.md lists the measurements.
"""

import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from bert_jax import config as config_lib
from bert_jax.config import Config, presets
from bert_jax.data.mixture import CorpusWeight, open_corpora
from bert_jax.doctor.check_context import Finding, finding
from bert_jax.errors import UserError
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.json_files import read_json_as
from bert_jax.training import pretraining
from bert_jax.training.run_directory.metrics import read_metrics

Precision = Literal["float32", "bfloat16"]
CurveValues = dict[str, list[float]]
"""Metrics by name, with a value for each step or each window."""

CURVES_DIRECTORY = Path(__file__).parent / "curves"
WINDOW = 20
"""Steps per window; a run is compared with its curve by means over windows, as rounding errors of single steps grow."""
SPREAD_MARGIN = 4.0
"""A run may deviate by this multiple of the largest deviation that was measured for correct runs."""
MIN_TOLERANCE = 1e-4
"""Smallest tolerance of a window's mean, relative to the curve."""
FIRST_STEP_TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-2}
"""Tolerance of the first step, relative to the curve."""
COMMANDS = (
    "bert-data tokenizer --source reference --kind wordpiece --vocab-size 1000 --out ref/tokenizer.json",
    "bert-data build --source reference --tokenizer ref/tokenizer.json --out ref/corpus",
)
"""Commands that create the corpus."""


@dataclass(frozen=True)
class Curve:
    """A shipped curve."""

    config: dict[str, Any]
    """config of the run, as in `config.to_dict`"""
    corpus: str
    """`Corpus.identity`"""
    metrics: CurveValues
    """a value for each step"""
    spread: dict[Precision, CurveValues]
    """for each window, the largest relative deviation of its mean among correct runs"""

    def tolerances(self, metric: str, precision: Precision) -> list[float]:
        """Tolerance of each window's mean. It never decreases, because rounding errors persist."""
        largest = 0.0
        bounds = []
        for spread in self.spread[precision][metric]:
            largest = max(largest, spread)
            bounds.append(max(MIN_TOLERANCE, SPREAD_MARGIN * largest))
        return bounds


def read_curve(name: str) -> Curve:
    """Read the curve of a preset.

    Raises:
      UserError: the preset has no curve.
    """
    known = sorted(path.stem for path in CURVES_DIRECTORY.glob("*.json"))
    if name not in known:
        raise UserError(f"there is no reference curve for '{name}': --against knows {' and '.join(known)}")
    return read_json_as(CURVES_DIRECTORY / f"{name}.json", Curve, "install bert_jax again")


def train_and_compare(config: Config, parts: Sequence[CorpusWeight]) -> Iterator[Finding]:
    """Train like the curve of the config's preset, and compare: a finding for each metric.

    Raises:
      UserError: see `read_curve`, `comparison_config`, `_check_corpus` and `pretraining.pretrain`.
    """
    curve = read_curve(config.name)
    run_config = comparison_config(config, presets.load_config(config.name), curve)
    _check_corpus(parts, curve, LocalCache(config.data.cache_dir, config.data.cache_limit_gb))
    with tempfile.TemporaryDirectory(prefix="bert_jax-reference-") as directory:
        workdir = Path(directory) / "run"
        pretraining.pretrain(run_config, list(parts), workdir)
        values = metric_values(read_metrics(workdir / "metrics.jsonl"), list(curve.metrics))
    precision = _precision_of(run_config)
    yield _setup(run_config, precision)
    yield from compare(values, curve, precision)


def comparison_config(config: Config, preset: Config, curve: Curve) -> Config:
    """The curve's config with the user's mesh, attention, precision, remat and readers.

    Raises:
      UserError: the user's config changes a setting of the preset that decides the results of the steps.
    """
    reference = config_lib.from_dict(curve.config)
    given, shipped, expected = (_decisive_settings(one) for one in (config, preset, reference))
    for name in given:
        if given[name] not in (shipped.get(name), expected.get(name)):
            value = expected.get(name, shipped.get(name))
            raise UserError(
                f"{name} {given[name]}: --against compares with a run that has {value}, so leave it out; allowed are "
                "mesh, model.attention, compute_dtype, remat and scan_unroll, phases.0.accumulation and data's readers"
            )
    computed = {name: getattr(config.model, name) for name in ("attention", "compute_dtype", "remat", "scan_unroll")}
    read = {name: getattr(config.data, name) for name in config_lib.READER_FIELDS}
    phase = dataclasses.replace(reference.phases[0], accumulation=config.phases[0].accumulation)
    return config_lib.replace(reference, model=computed, data=read, phases=(phase,), mesh=config.mesh)


def _decisive_settings(config: Config) -> dict[str, Any]:
    """Settings that decide the results of the steps, except the precision, by flag."""
    flat = config_lib.flatten(config_lib.identity_fields(config))
    del flat["model.compute_dtype"]
    return flat


def _check_corpus(parts: Sequence[CorpusWeight], curve: Curve, cache: LocalCache) -> None:
    """Check that the corpus is that of the curve.

    Raises:
      UserError: another corpus, or several; the message contains the commands that create the right one.
    """
    _, corpora = open_corpora(parts, cache=cache)
    if [corpus.identity for corpus in corpora] != [curve.corpus]:
        names = ", ".join(os.fspath(corpus.directory) for corpus in corpora)
        raise UserError(
            f"corpus {names} is not the one that the curves were trained on; create it with `{COMMANDS[0]}` and "
            f"`{COMMANDS[1]}`, and give --corpus ref/corpus"
        )


def _precision_of(config: Config) -> Precision:
    """Precision of matrix products; by default accelerators round those of float32 arrays, too."""
    precise = jax.config.jax_default_matmul_precision in ("highest", "float32")
    exact = config.model.compute_dtype == "float32" and (jax.default_backend() == "cpu" or precise)
    return "float32" if exact else "bfloat16"


def _setup(config: Config, precision: Precision) -> Finding:
    devices = jax.devices()
    values = {"devices": len(devices), "kind": devices[0].device_kind, "jax": jax.__version__, "rounding": precision}
    text = f"{config.total_steps} steps of {config.name} on {len(devices)} x {values['kind']}, jax {jax.__version__}"
    if config.model.compute_dtype == precision:
        return finding("set-up", f"{text}, compared as {precision}", values)
    remedy = "this device rounds float32 products: JAX_DEFAULT_MATMUL_PRECISION=highest gives the strict comparison"
    return finding("set-up", f"{text}, compared as {precision}", values, remedy)


def metric_values(lines: Sequence[dict[str, Any]], metrics: Sequence[str]) -> CurveValues:
    """Metrics of every step, from the lines of metrics.jsonl; non-finite values become nan."""
    train = [line for line in lines if line["split"] == "train"]
    return {name: [math.nan if line[name] is None else line[name] for line in train] for name in metrics}


def compare(values: CurveValues, curve: Curve, precision: Precision) -> Iterator[Finding]:
    """A finding for the first step, and one for the windows of each metric."""
    yield _first(values, curve, FIRST_STEP_TOLERANCE[precision])
    for name, reference in curve.metrics.items():
        yield _windows(name, window_deviations(values[name], reference), curve.tolerances(name, precision))


def window_deviations(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Relative deviation of the means of all windows from those of the reference."""
    starts = range(0, len(reference), WINDOW)
    pairs = [(_mean(values[a : a + WINDOW]), _mean(reference[a : a + WINDOW])) for a in starts]
    return [abs(mean - expected) / max(abs(expected), 1e-12) for mean, expected in pairs]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _first(values: CurveValues, curve: Curve, bound: float) -> Finding:
    relative = {
        name: abs(values[name][0] - expected[0]) / max(abs(expected[0]), 1e-12)
        for name, expected in curve.metrics.items()
    }
    wrong = [name for name, deviation in relative.items() if not deviation <= bound]
    details = {"deviations": relative, "bound": bound}
    if not wrong:
        largest = max(relative, key=lambda name: relative[name])
        text = f"largest deviation {relative[largest]:.1e} ({largest}), where {bound:.0e} is allowed"
        return finding("first", text, details)
    shown = ", ".join(f"{name} {values[name][0]:.6g} instead of {curve.metrics[name][0]:.6g}" for name in wrong)
    text = (
        f"{shown}; {bound:.0e} is allowed: weights, rows, masks or the model itself differ; docs/reference.md shows "
        "the deviations of known mistakes"
    )
    return Finding("error", "first", text, details)


def _windows(name: str, relative: list[float], bounds: list[float]) -> Finding:
    details = {"deviations": relative, "bounds": bounds, "window": WINDOW}
    wrong = [i for i, (deviation, bound) in enumerate(zip(relative, bounds, strict=True)) if not deviation <= bound]
    shown = wrong[0] if wrong else max(range(len(relative)), key=lambda i: relative[i] / bounds[i])
    where = f"steps {shown * WINDOW + 1} to {(shown + 1) * WINDOW}"
    text = f"off by {100 * relative[shown]:.2g}% over {where}, where {100 * bounds[shown]:.2g}% is allowed"
    if wrong:
        later = f", and in {len(wrong) - 1} of {len(relative)} windows after it" if len(wrong) > 1 else ""
        return Finding(
            "error", name, f"{text}{later}; docs/reference.md shows the deviations of known mistakes", details
        )
    return finding(name, text, details)
