"""A page of metrics in each process of a run, which Prometheus reads over HTTP (`log.prometheus_port`).

A name of metrics.jsonl gets the prefix ``bert_jax_``; what follows a ``/`` in it becomes the label `part`, the split of
its line the label `split`. Process 0 has these and what concerns the whole run; every process has its own step, time by
kind and memory. Threads of the server make the page of what the loop has left behind: the loop waits for nothing.
"""

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from bert_jax.config import Config
from bert_jax.distributed.agreement import is_first
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.checkpoint import Checkpoints
from bert_jax.training.run_directory.goodput import GoodputRecorder
from bert_jax.training.run_directory.ledger import Ledger

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX = "bert_jax_"
TIMEOUT_SECONDS = 10.0
"""For a client to send its request, so that connections that send nothing do not add up."""
OWN = {
    "run": "what is trained, and where",
    "total_steps": "steps of the run",
    "step": "steps that this process has dispatched",
    "seconds": "time of this attempt by kind, as in goodput.jsonl",
    "device_memory_bytes": "memory of a device of this process",
    "host_share": "share of the time before the last line in which this process did not wait for its devices",
    "rollbacks": "rollbacks of the run",
    "checkpoint_step": "step of the newest committed checkpoint",
    "checkpoint_timestamp_seconds": "when it was committed, in seconds since 1970",
}
"""Names without prefix that are not from metrics.jsonl, and what they mean. The first six are of every process."""
SUFFIXES = ("run_info", "seconds_total", "seconds_created")
"""What OpenMetrics makes of them, beside the names themselves."""
MEMORY_KINDS = {"bytes_in_use": "in_use", "peak_bytes_in_use": "peak", "bytes_limit": "limit"}
"""Label `kind` of a device's memory, by jax's name."""


class PrometheusServer:
    """A context manager that serves the metrics of this process; without a port it serves nothing."""

    def __init__(self, config: Config, workdir: StoredPath, ledger: Ledger):
        """Starts nothing.

        Args:
          config: of the run.
          workdir: of the run.
          ledger: of the run.
        """
        self._config, self._workdir, self._ledger = config, workdir, ledger
        self._attempt: tuple[GoodputRecorder, Checkpoints] | None = None
        self.host_share: float | None = None  # of the last line
        self._lines: dict[str, dict[str, float]] = {}  # by split
        self._owners = dict.fromkeys((*OWN, *SUFFIXES), "")  # the metric that has an exported name; "": OWN
        self._left_out: set[str] = set()
        self._server: Any = None

    def __enter__(self) -> "PrometheusServer":
        """Start to serve; if that is not possible, one line on stderr says so."""
        if self._config.log.prometheus_port is None:
            return self
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        prometheus_client.ProcessCollector(registry=registry)
        process = jax.process_index()
        port = self._config.log.prometheus_port + process
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            _warn(f"process {process} cannot serve metrics on port {port} ({reason}): set another log.prometheus_port")
            return self
        handler = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type(handler.__name__, (handler,), {"timeout": TIMEOUT_SECONDS})
        self._server.handle_error = lambda *_: None  # what a client does wrong is no line of the run
        return self

    def __exit__(self, *exception: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def begin_attempt(self, goodput: GoodputRecorder, checkpoints: Checkpoints) -> None:
        """Show the time and the checkpoints of the attempt that begins."""
        self._attempt = goodput, checkpoints

    def show(self, split: str, values: dict[str, float]) -> None:
        """Show the values of a line of metrics, speeds included, in place of those of the split's line before."""
        if self._server is not None and is_first():
            self._lines[split] = {name: value for name, value in values.items() if self._has_own_name(name)}

    def _has_own_name(self, metric: str) -> bool:
        """Whether no other metric is exported under the same name; the first time, one line says which one is."""
        metric = metric.partition("/")[0]
        name = _exported(metric)
        owner = self._owners.setdefault(name, metric)
        if owner != metric and metric not in self._left_out:
            self._left_out.add(metric)
            has = f"the metric {owner}" if owner else "another value"
            _warn(f"Prometheus does not get the metric {metric}: {PREFIX}{name} is the name of {has}")
        return owner == metric

    def collect(self) -> Iterator["Metric"]:
        """All metrics; called by prometheus_client, in a thread of a request."""
        from prometheus_client import Metric

        def metric(name: str, *samples: tuple[dict[str, str], float], kind: str = "gauge", suffix: str = "") -> Metric:
            made = Metric(PREFIX + name, OWN[name], kind)
            for labels, value in samples:
                made.add_sample(made.name + suffix, labels, value)
            return made

        about = {"config": self._config.name, "workdir": str(self._workdir), "process": str(jax.process_index())}
        yield metric("run", (about, 1), kind="info", suffix="_info")
        yield metric("total_steps", ({}, self._config.total_steps))
        yield metric("device_memory_bytes", *_device_memory())
        if self._attempt is None:
            return
        goodput, checkpoints = self._attempt
        yield metric("step", ({}, goodput.step))
        times = [({"kind": kind}, value) for kind, value in goodput.totals().items()]
        yield metric("seconds", *times, kind="counter", suffix="_total")
        if self.host_share is not None:
            yield metric("host_share", ({}, self.host_share))
        if not is_first():
            return
        yield metric("rollbacks", ({}, len(self._ledger.entries_of("rollback"))))
        if checkpoints.newest is not None:
            yield metric("checkpoint_step", ({}, checkpoints.newest[0]))
            yield metric("checkpoint_timestamp_seconds", ({}, checkpoints.newest[1]))
        yield from self._of_lines(Metric)

    def _of_lines(self, make: type["Metric"]) -> Iterator["Metric"]:
        families: dict[str, Any] = {}
        for split, line in list(self._lines.items()):
            for name, value in line.items():
                name, _, part = name.partition("/")
                exported = PREFIX + _exported(name)
                if exported not in families:
                    families[exported] = make(exported, f"{name} of the last line of metrics.jsonl", "gauge")
                labels = {"split": split} | ({"part": part} if part else {})
                families[exported].add_sample(exported, labels, value)
        yield from families.values()


def _device_memory() -> list[tuple[dict[str, str], float]]:
    """Bytes of each device of this process that reports its memory."""
    return [
        ({"device": str(device.id), "kind": kind}, value)
        for device in jax.local_devices()
        for name, value in (device.memory_stats() or {}).items()
        if (kind := MEMORY_KINDS.get(name))
    ]


def _exported(metric: str) -> str:
    return re.sub(r"\W", "_", metric, flags=re.ASCII)


def _warn(text: str) -> None:
    print(f"warning: {text}; the run goes on", file=sys.stderr, flush=True)
