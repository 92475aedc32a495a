"""Reports metrics of steps as lines, events and a progress bar, one step late, and records profiler traces."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bert_jax.chips import chip_of
from bert_jax.command.progress import print_line, progress_bar
from bert_jax.distributed.agreement import is_first
from bert_jax.objectives.objectives import TOKEN_OBJECTIVES
from bert_jax.storage.files import StagedDirectory
from bert_jax.storage.paths import StoredPath
from bert_jax.training.divergence import StepMeasures, check_divergence
from bert_jax.training.eval_metrics import derive_metrics, format_metrics
from bert_jax.training.monitoring import stragglers
from bert_jax.training.monitoring.prometheus import PrometheusServer
from bert_jax.training.run_directory.goodput import GoodputRecorder
from bert_jax.training.run_directory.metrics import MetricsWriter
from bert_jax.training.task import Task

if TYPE_CHECKING:
    from bert_jax.data.batches import HostBatch


READ_EVERY_STEP = ("tokens", "loss", *StepMeasures._fields)
"""Metrics that are read after every step."""
NOT_LOGGED = {"tokens", *StepMeasures._fields} - {"skipped_steps"}
"""Metrics of single steps, which are not written to metrics.jsonl."""


class Reporter:
    """Reports the metrics of a run. Metrics of a step are read after the next step has been dispatched.

    Every process of a run has a reporter and reads the same metrics; the first process writes and displays them.

    A context manager. Over the whole run, restarts included, `tokens_seen` counts tokens without padding,
    `skipped_steps` steps whose loss or gradient was not finite, and `metric_lines` lines of metrics.jsonl.
    """

    def __init__(
        self,
        task: Task,
        workdir: StoredPath,
        mesh: Mesh,
        step: int,
        tokens_seen: int,
        skipped_steps: int,
        metric_lines: int,
        goodput: GoodputRecorder,
        profile: tuple[int, int] | None,
        prometheus: PrometheusServer,
    ):
        config = task.config
        self.skipped_steps, self.metric_lines, self.warned = skipped_steps, metric_lines, False
        self.task, self.every, self.tokens_seen, self.goodput = task, config.log.every, tokens_seen, goodput
        self.writer: MetricsWriter | None = None
        if is_first():
            log = config.log
            self.writer = MetricsWriter(workdir, step, metric_lines, tensorboard=log.tensorboard, wandb=log.wandb)
        self.peak = peak_flops(list(mesh.devices.flat))
        self.bar = progress_bar("training", config.total_steps, "step", done=step, shown=is_first())
        self.traces, self.tracing = StagedDirectory(workdir / "profile"), False
        self.profile, self.prometheus = profile, prometheus
        self.pending: tuple[int, int, dict[str, Any]] | None = None
        self.window, self.host_shares, self.slow = _Window(goodput), stragglers.HostShares(), set[int]()
        self.timed_phase = -1  # no step of the phase has run yet in this attempt

    def before_step(self, step: int) -> None:
        """Called before step `step` is compiled and dispatched: starts and stops the trace of --profile."""
        if self.pending is not None and self._phase_of(step) != self._phase_of(self.pending[0] - 1):
            self.report_pending()  # else this phase's last line would include the compilation of the next phase
        if self.profile and step == self.profile[0]:
            self.flush()  # in all processes, so that all detect divergence after the same step
            if is_first():
                jax.profiler.start_trace(str(self.traces.directory))
                self.tracing = True
        if self.profile and step == self.profile[1]:
            self.flush()
            self._stop_trace()

    def timed_batches(self, batches: Iterator["HostBatch"]) -> Iterator["HostBatch"]:
        """The same batches; the time spent waiting for them counts as `data_wait`."""
        while True:
            with self.goodput.measure("data_wait"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def add_step(self, step: int, slots: int, metrics: dict[str, jax.Array]) -> None:
        """Take the metrics of a step that was just dispatched, and report the step before it.

        Args:
          step: number of steps done, this one included.
          slots: tokens in its global batch, padding included.
          metrics: on the device.

        Raises:
          DivergenceError: the metrics of the step before are out of bounds.
        """
        self._replace_pending((step, slots, metrics))

    @property
    def counts(self) -> tuple[int, int, int]:
        """`tokens_seen`, `skipped_steps` and `metric_lines`."""
        return self.tokens_seen, self.skipped_steps, self.metric_lines

    def report_pending(self) -> None:
        """Report the pending step; waits for the device."""
        self._replace_pending(None)

    def flush(self) -> None:
        """Report the pending step; waits for the device and until all lines are written."""
        self.report_pending()
        if self.writer is not None:
            self.writer.flush()

    def _replace_pending(self, following: tuple[int, int, dict[str, jax.Array]] | None) -> None:
        pending, self.pending = self.pending, following
        if pending is not None:
            self._report(*pending)

    def _report(self, step: int, slots: int, metrics: dict[str, jax.Array]) -> None:
        before = time.perf_counter()
        scalars = jax.device_get({name: metrics[name] for name in READ_EVERY_STEP})
        self.window.device_wait += time.perf_counter() - before
        tokens, loss, *found = (scalars[name].item() for name in READ_EVERY_STEP)
        measures = StepMeasures(*found)
        self._warn_if_first_skipped(step, loss, measures.skipped_steps)
        check_divergence(step, loss, measures, self.task.config.recovery)
        self.tokens_seen += tokens
        phase = self._phase_of(step - 1)
        if phase == self.timed_phase:
            self.window.add(tokens, slots, self.task.step_flops(step - 1))
        else:  # the first step of a program includes its compilation and is not timed
            self.timed_phase, self.window = phase, _Window(self.goodput)
        self.bar.update(1)
        if step % self.every and step != self.task.config.total_steps:
            return
        logged = {name: value for name, value in metrics.items() if name not in NOT_LOGGED}
        values = derive_metrics({name: value.tolist() for name, value in jax.device_get(logged).items()})
        shown = next((name for name in (f"{of}_loss" for of in TOKEN_OBJECTIVES) if name in values), "loss")
        skipped = f", {self.skipped_steps} skipped" if self.skipped_steps else ""
        self.bar.set_postfix_str(f"{shown} {values[shown]:.3f}{skipped}", refresh=False)
        timing, share, seconds = self.window.speed(self.peak), self.window.host_share(), self.window.seconds
        self.prometheus.host_share = share
        self.window = _Window(self.goodput)
        values |= self._mask_rate(step - 1) | {"tokens_seen": self.tokens_seen}
        self._write(step, "train", values, timing)
        slow = self.host_shares.exchange(step, share, seconds)
        self._warn_of_slow(step, slow)
        self.goodput.write_totals(step, **({"slow": slow} if slow else {}))

    def _mask_rate(self, step: int) -> dict[str, float]:
        """Of step `step`, counted from 0, in a phase that changes it; empty in others."""
        phase, within = self.task.config.locate_step(step)
        if self.task.config.phases[phase].end_mask_rate is None:
            return {}
        return {"mask_rate": self.task.config.mask_rate_at(phase, within)}

    def _warn_if_first_skipped(self, step: int, loss: float, skipped_steps: int) -> None:
        """Warn at the first skipped step of this process; later ones are in the bar and at the end."""
        if skipped_steps > self.skipped_steps and not self.warned and is_first():
            self.warned = True
            what = "gradient" if math.isfinite(loss) else "loss"
            print_line(
                f"warning: the {what} of step {step:,} is not finite; its update is skipped. Further ones are counted "
                "in the progress bar and in metrics.jsonl (skipped_steps)",
                self.bar,
            )
        self.skipped_steps = skipped_steps

    def _warn_of_slow(self, step: int, slow: list[stragglers.SlowProcess]) -> None:
        """Name a process the first time that it is slow in this attempt; goodput.jsonl has all times."""
        for one in slow:
            if one["process"] not in self.slow:
                self.slow.add(one["process"])
                print_line(f"warning: step {step:,}: {stragglers.in_words(one)}", self.bar)

    def _phase_of(self, step: int) -> int:
        return self.task.config.locate_step(step)[0]

    def add_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Report held-out metrics, also on stderr; the training speed does not include the time of the evaluation."""
        self._write(step, "validation", values, {})
        if is_first():
            print_line(f"step {step:,}, held out: {format_metrics(values)}", self.bar)
        self.window = _Window(self.goodput)

    def _write(self, step: int, split: str, values: dict[str, float], timing: dict[str, float]) -> None:
        self.metric_lines += 1
        self.prometheus.show(split, values | timing)
        if self.writer is not None:
            self.writer.write(step, split, values, timing)

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
    """Counters between two lines of metrics."""

    def __init__(self, goodput: GoodputRecorder) -> None:
        self.start, self.goodput = time.perf_counter(), goodput
        self.before, self.suspended_before = dict(goodput.seconds), goodput.suspended
        self.steps, self.tokens, self.slots, self.flops, self.device_wait = 0, 0, 0, 0.0, 0.0

    def add(self, tokens: int, slots: int, flops: float) -> None:
        self.steps += 1
        self.tokens, self.slots, self.flops = self.tokens + tokens, self.slots + slots, self.flops + flops

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.start, 1e-9)

    def _seconds_of(self, kind: str) -> float:
        return self.goodput.seconds[kind] - self.before[kind]

    def speed(self, peak: float) -> dict[str, float]:
        """Speed since the window was opened; empty without a step. MFU does not count padding."""
        if not self.steps:
            return {}
        seconds = self.seconds
        useful = self.flops * self.tokens / max(self.slots, 1)
        return {
            "step_seconds": seconds / self.steps,
            "tokens_per_second": self.tokens / seconds,
            "mfu": useful / seconds / peak,
            # Share of the time of the loop, which runs ahead of the device: an upper bound of the device's idle share.
            "data_wait": self._seconds_of("data_wait") / seconds,
        }

    def host_share(self) -> float:
        """Share of the time, without saves and compilation, in which this process did not wait for its devices, or was
        suspended, whichever is longer.
        """
        others = self._seconds_of("checkpoint") + self._seconds_of("compile")
        seconds = max(self.seconds - others, 1e-9)
        busy = max(seconds - self.device_wait, self.goodput.suspended - self.suspended_before)
        return min(busy / seconds, 1.0)


def peak_flops(devices: list[jax.Device]) -> float:
    """FLOP/s of all devices together: the published bf16 peak, or a measured matrix product if the chip is unknown."""
    chip = chip_of(devices[0].device_kind)
    if chip is not None:
        return chip.peak_flops * len(devices)
    # CPU devices share one machine: their number does not matter.
    return _measured_matmul_flops()


@functools.cache
def _measured_matmul_flops(size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of a float32 product of two square matrices on the default device, the best of `repeats`."""
    matrix = jax.device_put(np.ones((size, size), np.float32))
    jnp.matmul(matrix, matrix).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jnp.matmul(matrix, matrix).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
