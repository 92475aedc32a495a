"""The user's command that is started at events of a run (``--on-event``).

A thread runs the commands of the events one after the other, so that no step waits for them. A command that fails, or
takes longer than `HOOK_SECONDS`, costs one line of the error output; the run goes on.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import jax

from bert_jax.command.dispatch import explain_error
from bert_jax.distributed.supervised import WORKER_ENV
from bert_jax.errors import printable
from bert_jax.storage.paths import StoredPath

HOOK_SECONDS = 10.0
"""Time of one command; then it is killed with its process group."""
MAX_MESSAGE = 2000
"""Characters of a message."""
OF_ANY_PROCESS = ("stall",)
"""Events that every process reports; process 0 alone reports the others."""

OnEvent = Callable[[str, int | None, str], None]
"""Called with the event, the step that it belongs to (None: unknown) and one line about it."""


def ignore_event(event: str, step: int | None, message: str) -> None:
    """The `OnEvent` of a run without a command."""


class EventHook:
    """A context manager: on exit, it reports an exception as ``error`` or ``stop`` and waits for the commands."""

    def __init__(self, command: str | None, workdir: StoredPath):
        """Starts nothing.

        Args:
          command: for ``sh -c``; None: nothing is ever started.
          workdir: of the run.
        """
        self._command, self._workdir, self._process = command, workdir, jax.process_index()
        self._events: queue.SimpleQueue[dict[str, str] | None] = queue.SimpleQueue()
        self._running: subprocess.Popen | None = None
        self._thread = threading.Thread(target=self._run_all, daemon=True)

    def __enter__(self) -> "EventHook":
        if self._command is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            line, code = explain_error(error) or (f"{type(error).__name__}: {error}", 1)
            self.report("stop" if isinstance(error, KeyboardInterrupt) else "error", None, line, code)
        if self._command is None:
            return
        self._events.put(None)
        try:
            self._thread.join()
        except KeyboardInterrupt:  # it ends the wait
            if error is None:
                raise
        finally:
            self._kill()

    def report(self, event: str, step: int | None, message: str = "", exit_code: int | None = None) -> None:
        """Start the command for an event, after those of the events before it; returns at once.

        Args:
          event: its name.
          step: it belongs to; None: unknown.
          message: about it; it becomes one line.
          exit_code: of the run, if it ends.
        """
        if self._command is None or (self._process and event not in OF_ANY_PROCESS):
            return
        values = {
            "EVENT": event,
            "STEP": "" if step is None else str(step),
            "MESSAGE": printable(message)[:MAX_MESSAGE],
            "EXIT_CODE": "" if exit_code is None else str(exit_code),
            "WORKDIR": str(self._workdir),
            "PROCESS": str(self._process),
        }
        self._events.put({f"BERT_JAX_{name}": value for name, value in values.items()})

    def _run_all(self) -> None:
        while (variables := self._events.get()) is not None:
            if problem := self._run(variables):
                print(f"warning: --on-event, {variables['BERT_JAX_EVENT']}: {problem}", file=sys.stderr)

    def _run(self, variables: dict[str, str]) -> str:
        """Run the command; returns what went wrong."""
        # Without the variable by which a command of bert-jax would take itself for a supervised child.
        environment = {name: value for name, value in os.environ.items() if name != WORKER_ENV}
        try:
            output = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # replaced, or closed
            output = subprocess.DEVNULL
        try:
            self._running = subprocess.Popen(
                ["sh", "-c", str(self._command)],
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C of a terminal does not reach it
            )
            code = self._running.wait(HOOK_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            return f"the command took longer than {HOOK_SECONDS:g} s and was killed"
        except OSError as error:
            return f"the command cannot be started ({error.strerror})"
        return f"the command ended with exit code {code}" if code else ""

    def _kill(self) -> None:
        running = self._running
        if running is not None and running.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
