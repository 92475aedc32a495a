"""Turns the metrics of updates into lines, events, a progress bar and traces, one update late."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from bert_jax.distributed.agreement import is_first
from bert_jax.progress import print_line, progress
from bert_jax.storage import StagedDirectory, StoredPath
from bert_jax.training.divergence import check
from bert_jax.training.eval_metrics import PREDICTED, describe, with_majority
from bert_jax.training.peak_flops import peak_flops
from bert_jax.training.run_directory.goodput import Goodput
from bert_jax.training.run_directory.metrics import MetricsWriter
from bert_jax.training.task import Task

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch


WATCHED = ("tokens", "skipped_in_a_row", "loss", "loss_rise")
"""Metrics that are read after every update."""
UNWRITTEN = {"tokens", "skipped_in_a_row", "loss_rise"}
"""Metrics that are of no use in a line for many updates."""


class Reporter:
    """The eyes of a run. Metrics of an update are read when the next one is already dispatched.

    Every process of a run has one, and sees the same; that of the first process writes and shows.

    Use it in a ``with``; `tokens_seen` counts real tokens over the whole run, restarts included.
    """

    def __init__(
        self,
        task: Task,
        workdir: StoredPath,
        mesh: Mesh,
        step: int,
        tokens_seen: int,
        goodput: Goodput,
        profile: tuple[int, int] | None,
    ):
        config = task.config
        self.task, self.every, self.tokens_seen, self.goodput = task, config.log.every, tokens_seen, goodput
        self.writer: MetricsWriter | None = None
        if is_first():
            self.writer = MetricsWriter(workdir, step, tensorboard=config.log.tensorboard, wandb=config.log.wandb)
        self.peak = peak_flops(list(mesh.devices.flat))
        self.bar = progress("pretraining", config.total_steps, "step", done=step, shown=is_first())
        self.traces, self.tracing = StagedDirectory(workdir / "profile"), False
        self.profile = profile
        self.pending: tuple[int, int, dict[str, Any]] | None = None
        self.window = _Window()
        self.timed_phase = -1  # none of its programs has run yet in this attempt

    def before(self, step: int) -> None:
        """Called before update `step` is compiled and dispatched: starts and ends the trace of --profile."""
        if self.pending is not None and self._phase_of(step) != self._phase_of(self.pending[0] - 1):
            self._turn(None)  # or the time to compile the next phase would count in this one's last line
        if self.profile and step == self.profile[0]:
            self.flush()  # all processes do, so that all see trouble behind the same update
            if is_first():
                jax.profiler.start_trace(str(self.traces.directory))
                self.tracing = True
        if self.profile and step == self.profile[1]:
            self.flush()
            self._stop_trace()

    def timed(self, batches: Iterator["HostBatch"]) -> Iterator["HostBatch"]:
        """The same batches; how long each let itself be waited for counts in `data_wait`."""
        while True:
            before = self.goodput.seconds["data_wait"]
            with self.goodput.spending("data_wait"):
                batch = next(batches, None)
            self.window.waited += self.goodput.seconds["data_wait"] - before
            if batch is None:
                return
            yield batch

    def push(self, step: int, slots: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of an update that was just dispatched, and report the one before it.

        Args:
          step: updates done with this one.
          slots: token places in its global batch, padding included.
          metrics: still on the device.

        Raises:
          TroubleError: the one before shows it.
        """
        self._turn((step, slots, metrics))

    def flush(self) -> None:
        """Report what is pending; waits for the device, and until all lines are where they belong."""
        self._turn(None)
        if self.writer is not None:
            self.writer.flush()

    def _turn(self, then: tuple[int, int, dict[str, jax.Array]] | None) -> None:
        waiting, self.pending = self.pending, then
        if waiting is not None:
            self._report(*waiting)

    def _report(self, step: int, slots: int, metrics: dict[str, jax.Array]) -> None:
        watched = jax.device_get({name: metrics[name] for name in WATCHED})
        tokens, in_a_row, loss, rise = (watched[name].item() for name in WATCHED)
        check(step, loss, in_a_row, rise, self.task.config.rescue)
        self.tokens_seen += tokens
        phase = self._phase_of(step - 1)
        if phase == self.timed_phase:
            self.window.add(tokens, slots, self.task.step_flops(step - 1))
        else:  # the first step of this program includes its compilation: time counts from its end
            self.timed_phase, self.window = phase, _Window()
        self.bar.update(1)
        if step % self.every and step != self.task.config.total_steps:
            return
        kept = {name: value for name, value in metrics.items() if name not in UNWRITTEN}
        values = {name: value.item() for name, value in jax.device_get(kept).items()}
        shown = next((name for name in (f"{of}_loss" for of in PREDICTED) if name in values), "loss")
        self.bar.set_postfix_str(f"{shown} {values[shown]:.3f}", refresh=False)
        timing = self.window.close(self.peak)
        if self.writer is not None:
            self.writer.write(step, "train", with_majority(values) | {"tokens_seen": self.tokens_seen}, timing)
        self.goodput.record(step)

    def _phase_of(self, step: int) -> int:
        return self.task.config.place_of(step)[0]

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Report an evaluation, also as a line on stderr; its time is taken out of the training speed."""
        if self.writer is not None:
            self.writer.write(step, "validation", values, {})
            print_line(f"step {step:,}, held out: {describe(values)}", self.bar)
        self.window = _Window()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.ExitStack() as closing:
            if self.writer is not None:
                closing.callback(self.writer.close)
            for end in (self.bar.close, self.traces.close, self._stop_trace):
                closing.callback(end)

    def _stop_trace(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.traces.upload()
            self.tracing = False


class _Window:
    """Counts what happens between two lines."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.updates, self.real, self.slots, self.flops, self.waited = 0, 0, 0, 0.0, 0.0

    def add(self, real: int, slots: int, flops: float) -> None:
        self.updates += 1
        self.real, self.slots, self.flops = self.real + real, self.slots + slots, self.flops + flops

    def close(self, peak: float) -> dict[str, float]:
        """Speed since the window was opened, and a new start; nothing if it has no step. MFU counts real tokens."""
        if not self.updates:
            return {}
        seconds = max(time.perf_counter() - self.start, 1e-9)
        useful = self.flops * self.real / max(self.slots, 1)
        timing = {
            "step_seconds": seconds / self.updates,
            "tokens_per_second": self.real / seconds,
            "mfu": useful / seconds / peak,
            # Of the loop, which runs ahead of the device: the device waits for at most this share.
            "data_wait": self.waited / seconds,
        }
        self.__init__()
        return timing
