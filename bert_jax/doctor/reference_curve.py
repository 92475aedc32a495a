"""`bert-jax doctor --against`: run the updates of a shipped curve and compare.

A curve holds the metrics of 200 updates of a small model on a corpus that anybody can make. How to compute is the
user's; what decides the updates is the curve's. docs/reference.md has what was measured.
"""

import dataclasses
import json
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
from bert_jax.data.mixture_spec import Part, opened
from bert_jax.doctor.finding import Finding
from bert_jax.errors import UserError
from bert_jax.training import pretraining
from bert_jax.training.run_directory.metrics import read_metrics

Precision = Literal["float32", "bfloat16"]
Values = dict[str, list[float]]
"""Metrics, a value for each update or each window."""

CURVES_DIRECTORY = Path(__file__).parent / "curves"
WINDOW = 20
"""Updates over whose mean a run and its curve are compared: rounding grows from update to update, means less so."""
SPREAD_MARGIN = 4.0
"""A run may lie so many times farther from the curve than the farthest right one that was measured."""
MIN_TOLERANCE = 1e-4
"""What a mean may always be off, relative to the curve."""
FIRST_STEP_TOLERANCE: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 1e-2}
"""What the first update may be off, relative to the curve."""
COMMANDS = (
    "bert-data tokenizer --source reference --kind wordpiece --vocab-size 1000 --out ref/tokenizer.json",
    "bert-data build --source reference --tokenizer ref/tokenizer.json --out ref/corpus",
)
"""How the corpus is made."""


@dataclass(frozen=True)
class Curve:
    """A shipped curve."""

    config: dict[str, Any]
    """of the run, as `config.to_dict` makes it"""
    corpus: str
    """`Corpus.identity`"""
    metrics: Values
    """a value for each update"""
    spread: dict[Precision, Values]
    """for each window, how far the means of right runs lay from the curve's, relative to it, at most"""

    def bounds(self, metric: str, precision: Precision) -> list[float]:
        """What each window's mean may be off. It never falls: what rounding has moved does not come back."""
        farthest = 0.0
        bounds = []
        for spread in self.spread[precision][metric]:
            farthest = max(farthest, spread)
            bounds.append(max(MIN_TOLERANCE, SPREAD_MARGIN * farthest))
        return bounds


def read_curve(name: str) -> Curve:
    """The curve of a preset.

    Raises:
      UserError: it has none.
    """
    known = sorted(path.stem for path in CURVES_DIRECTORY.glob("*.json"))
    if name not in known:
        raise UserError(f"there is no reference curve for '{name}': --against knows {' and '.join(known)}")
    return Curve(**json.loads((CURVES_DIRECTORY / f"{name}.json").read_text()))


def compare_with_curve(config: Config, parts: Sequence[Part]) -> Iterator[Finding]:
    """Train as the curve of the config's preset was trained, and compare: a line for each metric.

    Raises:
      UserError: see `read_curve`, `reference_config`, `check_corpus` and `pretraining.pretrain`.
    """
    curve = read_curve(config.name)
    asked = reference_config(config, presets.load_config(config.name), curve)
    check_corpus(parts, curve)
    with tempfile.TemporaryDirectory(prefix="bert_jax-reference-") as directory:
        workdir = Path(directory) / "run"
        pretraining.pretrain(asked, list(parts), workdir)
        values = metric_values(read_metrics(workdir / "metrics.jsonl"), list(curve.metrics))
    precision = precision_of(asked)
    yield _setup(asked, precision)
    yield from compare(values, curve, precision)


def reference_config(config: Config, preset: Config, curve: Curve) -> Config:
    """The curve's config, computed as the user's says: mesh, attention, precision, memory, readers.

    Raises:
      UserError: the user's sets anything that decides the updates; what it leaves as the preset has it does not count.
    """
    reference = config_lib.from_dict(curve.config)
    asked, shipped, wanted = (_decisive_settings(one) for one in (config, preset, reference))
    for name in asked:
        if asked[name] not in (shipped.get(name), wanted.get(name)):
            shown = wanted.get(name, shipped.get(name))
            raise UserError(
                f"{name} {asked[name]}: --against compares with a run that has {shown}, so leave it out; free are the "
                "mesh, model.attention, compute_dtype, remat and scan_unroll, phases.0.accumulation and data's readers"
            )
    computed = {name: getattr(config.model, name) for name in ("attention", "compute_dtype", "remat", "scan_unroll")}
    read = {name: getattr(config.data, name) for name in ("verify", "reader_processes", "prefetch")}
    phase = dataclasses.replace(reference.phases[0], accumulation=config.phases[0].accumulation)
    return config_lib.replace(reference, model=computed, data=read, phases=(phase,), mesh=config.mesh)


