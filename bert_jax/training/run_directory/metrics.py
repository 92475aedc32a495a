"""Metrics of a run: ``metrics.jsonl``, and views of it as TensorBoard events and as a run of Weights & Biases.

A line is ``{"step": 100, "split": "train", "mlm_loss": ..., "timing": {...}}``. All but ``timing`` is a function
of (config, corpus, seed); resuming truncates the file to the restored step, so a killed run ends with the same lines
as an uninterrupted one. ``timing`` also has the number of the line, so that a lost line is noticed.
"""

import contextlib
import importlib
import itertools
import json
import math
import sys
import time
import uuid
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypedDict

from bert_jax.errors import UserError, install_command
from bert_jax.storage.files import BackgroundUpload, StagedDirectory
from bert_jax.storage.paths import StoredPath, is_remote
from bert_jax.training.run_directory.json_lines import JsonLines, read_lines, truncate_lines

Line = dict[str, Any]


class _Timing(TypedDict):
    unix: float
    line: int
    """from 1"""


class _Line(TypedDict):
    step: int
    split: str
    timing: _Timing


WANDB_ID = "wandb_id"
"""File in a work directory with the id of its Weights & Biases run, so that the id moves with the directory."""


class MetricsWriter:
    """Writes the metrics of a run; only one process of a run has a writer.

    On opening, lines after the resumed step are removed, and the remaining lines are sent to the views. A warning on
    stderr tells of lines that are missing.
    """

    def __init__(
        self, workdir: StoredPath, resumed_step: int, line_count: int, *, tensorboard: bool, wandb: str | None = None
    ):
        """Open the file and the views.

        Args:
          workdir: of the run; its config.json is sent to Weights & Biases.
          resumed_step: number of steps done; 0 for a new run.
          line_count: number of lines when the checkpoint of that step was saved.
          tensorboard: also write TensorBoard events, to workdir/tensorboard.
          wandb: Weights & Biases project to write to as well. WANDB_MODE and its other variables apply. Its local
            files are in the work directory, or in WANDB_DIR if the work directory is in an object store.

        Raises:
          UserError: wandb is not installed or cannot be started; the file is unchanged then.
        """
        self.path = workdir / "metrics.jsonl"
        with contextlib.ExitStack() as on_failure:
            views: list[_TensorBoardEvents | _WandbRun] = []
            if wandb is not None:
                views.append(_WandbRun(workdir, wandb))
            if tensorboard:
                views.append(_TensorBoardEvents(workdir / "tensorboard"))
            for view in views:
                on_failure.callback(view.close)
            lines = truncate_lines(self.path, _Line, lambda line: line["step"] <= resumed_step)
            for line, view in itertools.product(lines, views):
                view.write(line)
            if gaps := _gaps(lines, line_count):
                print(f"warning: {self.path}: lines of steps are missing ({', '.join(gaps)})", file=sys.stderr)
            self._count = line_count
            # metrics.jsonl, from which all views can be rebuilt.
            self._sinks = [JsonLines(self.path, durable=False), *views]
            on_failure.pop_all()

    def write(self, step: int, split: str, values: dict[str, float], timing: dict[str, float]) -> None:
        """Append one line. On disk it is in the file when this returns, and survives a power failure after `flush`."""
        # JSON has no NaN: values that are not finite are null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._count += 1
        line = {"step": step, "split": split, **finite, "timing": {"unix": time.time(), "line": self._count, **timing}}
        for sink in self._sinks:
            sink.write(line)

    def flush(self) -> None:
        """Write all lines to the file and the views."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Flush and close the file and the views."""
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)


def _gaps(lines: list[Line], line_count: int) -> list[str]:
    """Where some of `line_count` lines are missing, as texts."""
    places = [(0, 0), *((line["timing"]["line"], line["step"]) for line in lines)]
    found = [
        f"between {step} and {following}"
        for (number, step), (next_number, following) in itertools.pairwise(places)
        if next_number != number + 1
    ]
    last_number, last_step = places[-1]
    return found + [f"after {last_step}"] * (last_number < line_count)


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let imports of a module fail, if it is not there already."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None
    try:
        yield
    finally:
        del sys.modules[module]


class _TensorBoardEvents:
    """TensorBoard events. Old files are rebuilt, not truncated; to an object store they are copied periodically."""

    def __init__(self, directory: StoredPath):
        with _hidden("torch"):  # it is imported for an annotation, in two seconds
            import tensorboardX  # slow to import, and optional

        for old in directory.glob("events.*"):
            old.unlink()
        self._staged = StagedDirectory(directory)
        self._writer = tensorboardX.SummaryWriter(str(self._staged.directory))
        self._uploads = BackgroundUpload(self._send)

    def write(self, line: Line) -> None:
        for name, value in _finite_scalars(line):
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
            closing.callback(self._uploads.close)  # closed first


class _WandbRun:
    """A Weights & Biases run, the same one after every restart, with the same steps.

    It accepts each step once. Steps that a restart or a rollback repeats are skipped; for steps after a rollback, only
    metrics.jsonl has the new values. Lines that it lacks, because the project was set later or the process died before
    they were sent, are sent from metrics.jsonl.
    """

    def __init__(self, workdir: StoredPath, project: str):
        wandb = _import_wandb()
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
            self._run.log(dict(_finite_scalars(line)), step=line["step"])

    def flush(self) -> None:
        """wandb sends lines asynchronously; lines that a killed process did not send are sent at the next start."""

    def close(self) -> None:
        self._run.finish()


def check_wandb(wandb: str | None) -> None:
    """Raise UserError if a run needs wandb and it is not installed."""
    if wandb is not None:
        _import_wandb()


def _import_wandb() -> ModuleType:
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


def _finite_scalars(line: Line) -> Iterator[tuple[str, float]]:
    """Names and values of the finite scalars of a line."""
    values = {name: value for name, value in line.items() if name not in ("step", "split", "timing")}
    speeds = {name: value for name, value in line["timing"].items() if name not in ("unix", "line")}
    for name, value in (values | speeds).items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield f"{line['split']}/{name}", value


def read_metrics(path: StoredPath) -> list[Line]:
    """All complete lines; damaged ones are skipped with a warning on stderr."""
    return read_lines(path, _Line)
