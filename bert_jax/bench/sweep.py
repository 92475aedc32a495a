"""The cases of `bert-jax bench --sweep`: what a lent accelerator must answer, the most important groups first.

A sweep writes its JSON file after every group. A later call with the same file measures the cases that it lacks.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_jax.bench.train_step import PEERS, Case, with_variants
from bert_jax.errors import UserError, require

ROWS = {("bert_base", 128): 256, ("bert_large", 512): 32, ("bert_large", 128): 128, ("bert_base", 512): 64}
"""Rows of a step by preset and length: 32,768 or 16,384 tokens."""
FINAL = ("measured", "refused", "out of memory")
"""Beginnings of the status of cases that a later call does not measure again. A case that failed is tried again."""

Group = list[Case]
FIELDS = tuple(field.name for field in dataclasses.fields(Case))


def groups(platform: str, with_peer: bool) -> dict[str, Group]:
    """Groups of cases that are compared with each other, by name, in order of importance.

    Args:
      platform: of the device; on a CPU there are few and small cases.
      with_peer: whether to measure the peer library on the same shapes.
    """
    if platform == "cpu":
        shapes, kernel, library = [("bert_mini", 128), ("bert_base", 128)], "reference", "reference"
        settings = {"batch": 8}
    else:
        shapes, kernel, library = [*ROWS], f"pallas_{platform}", "cudnn" if platform == "gpu" else "xla"
        settings = {"dtype": "bfloat16", "optimizer": "lamb", "attention": kernel}

    def case(shape: tuple[str, int], **changes: Any) -> Case:
        return Case(*shape, **{"batch": ROWS.get(shape)} | settings | changes)

    def name(shape: tuple[str, int]) -> str:
        return f"{shape[0]} at {shape[1]}"

    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    with_dropout = dict.fromkeys((kernel, "reference"))
    without_dropout = dict.fromkeys((kernel, library, "xla", "reference"))
    found = {name(shape): [case(shape, attention=one) for one in with_dropout] for shape in shapes}
    if with_peer:
        own = {shape: case(shape, optimizer="adamw", pair="none") for shape in shapes}
        found |= {f"peer, {name(shape)}": with_variants([one], PEERS) for shape, one in own.items()}
    found |= {
        f"no dropout, {name(shape)}": [case(shape, attention=one, **no_dropout) for one in without_dropout]
        for shape in shapes
    }
    large, base = ("bert_large", 512), ("bert_base", 128)
    if platform != "cpu":
        found |= {
            "no attention dropout": [case(large, attention_dropout=0.0, attention=one) for one in (kernel, library)],
            "remat": [case(large, remat=remat, batch=64) for remat in ("none", "dots", "full")],
            "rows, bert_large": [case(large, batch=rows) for rows in (16, 32, 64, 128)],
            "rows, bert_base": [case(base, batch=rows) for rows in (64, 256, 1024)],
            "8-bit floats, bert_large": [case(large, dense_dtype=dtype) for dtype in ("compute", "float8")],
            "8-bit floats, bert_base": [case(base, dense_dtype=dtype) for dtype in ("compute", "float8")],
            "packing, bert_base": [case(base, rows=rows) for rows in ("packed", "padded")],
            "packing, bert_large": [case(large, rows=rows) for rows in ("packed", "padded")],
            "layers of an iteration, bert_large": [case(large, scan_unroll=layers) for layers in (1, 2, 24)],
            "layers of an iteration, bert_base": [case(base, scan_unroll=layers) for layers in (1, 12)],
            "optimizer": [case(large, optimizer=one) for one in ("lamb", "adamw")],
            "accumulation": [case(large, batch=128, accumulation=count) for count in (1, 4)],
            "type": [case(base, dtype=dtype, batch=64) for dtype in ("bfloat16", "float32")],
        }
    return found


def read_report(file: Path, flag: str) -> tuple[tuple[str, int], list[dict[str, Any]]]:
    """The kind and number of devices of a sweep, and its rows.

    Raises:
      UserError: it is not the file of a sweep; the line names the flag.
    """
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        is_sweep, devices = report["options"]["sweep"], (report["environment"]["device"], report["devices"])
        rows = [row for row in report["cases"] if row["group"] and row["status"] and is_sweep]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{flag} {file} is not the file of a sweep ({error}): choose another one") from error
    return devices, rows


def earlier_rows(file: Path, device: str, devices: int) -> list[dict[str, Any]]:
    """Rows of the cases that earlier calls with this file have measured; none if there is no file.

    Raises:
      UserError: it is not the file of a sweep, or it belongs to another device.
    """
    if not file.exists():
        return []
    before, rows = read_report(file, "--json")
    require(
        before == (device, devices),
        f"--json {file} has measurements of {before[1]} x {before[0]}, not of {devices} x {device}: choose another "
        "file",
    )
    return [row for row in rows if row["status"].startswith(FINAL)]


def is_measured(name: str, group: Group, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether each case of a group has a row. Otherwise all are measured again, because they are interleaved."""
    return all(any(is_row_of(name, case, row) for row in rows) for case in group)


def is_row_of(name: str, case: Case, row: dict[str, Any]) -> bool:
    """Whether a row of a report belongs to a case of a group; several groups can have the same case."""
    return row.get("group") == name and {field: row.get(field) for field in FIELDS} == dataclasses.asdict(case)
