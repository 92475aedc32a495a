"""Latency, throughput, size and quality of models in their runtimes.

    bert-jax bench --serve my_bert served served_int8
    bert-jax bench --serve my_sst2 served_int8 --task sst2 --data sst2 --figure serve.svg --json serve.json

MODEL is a run, a model that `bert-jax convert` reads, or what it wrote for serving: a directory for ONNX Runtime,
OpenVINO or jax (StableHLO), or one of the graphs in it. All compute the same for the same ids: the logits of the task
head, or the last hidden state of a model without one. They are measured in turn: A, B, C, A, B, C, ... Rows have no
padding. Warm-up and compilation are not timed. All runtimes have the cores of this process.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_jax.bench import harness, serve_figure
from bert_jax.bench.harness import listed, positive
from bert_jax.bench.serve_models import ServedModel, open_models
from bert_jax.bench.serve_quality import measure_quality
from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.distributed import jax_setup
from bert_jax.errors import UserError, require
from bert_jax.storage.paths import to_path

LENGTHS = (16, 64, 128, 512)
BATCH_TOKENS = 2048
"""Of a batch, if --batch is not given."""
MAX_BATCH_TOKENS = 2**20
"""A larger batch would exhaust the memory of most machines."""
LATENCY_SECONDS, LATENCY_CALLS = 0.3, 20
"""A round of latencies has this many seconds of calls, and at most this many calls."""


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--serve", nargs="+", required=True, metavar="MODEL", help="models; ratios are to the first")
    add("--seq-lens", type=listed(positive), help="tokens per row; default: 16,64,128,512 up to the models' positions")
    add("--batch", type=positive, help="rows of a batch for the throughput; default: 2,048 tokens")
    add("--rounds", type=positive, default=7, help="rounds for the medians")
    add("--task", help="a task of `bert-jax finetune`: also the score of its dev split; needs --data")
    add("--data", type=Path, help="directory with the files of the task")
    add("--figure", type=Path, help="a file .svg or .png: throughput and score, as ratios to the first model")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all models.

    Raises:
      UserError: no model, a length above a model's positions, or options that do not belong together.
    """
    require((options.task is None) == (options.data is None), "--task and --data belong together: give both or neither")
    if options.figure is not None:
        serve_figure.check_file(options.figure)
    jax_setup.keep_freed_memory()
    threads = len(harness.usable_cores())
    models = open_models([to_path(path) for path in options.serve], threads)
    lengths = _checked_lengths(models, options.seq_lens)
    require(
        (options.batch or 1) * max(lengths) <= MAX_BATCH_TOKENS,
        f"--batch {options.batch}: rows of {max(lengths):,} tokens: give at most {MAX_BATCH_TOKENS // max(lengths):,}",
    )
    results: dict[str, Any] = {"models": [_describe(one, models[0]) for one in models]}
    if len(outputs := {row["output"] for row in results["models"]}) > 1:
        harness.progress(f"note: the models compute different outputs ({', '.join(sorted(outputs))})")
    if options.task is not None:  # first: it finds mistakes
        results["quality"] = measure_quality(models, to_path(options.serve[0]), options.task, to_path(options.data))
    results |= {"latency": [], "throughput": []}
    for length in lengths:
        results["latency"] += latency_rows(models, length, options.rounds)
        rows = options.batch or max(1, BATCH_TOKENS // length)
        results["throughput"] += measure_throughput(models, length, rows, options.rounds)
        options.save(results)
    if options.figure is not None:
        serve_figure.write(options.figure, results)
    return results


def _describe(model: ServedModel, first: ServedModel) -> dict[str, Any]:
    size = {"MB": model.megabytes, "size / first": model.megabytes / first.megabytes}
    return {"model": model.name, "runtime": model.runtime, "output": model.head or "last hidden state"} | size


def _checked_lengths(models: Sequence[ServedModel], lengths: Sequence[int] | None) -> Sequence[int]:
    shortest = min(models, key=lambda one: one.max_positions)
    if lengths is None:
        return [length for length in LENGTHS if length <= shortest.max_positions] or [shortest.max_positions]
    if max(lengths) > shortest.max_positions:
        raise UserError(
            f"--seq-lens {max(lengths)}: {shortest.name} has {shortest.max_positions} positions: give shorter rows"
        )
    return lengths


def random_batch(models: Sequence[ServedModel], rows: int, length: int) -> ForwardInputs:
    """Random ids that all models have, without padding."""
    size = min(one.vocab_size for one in models)
    ids = np.random.default_rng(0).integers(0, size, (rows, length)).astype(np.int32)
    return ForwardInputs(ids, np.zeros_like(ids), np.ones_like(ids))


def latency_rows(models: Sequence[ServedModel], length: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of single calls with one row: a row of the table for each model."""
    batch = random_batch(models, 1, length)
    sides = {}
    for one in models:
        harness.progress(f"latency, {length} tokens: {one.name}")
        one.call(batch)
        seconds = harness.timed(lambda one=one: one.call(batch))[1]["seconds"]
        calls = max(1, min(LATENCY_CALLS, round(LATENCY_SECONDS / max(seconds, 1e-6))))
        sides[one.name] = functools.partial(_call_times, one, batch, calls)
    samples = harness.interleave(sides, rounds)
    first = [statistics.median(times) for times in samples[models[0].name]]
    return [
        {
            "model": name,
            "tokens": length,
            "ms": 1e3 * statistics.median(flat := [seconds for times in by_round for seconds in times]),
            "ms, 95 %": 1e3 * float(np.percentile(flat, 95)),
            "calls": len(flat),
            "time / first": harness.ratio([statistics.median(times) for times in by_round], first),
        }
        for name, by_round in samples.items()
    ]


def _call_times(model: ServedModel, batch: ForwardInputs, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        model.call(batch)
        times.append(time.perf_counter() - start)
    return times


def measure_throughput(models: Sequence[ServedModel], length: int, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of calls with a batch: a row of the table for each model."""
    batch = random_batch(models, rows, length)
    for one in models:
        harness.progress(f"throughput, {rows} rows of {length} tokens: {one.name}")
        one.call(batch)
    samples = harness.interleave(
        {one.name: harness.timer(functools.partial(one.call, batch)) for one in models}, rounds
    )
    first = [timing["seconds"] for timing in samples[models[0].name]]
    table = []
    for name, timings in samples.items():
        seconds = [timing["seconds"] for timing in timings]
        typical = statistics.median(seconds)
        table.append(
            {
                "model": name,
                "tokens": length,
                "rows": rows,
                "sentences/s": rows / typical,
                "tokens/s": rows * length / typical,
                "CPU s": statistics.median(timing["cpu"] for timing in timings),
                "speed / first": harness.ratio(first, seconds),
                "samples": seconds,
            }
        )
    return table


main = functools.partial(harness.run, __doc__, flags, measure, harness.report_lines, prog="bert-jax bench")
