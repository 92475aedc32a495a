"""The cases of `bench.py --sweep`: what a lent accelerator must answer, the most important groups first.

A sweep writes its JSON file after every group. A later call with the same file measures the cases that it lacks.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_step import Case

from bert_jax.errors import UserError

ROWS = {("bert_base", 128): 256, ("bert_large", 512): 32, ("bert_large", 128): 128, ("bert_base", 512): 64}
"""Rows of a step by preset and length: 32,768 or 16,384 tokens."""
FINAL = ("measured", "failed")
"""First words of the status of cases that a later call does not measure again."""

Group = list[Case]


def groups(platform: str, with_peer: bool) -> list[Group]:
    """Groups of cases that are compared with each other, in order of importance.

    Args:
      platform: of the device; on a CPU there are few and small cases.
      with_peer: whether to measure the peer library on the same shapes.
    """
    if platform == "cpu":
        own = [[Case(preset, 128, 8, rate, rate) for rate in (0.1, 0.0)] for preset in ("bert_mini", "bert_base")]
        peer = [_with_peer([Case(preset, 128, 8, pair="none")]) for preset in ("bert_mini", "bert_base")]
        return own + peer if with_peer else own
    kernel, library = f"pallas_{platform}", "cudnn" if platform == "gpu" else "xla"

    def case(shape: tuple[str, int], **changes: Any) -> Case:
        settings = {"batch": ROWS[shape], "dtype": "bfloat16", "optimizer": "lamb", "attention": kernel} | changes
        return Case(*shape, **settings)

    def without_dropout(shape: tuple[str, int]) -> Group:
        implementations = dict.fromkeys((kernel, library, "xla", "reference"))
        rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        return [case(shape, attention=name, **rates) for name in implementations]

    large, base = ("bert_large", 512), ("bert_base", 128)
    published = [[case(shape), case(shape, attention="reference")] for shape in ROWS]
    peer = [_with_peer([case(shape, optimizer="adamw", pair="none")]) for shape in ROWS]
    other = [
        *(without_dropout(shape) for shape in (large, base, ("bert_base", 512), ("bert_large", 128))),
        [case(large, attention_dropout=0.0, attention=name) for name in (kernel, library)],
        [case(large, remat=remat, batch=64) for remat in ("none", "dots", "full")],
        [case(large, batch=rows) for rows in (16, 32, 64, 128)],
        [case(base, batch=rows) for rows in (64, 256, 1024)],
        [case(large, scan_unroll=layers) for layers in (1, 2, 24)],
        [case(base, scan_unroll=layers) for layers in (1, 12)],
        [case(large, optimizer=name) for name in ("lamb", "adamw")],
        [case(large, batch=128, accumulation=count) for count in (1, 4)],
        [case(base, dtype=dtype, batch=64) for dtype in ("bfloat16", "float32")],
    ]
    return [*published, *(peer if with_peer else []), *other]


def _with_peer(group: Group) -> Group:
    first = group[0]
    return [*group, *(Case(*first.shapes, pair="none", variant=variant) for variant in ("stock", "gathered"))]


def earlier_rows(file: Path, device: str) -> list[dict[str, Any]]:
    """Rows of the cases that earlier calls with this file have measured; none if there is no file.

    Raises:
      UserError: it is not the file of a sweep, or it belongs to another device.
    """
    if not file.exists():
        return []
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        rows, before = report["cases"], report["environment"]["device"]
        rows = [row for row in rows if row["status"].startswith(FINAL)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--json {file} is not the file of a sweep: choose another one") from error
    if before != device:
        raise UserError(f"--json {file} has measurements of {before}, not of {device}: choose another file")
    return rows


def without_measured(group: Sequence[Case], rows: Sequence[dict[str, Any]]) -> Group:
    """The cases of a group to measure: all, so that they are interleaved, unless each of them has a row."""
    return [] if all(any(is_row_of(case, row) for row in rows) for case in group) else list(group)


def is_row_of(case: Case, row: dict[str, Any]) -> bool:
    """Whether a row of a report belongs to a case."""
    return {name: row.get(name) for name in dataclasses.asdict(case)} == dataclasses.asdict(case)