def _decisive_settings(config: Config) -> dict[str, Any]:
    """What decides the updates but for precision, by the name of its flag."""
    flat = _flat(config_lib.decisive(config))
    del flat["model.compute_dtype"]
    return flat


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    if isinstance(values, dict):
        items = list(values.items())
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        items = list(enumerate(values))
    else:
        return {path: values}
    return {name: leaf for key, value in items for name, leaf in _flat(value, f"{path}.{key}".lstrip(".")).items()}


def check_corpus(parts: Sequence[Part], curve: Curve) -> None:
    """See that the corpus is the curve's.

    Raises:
      UserError: it is another one, or there are several; the message has the commands that make it.
    """
    _, corpora = opened(parts)
    found = [corpus for corpus in corpora if corpus.identity == curve.corpus]
    if len(corpora) != 1 or not found:
        names = ", ".join(os.fspath(corpus.directory) for corpus in corpora)
        raise UserError(
            f"corpus {names} is not the one that the curves were trained on; make that with `{COMMANDS[0]}` and "
            f"`{COMMANDS[1]}`, and say --corpus ref/corpus"
        )


def precision_of(config: Config) -> Precision:
    """How products are rounded: accelerators round float32 ones too unless they are told not to."""
    precise = jax.config.jax_default_matmul_precision in ("highest", "float32")
    exact = config.model.compute_dtype == "float32" and (jax.default_backend() == "cpu" or precise)
    return "float32" if exact else "bfloat16"


def _setup(config: Config, precision: Precision) -> Finding:
    devices = jax.devices()
    about = {"devices": len(devices), "kind": devices[0].device_kind, "jax": jax.__version__, "rounding": precision}
    text = f"{config.total_steps} updates of {config.name} on {len(devices)} x {about['kind']}, jax {jax.__version__}"
    if config.model.compute_dtype == rounding:
        return Finding("ok", "set-up", f"{text}, judged as {precision}", about)
    advice = "this device rounds float32 products: JAX_DEFAULT_MATMUL_PRECISION=highest makes the sharp comparison"
    return Finding("warning", "set-up", f"{text}, judged as {precision}: {advice}", about)


def metric_values(lines: Sequence[dict[str, Any]], metrics: Sequence[str]) -> Values:
    """Metrics of every update, from the lines of metrics.jsonl; what is not finite becomes nan."""
    train = [line for line in lines if line["split"] == "train"]
    return {name: [math.nan if line[name] is None else line[name] for line in train] for name in metrics}


def compare(values: Values, curve: Curve, precision: Precision) -> Iterator[Finding]:
    """A line for the first update, and one for the windows of each metric."""
    yield _first(values, curve, FIRST_STEP_TOLERANCE[precision])
    for name, reference in curve.metrics.items():
        off = deviations(values[name], reference)
        bounds = curve.bounds(name, precision)
        yield _windows(name, off, bounds)


def deviations(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """How far the means of all windows lie from the reference's, relative to it."""
    starts = range(0, len(reference), WINDOW)
    pairs = [(_mean(values[a : a + WINDOW]), _mean(reference[a : a + WINDOW])) for a in starts]
    return [abs(mean - right) / max(abs(right), 1e-12) for mean, right in pairs]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _first(values: Values, curve: Curve, bound: float) -> Finding:
    off = {name: abs(values[name][0] - right[0]) / max(abs(right[0]), 1e-12) for name, right in curve.metrics.items()}
    wrong = [name for name, deviation in off.items() if not deviation <= bound]
    about = {"deviations": off, "bound": bound}
    if not wrong:
        farthest = max(off, key=lambda name: off[name])
        text = f"nothing is off by more than {off[farthest]:.1e} ({farthest}), where {bound:.0e} is allowed"
        return Finding("ok", "first", text, about)
    shown = ", ".join(f"{name} {values[name][0]:.6g} for {curve.metrics[name][0]:.6g}" for name in wrong)
    text = (
        f"{shown}; {bound:.0e} is allowed: weights, rows, masks or the model itself are others; docs/reference.md "
        "shows what known mistakes look like"
    )
    return Finding("error", "first", text, about)


def _windows(name: str, off: list[float], bounds: list[float]) -> Finding:
    about = {"deviations": off, "bounds": bounds, "window": WINDOW}
    wrong = [i for i, (deviation, bound) in enumerate(zip(off, bounds, strict=True)) if not deviation <= bound]
    shown = wrong[0] if wrong else max(range(len(off)), key=lambda i: off[i] / bounds[i])
    where = f"updates {shown * WINDOW + 1} to {(shown + 1) * WINDOW}"
    text = f"off by {100 * off[shown]:.2g}% over {where}, where {100 * bounds[shown]:.2g}% is allowed"
    if wrong:
        later = f", and in {len(wrong) - 1} of {len(off)} windows behind" if len(wrong) > 1 else ""
        return Finding("error", name, f"{text}{later}; docs/reference.md shows what known mistakes look like", about)
    return Finding("ok", name, text, about)
