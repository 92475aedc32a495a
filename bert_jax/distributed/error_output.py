"""The standard error of training processes that write through a pipe, without what the runtime writes about peers.

When a peer ends, jax's distributed service writes errors and stack traces in C++ to file descriptor 2 of each process.
They are held back until it is known whether they are needed. All other lines are passed on at once. Python's
``sys.stderr`` in the child is not the pipe (`supervisor.CHILD`), so that progress bars see the terminal.
"""

import os
import re
import threading
from collections import deque

CONSEQUENCE = re.compile(
    rb"[WEF]\d{4} \S+ +\d+ (coordination_\w+\.cc|preemption_sync\w+\.cc|client\.h):\d+\]"
    rb"|\*\*\* (Check failure|SIGABRT)|PC: @| +@ +0x|terminate called|  what\(\):"
)
"""Beginning of a line that tells of another process's end."""
LOG_LINE = re.compile(rb"[IWEF]\d{4} \S+ +\d+ \S+:\d+\] ")
"""Beginning of a line of absl's log in C++. Lines without it continue the one before."""
MAX_LINES = 1000
"""Held lines of a process; the oldest are lost."""
DRAIN_SECONDS = 2.0
"""For the last lines of a child that has ended; reader processes can keep its end of the pipe open for longer."""


class ErrorOutput:
    """The standard error of the children of one supervisor."""

    def __init__(self):
        self._held: deque[bytes] = deque(maxlen=MAX_LINES)
        self._threads: list[threading.Thread] = []

    def open_pipe(self) -> int:
        """The end of a new pipe for a child to write to; the caller closes it when the child has started."""
        read_end, write_end = os.pipe()
        thread = threading.Thread(target=self._pass_on, args=[read_end], daemon=True)
        thread.start()
        self._threads.append(thread)
        return write_end

    def _pass_on(self, read_end: int) -> None:
        held = False
        with open(read_end, "rb") as lines:
            for line in lines:
                held = bool(CONSEQUENCE.match(line)) or (held and not LOG_LINE.match(line))
                if held:
                    self._held.append(line)
                else:
                    os.write(2, line)

    def drain(self) -> None:
        """Wait until all that the children, which have ended, wrote is passed on or held back."""
        while self._threads:
            self._threads.pop().join(DRAIN_SECONDS)

    def release(self) -> None:
        """Write the lines that were held back."""
        while self._held:
            os.write(2, self._held.popleft())
