"""SIGTERM, SIGHUP and Ctrl-C while a run trains: it saves and stops. A second Ctrl-C ends the process at once."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from bert_jax.command.dispatch import stop_signals
from bert_jax.distributed.supervisor import SAVING, handling_signals
from bert_jax.errors import INTERRUPTED
from bert_jax.storage import lock

_calls = itertools.count(1)
"""Numbers of the calls in all contexts of a process, the same in all processes."""


class StopRequest:
    """Whether to save and stop; called after every step."""

    def __init__(self, sync_point_reached: Callable[[], bool] | None = None):
        """Starts without a request.

        Args:
          sync_point_reached: replaces this process's own signals if several processes decide together.
        """
        self.interrupted = False
        """Whether Ctrl-C was the reason."""
        self._requested, self._stepped, self._sync_point_reached = False, False, sync_point_reached

    def __call__(self) -> bool:
        """Return whether to save after this step and stop."""
        self._stepped = True
        return self._requested if self._sync_point_reached is None else self._sync_point_reached()

    def _handle(self, number: int, frame: object) -> None:
        self._requested = True
        self.interrupted = self.interrupted or number == signal.SIGINT

    def _watch(self, descriptor: int) -> None:
        """Handle Ctrl-C in a thread: the main thread may compile for minutes before it handles signals."""
        with open(descriptor, "rb", buffering=0) as numbers:
            saving = False
            while number := numbers.read(1):
                if number[0] != signal.SIGINT:
                    continue
                if saving or not self._stepped:
                    # Not to sys.stderr, whose lock the main thread may hold.
                    os.write(
                        2, b"\nstopped without saving; the same command continues from the newest checkpoint, if any\n"
                    )
                    lock.release_all()
                    os._exit(INTERRUPTED)
                saving = True
                os.write(2, SAVING)


_active: StopRequest | None = None
"""That of the outermost context of this process."""


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn signals into a request to stop, inside the context; for the main thread.

    Before the first step there is nothing to save, and Ctrl-C ends the process. Several processes all stop after the
    same step: jax catches SIGTERM, which SIGHUP is turned into, and chooses a step that no process has passed; their
    supervisors handle Ctrl-C (supervisor.py). A context in another one has the request of the outer one, which a signal
    between the runs of several seeds reaches, too.
    """
    if jax.distributed.is_initialized():
        # jax waits for one more than the highest number it was given; steps do not begin at 1, and may go back.
        hangup = {signal.SIGHUP}.intersection(stop_signals())
        with handling_signals(lambda number, frame: signal.raise_signal(signal.SIGTERM), hangup):
            yield StopRequest(lambda: multihost_utils.reached_preemption_sync_point(next(_calls)))
        return
    global _active
    if _active is not None:
        _active._stepped = False
        yield _active
        return
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with handling_signals(request._handle):
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=request._watch, args=[reader], daemon=True)
        thread.start()
        try:
            _active = request
            yield request
        finally:
            _active = None
            signal.set_wakeup_fd(wakeup)
            os.close(writer)  # the thread reads to the end and closes the other end
            thread.join()
