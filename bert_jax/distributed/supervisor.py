"""The supervisor of a training process: starts it when all processes are connected, and names the one that fails first.

When a peer dies, collective libraries abort a process in C++ with a stack trace that does not name the peer. The
supervisors have connections of their own. All of them name the first process that failed, and end the others. If it was
killed, or asks to be tried again, they start all of them once more, and again after every new checkpoint; without one,
the launcher decides.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from bert_jax.command.dispatch import leave_lost_terminal, stop_signals
from bert_jax.distributed.cluster_detection import ClusterConfig, ProcessInfo, detect
from bert_jax.distributed.messages import Port
from bert_jax.distributed.monitor import Monitor, port_for_jax
from bert_jax.distributed.process_report import Report, make_report, report_differences
from bert_jax.distributed.rendezvous import open_rendezvous
from bert_jax.distributed.supervised import WORKER_ENV
from bert_jax.errors import INTERRUPTED, TRY_AGAIN, PeerError, UserError

CHILD = (
    "import json, os, signal, sys; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    f"settings = json.loads(os.environ['{WORKER_ENV}']); "
    "sys.path[:] = settings['path']; "
    "sys.stderr = open(settings['stderr'], 'w', 1, sys.stderr.encoding, 'backslashreplace'); "
    "from bert_jax.cli.main import main; sys.exit(main())"
)
"""Program of the child. It imports what its supervisor imports, whatever the current directory contains, and writes to
its supervisor's standard error, except what C++ writes (error_output.py)."""
SAVING = b"\nCtrl-C: saving after this step; a second Ctrl-C stops at once without saving\n"
STOPPING = b"\nCtrl-C: stopping\n"
"""For commands that save nothing."""


def supervise_command(
    words: Sequence[str], cluster: ClusterConfig, options: Mapping[str, Any], on_interrupt: bytes = SAVING
) -> int | None:
    """Run a command of bert-jax under supervision, if this process is one of several.

    Args:
      words: of the command line, from the command's name on.
      cluster: flags of the cluster.
      options: all that decides the results (process_report.py); they must be equal in all processes.
      on_interrupt: what the first Ctrl-C prints.

    Returns:
      see `supervise`; None: this process runs the command itself, because it is the only one or a supervised child.

    Raises:
      PeerError, UserError: see `supervise` and `cluster_detection.detect`.
    """
    if WORKER_ENV in os.environ or (info := detect(cluster)) is None:
        return None
    command = [sys.executable, "-P", "-c", CHILD, *words]
    return supervise(command, info, make_report(options), cluster.timeout, on_interrupt)


def supervise(
    command: Sequence[str], info: ProcessInfo, report: Report, timeout: float, on_interrupt: bytes = SAVING
) -> int:
    """Run a command as one of several processes, and monitor it and its peers.

    Args:
      command: of the child, which calls `worker.connect_worker`.
      info: of this process.
      report: of this process (process_report.py).
      timeout: seconds to wait for the other processes at the start.
      on_interrupt: what the first Ctrl-C prints.

    Returns:
      an exit code: the child's if it ended in order; otherwise 1, 2 or `TRY_AGAIN`. After Ctrl-C, `INTERRUPTED`
      instead of `TRY_AGAIN`.

    Raises:
      PeerError, UserError: the run cannot start (`open_rendezvous`), or the reports differ.
    """
    children: list[subprocess.Popen] = []
    with _forward_signals(children, info, on_interrupt) as signals:
        peers, settings = open_rendezvous(info, report, timeout, lambda reports: _agree(reports, info), _Settings)
        try:
            if len(settings["hosts"]) != info.process_count:
                raise PeerError(f"the process at {info.coordinator_host}:{info.coordinator_port} is of another run")
            monitor = Monitor(peers, info, settings["hosts"], signals)
            child_settings = {
                "info": info._replace(secret=""),
                "path": [place for place in sys.path if isinstance(place, str)],
                "code": report["code"],
                "is_first_on_host": monitor.is_first_on_host,
            }
            port: int | None = settings["port"]
            while True:
                code = monitor.run(command, child_settings | {"port": port}, children)
                port = monitor.agree_on_restart(code)
                if port is None:
                    break
                if signals:  # came while no child was running
                    raise _stopped(info, signals[0])
            code = monitor.verdict(code)
            return INTERRUPTED if signal.SIGINT in signals and code == TRY_AGAIN else code
        finally:
            peers.close()


class _Settings(TypedDict):
    """What process 0 decides before the start."""

    hosts: list[str]
    port: Port


def _agree(reports: list[Report], info: ProcessInfo) -> _Settings:
    """Hosts of all processes, and a port on process 0's host for jax; UserError if the reports differ."""
    if found := report_differences(reports):
        raise UserError(found[0])
    return {"hosts": [report["host"] for report in reports], "port": port_for_jax(info)}


@contextmanager
def _forward_signals(children: list[subprocess.Popen], info: ProcessInfo, on_interrupt: bytes) -> Iterator[list[int]]:
    """Forward SIGHUP, and SIGTERM and the first Ctrl-C as SIGTERM, to the child, which saves and ends. A second Ctrl-C
    kills it. SIGUSR1 is forwarded, too (command/stacks.py).

    Yields:
      a list to which every signal is added.

    Raises:
      PeerError, KeyboardInterrupt: a signal came before the child was started.
    """
    signals: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not children:
            raise _stopped(info, number)
        signals.append(number)
        is_running = children[0].poll() is None
        if number == signal.SIGINT and signals.count(number) > 1:
            children[0].kill()
        elif is_running:
            if number == signal.SIGINT:
                os.write(2, on_interrupt)
            # On SIGHUP the child leaves the terminal, too.
            children[0].send_signal(number if number == signal.SIGHUP else signal.SIGTERM)

    def ask_for_stacks(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    with handling_signals(stop), handling_signals(ask_for_stacks, [signal.SIGUSR1]):
        yield signals


def _stopped(info: ProcessInfo, number: int) -> BaseException:
    """What a signal raises while no child is running."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return PeerError(f"process {info.process_index} was stopped by {signal.Signals(number).name} before the start")


@contextmanager
def handling_signals(handler: Callable[[int, Any], None], numbers: Collection[int] | None = None) -> Iterator[None]:
    """Call a handler on signals; None: `dispatch.stop_signals`. On SIGHUP, a lost terminal is left first."""

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            leave_lost_terminal()
        handler(number, frame)

    before = {number: signal.signal(number, handle) for number in (stop_signals() if numbers is None else numbers)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
