"""What a run reports: lines in ``metrics.jsonl``, and TensorBoard events made from them.

A line is ``{"step": 100, "split": "train", "mlm_loss": ..., "timing": {...}}``. All but ``timing`` is a function
of (config, corpus, seed); resuming cuts the file back to the restored step, so a killed run ends with the
same lines as an undisturbed one.
"""

import json
import math
import time
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends lines and events; on opening, cuts both back to the step that is resumed from."""

    def __init__(self, workdir: Path, resumed_step: int, *, tensorboard: bool):
        self.path = workdir / "metrics.jsonl"
        kept = cut_back(self.path, resumed_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = None
        if tensorboard:
            import tensorboardX  # slow to import, and optional

            directory = workdir / "tensorboard"
            for old in directory.glob("events.*"):
                old.unlink()  # events are a view of the lines: they are made again, not cut
            self._events = tensorboardX.SummaryWriter(str(directory))
            for line in kept:
                self._add_events(line)

    def write(self, step: int, split: str, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append one line; it is in the file when this returns."""
        line = {"step": step, "split": split, **values, "timing": {"unix": time.time(), **timing}}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._add_events(line)

    def _add_events(self, line: dict[str, Any]) -> None:
        if self._events is None:
            return
        numbers = {k: v for k, v in line.items() if k not in ("step", "split", "timing")} | line["timing"]
        unix = numbers.pop("unix")
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self._events.add_scalar(f"{line['split']}/{name}", value, line["step"], walltime=unix)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; one that a kill cut short is not one."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Cut the file before the first line after `step`, or an incomplete one; returns the lines that stay."""
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open("rb+") as file:
            size = 0
            for raw in file:
                if not raw.endswith(b"\n") or json.loads(raw)["step"] > step:
                    break
                kept.append(json.loads(raw))
                size += len(raw)
            file.truncate(size)
    return kept
