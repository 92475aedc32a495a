"""What the command lines of all benchmarks share."""

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}': it must be a whole number from 1")
    return int(text)


def stamped(report: dict[str, Any], script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The report with the time and the command that it is from."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return report | {"date": now, "command": [f"scripts/{script}.py", *arguments]}


def write(report: dict[str, Any], path: Path | None) -> None:
    """Write everything measured as JSON, if a file was asked for."""
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
