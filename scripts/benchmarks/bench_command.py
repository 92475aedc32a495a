"""Functions shared by the command lines of all benchmarks."""

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """Parse a positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': it must be a whole number from 1")
    return int(text)


def stamped(report: dict[str, Any], script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Add the current time and the command to a report."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return report | {"date": now, "command": [f"scripts/{script}.py", *arguments]}


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write the report as JSON, if a path is given."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
