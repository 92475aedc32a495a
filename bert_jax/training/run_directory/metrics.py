"""What a run reports: lines in ``metrics.jsonl``; TensorBoard events and a run of Weights & Biases are views of them.

A line is ``{"step": 100, "split": "train", "mlm_loss": ..., "timing": {...}}``. All but ``timing`` is a function
of (config, corpus, seed); resuming cuts the file back to the restored step, so a killed run ends with the
same lines as an undisturbed one.
"""

import contextlib
import importlib
import json
import math
import time
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

from bert_jax.errors import UserError, install_command
from bert_jax.storage import BackgroundUpload, StagedDirectory, StoredPath, is_remote
from bert_jax.training.run_directory.json_lines import JsonLines, cut_back, is_number, read_lines

Line = dict[str, Any]
WANDB_ID = "wandb_id"
"""File in a work directory: the id of its run at Weights & Biases. It moves with the directory."""


class Sink(Protocol):
    """Where lines go."""

    def write(self, line: Line) -> None:
        """Take the next line."""

    def flush(self) -> None:
        """What was taken is where it belongs when this returns."""

    def close(self) -> None:
        """Send what is left, and close."""


class MetricsWriter:
    """Takes the metrics of a run; to be made by the one process that writes.

    On opening, lines after the step that is resumed from are cut, and the views get those that stay.
    """

    def __init__(self, workdir: StoredPath, resumed_step: int, *, tensorboard: bool, wandb: str | None = None):
        """Opens all.

        Args:
          workdir: of the run; its config.json is shown at Weights & Biases.
          resumed_step: updates done; 0 for a new run.
          tensorboard: also write TensorBoard events, to workdir/tensorboard.
          wandb: project of Weights & Biases to write to as well. WANDB_MODE and its other variables count. What it
            keeps on disk is in the work directory, or where WANDB_DIR says if that is in an object store.

        Raises:
          UserError: wandb is not installed or cannot be started; no line has been cut then.
        """
        self.path = workdir / "metrics.jsonl"
        with contextlib.ExitStack() as opened:
            views: list[Sink] = []
            if wandb is not None:
                views.append(_WandbRun(workdir, wandb))
            if tensorboard:
                views.append(_Events(workdir / "tensorboard"))
            for view in views:
                opened.callback(view.close)
            for line in cut_back(self.path, _is_line, lambda line: line["step"] <= resumed_step):
                for view in views:
                    view.write(line)
            self._sinks: list[Sink] = [_Lines(self.path), *views]
            opened.pop_all()

    def write(self, step: int, split: str, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append one line; on disk it is in the file when this returns, in an object store after `flush`."""
        # JSON has no NaN: what is not finite is null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, "split": split, **finite, "timing": {"unix": time.time(), **timing}}
        for sink in self._sinks:
            sink.write(line)

    def flush(self) -> None:
        """All lines are in the file when this returns, and the views have them."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Flush and close all."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)


class _Lines:
    """The truth: what the views show can be made again from it."""

    def __init__(self, path: StoredPath):
        self._file = JsonLines(path, durable=False)

    def write(self, line: Line) -> None:
        self._file.add(line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Events:
    """TensorBoard events. Old ones are not cut but made again; to an object store they are copied now and then."""

    def __init__(self, directory: StoredPath):
        import tensorboardX  # slow to import, and optional

        for old in directory.glob("events.*"):
            old.unlink()
        self._staged = StagedDirectory(directory)
        self._writer = tensorboardX.SummaryWriter(str(self._staged.directory))
        self._uploads = BackgroundUpload(self._send)

    def write(self, line: Line) -> None:
        for name, value in _numbers(line):
            self._writer.add_scalar(name, value, line["step"], walltime=line["timing"]["unix"])
        self._uploads.content_changed()

    def _send(self) -> None:
        self._writer.flush()
        self._staged.upload()

    def flush(self) -> None:
        self._uploads.flush()

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._staged.close)
            closing.callback(self._writer.close)
            closing.callback(self._uploads.close)  # first


class _WandbRun:
    """A run of Weights & Biases, the same one after every restart; its step is the update.

    It takes no step twice. What a restart repeats is there already and is passed over, and so are the updates that are
    made anew after going back, of which only the lines tell. What is not there, because the project was named later or
    the process died before it was sent, is sent from the lines.
    """

    def __init__(self, workdir: StoredPath, project: str):
        wandb = _wandb()
        config = workdir / "config.json"
        try:
            self._run = wandb.init(
                project=project,
                id=_run_id(workdir),
                resume="allow",
                name=workdir.name if is_remote(workdir) else workdir.resolve().name,
                dir=None if is_remote(workdir) else str(workdir),
                config=json.loads(config.read_text())["config"] if config.exists() else {},
            )
        except wandb.Error as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"log.wandb {project}: Weights & Biases cannot be started ({reason}): run `wandb login`, set "
                "WANDB_MODE=offline, or leave log.wandb out"
            ) from error
        self._first = self._run.step

    def write(self, line: Line) -> None:
        if line["step"] >= self._first:
            self._run.log(dict(_numbers(line)), step=line["step"])

    def flush(self) -> None:
        """It sends by itself; what a kill keeps it from sending is sent from the lines."""

    def close(self) -> None:
        self._run.finish()


def check(wandb: str | None) -> None:
    """Raise UserError if what a run is to write to is not installed."""
    if wandb is not None:
        _wandb()


def _wandb() -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise UserError(
            f"log.wandb needs the package wandb, which is missing: {install_command('wandb')}, or leave it out"
        ) from error


def _run_id(workdir: StoredPath) -> str:
    path = workdir / WANDB_ID
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def _numbers(line: Line) -> Iterator[tuple[str, float]]:
    """Finite values of a line by the name of their curve."""
    values = {name: value for name, value in line.items() if name not in ("step", "split", "timing")}
    speeds = {name: value for name, value in line["timing"].items() if name != "unix"}
    for name, value in (values | speeds).items():
        if is_number(value) and math.isfinite(value):
            yield f"{line['split']}/{name}", value


def read_metrics(path: StoredPath) -> list[Line]:
    """All complete lines; damaged ones are named on stderr and left out."""
    return read_lines(path, _is_line)


def _is_line(line: Line) -> bool:
    timing = line.get("timing")
    return (
        type(line.get("step")) is int
        and isinstance(line.get("split"), str)
        and isinstance(timing, dict)
        and is_number(timing.get("unix"))
    )
