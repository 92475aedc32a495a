"""Maps a function over tasks in worker processes: ordered results, bounded memory."""

import collections
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from bert_jax.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_IN_FLIGHT_PER_WORKER = 3


class WorkerPool(contextlib.AbstractContextManager):
    """Processes for one piece of work after the other; with `count` 1 there is none but this one.

    They are spawned, not forked: libraries here have threads, which a fork breaks.
    """

    def __init__(self, count: int, initializer: Callable[..., None], initargs: tuple = ()):
        """The initializer, importable, runs once in each process, when there is something to do for it."""
        self._count = count
        self._begun = False
        self._initialize = functools.partial(initializer, *initargs)
        self._pool = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(count, context, _begin, (initializer, initargs))

    def __exit__(self, *_) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], name: Callable[[Task], str]
    ) -> Iterator[Result]:
        """Results in the order of the tasks.

        At most three tasks a worker are under way, so that a fast source does not fill the memory.

        Args:
          function: importable, or picklable.
          tasks: read as needed.
          name: what a task is called in the message when its process dies.

        Raises:
          UserError: a worker process was killed, most often for want of memory.
        """
        if self._pool is None:
            if not self._begun:
                self._initialize()
                self._begun = True
            yield from map(function, tasks)
            return
        pending = collections.deque()
        try:
            for task in tasks:
                pending.append((task, self._pool.submit(function, task)))
                if len(pending) >= self._count * _IN_FLIGHT_PER_WORKER:
                    yield pending[0][1].result()
                    pending.popleft()
            while pending:
                yield pending[0][1].result()
                pending.popleft()
        except BrokenProcessPool as error:
            where = name(pending[0][0] if pending else task)
            raise UserError(
                f"a worker process died at or after {where}; was it out of memory? Start the same command again,"
                " perhaps with fewer --workers"
            ) from error


def ordered_map(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    name: Callable[[Task], str],
    initializer: Callable[..., None],
    initargs: tuple = (),
) -> Iterator[Result]:
    """`WorkerPool.map` with processes for this piece of work alone."""
    with WorkerPool(workers, initializer, initargs) as processes:
        yield from processes.map(function, tasks, name)


def _begin(initializer: Callable[..., None], initargs: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    threading.Thread(target=_die_with_parent, daemon=True).start()
    initializer(*initargs)


def _die_with_parent() -> None:
    """Ends this worker when its parent is gone: killed, it could not tell us, and we would wait for ever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
