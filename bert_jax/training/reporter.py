"""Turns the metrics of updates into lines, events, a progress bar and traces, one update late."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bert_jax.errors import UserError
from bert_jax.progress import progress
from bert_jax.training.metrics import MetricsWriter
from bert_jax.training.task import Task
from bert_jax.training.throughput import peak_flops

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch


class Reporter:
    """The eyes of a run. Metrics of an update are read when the next one is already dispatched.

    Use it in a ``with``; `tokens_seen` counts real tokens over the whole run, restarts included.
    """

    def __init__(
        self,
        task: Task,
        workdir: Path,
        devices: list[jax.Device],
        step: int,
        tokens_seen: int,
        profile: tuple[int, int] | None,
    ):
        config = task.config
        self.task, self.every, self.tokens_seen = task, config.log.every, tokens_seen
        self.writer = MetricsWriter(workdir, step, tensorboard=config.log.tensorboard)
        self.peak = peak_flops(devices)
        self.bar = progress("pretraining", config.total_steps, "step")
        self.bar.update(step)
        self.trace_directory, self.profile, self.tracing = workdir / "profile", profile, False
        self.pending: tuple[int, int, dict[str, Any]] | None = None
        self.window = _Window()

    def before(self, step: int) -> None:
        """Called before update `step` is dispatched: starts and ends the trace that --profile asked for."""
        if self.profile and step == self.profile[0]:
            self.flush()
            jax.profiler.start_trace(str(self.trace_directory))
            self.tracing = True
        if self.profile and step == self.profile[1]:
            self.flush()
            self._stop_trace()

    def timed(self, batches: Iterator["HostBatch"]) -> Iterator["HostBatch"]:
        """The same batches; how long each let itself be waited for counts in `data_wait`."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.window.waited += time.perf_counter() - start
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
          UserError: the loss of the one before is not finite.
        """
        self.flush(then=(step, slots, metrics))

    def flush(self, then: tuple[int, int, dict[str, jax.Array]] | None = None) -> None:
        """Report what is pending; waits for the device."""
        waiting, self.pending = self.pending, then
        if waiting is not None:
            self._report(*waiting)

    def _report(self, step: int, slots: int, metrics: dict[str, jax.Array]) -> None:
        tokens = int(jax.device_get(metrics["tokens"]))
        self.tokens_seen += tokens
        self.window.add(tokens, slots, self.task.step_flops(step - 1))
        self.bar.update(1)
        if step % self.every and step != self.task.config.total_steps:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items() if name != "tokens"}
        if not math.isfinite(values["loss"]):
            raise UserError(
                f"the loss is {values['loss']} after update {step}: lower the learning rate or lengthen the "
                "warmup, and start in another --workdir"
            )
        self.bar.set_postfix_str(f"loss {values['loss']:.3f}", refresh=False)
        values["tokens_seen"] = self.tokens_seen
        self.writer.write(step, "train", values, self.window.close(self.peak))

    def held_out(self, step: int, values: dict[str, float]) -> None:
        """Report an evaluation; its time is taken out of the training speed."""
        self.writer.write(step, "validation", values, {})
        self.window = _Window()

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop_trace()
        self.bar.close()
        self.writer.close()

    def _stop_trace(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
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
        """Speed since the window was opened, and a new start. MFU counts real tokens only."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        useful = self.flops * self.real / max(self.slots, 1)
        timing = {
            "step_seconds": seconds / max(self.updates, 1),
            "tokens_per_second": self.real / seconds,
            "mfu": useful / seconds / peak,
            # Of the loop, which runs ahead of the device: the device waits for at most this share.
            "data_wait": self.waited / seconds,
        }
        self.__init__()
        return timing
