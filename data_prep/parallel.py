"""Maps a function over tasks in worker processes: ordered results, bounded memory, progress within a task."""

import collections
import contextlib
import ctypes
import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from bert_jax.command.progress import progress_bar
from bert_jax.errors import UserError

Argument = TypeVar("Argument")
Returned = TypeVar("Returned")

_IN_FLIGHT_PER_WORKER = 3
_SECONDS_BETWEEN_UPDATES = 0.2

_stop_requested: ctypes.c_bool | None = None
"""In a worker: whether its pool ends with an exception. Shared without a lock, which a killed process could keep."""


class _StopRequestedError(Exception):
    """Ends the task of a worker whose pool ends with an exception, which is reported instead of this one."""


def _end_if_requested() -> None:
    if _stop_requested is not None and _stop_requested.value:
        raise _StopRequestedError


class SharedProgress:
    """A number of bytes to which all workers add: a task that reads a file can take long.

    It is passed to workers as an argument of their initializer.
    """

    def __init__(self):
        self._bytes = multiprocessing.get_context("spawn").Value("q", 0)

    def add(self, size: int) -> None:
        """Adds what was done. Ends the task if the pool of this worker ends with an exception."""
        _end_if_requested()
        with self._bytes.get_lock():
            self._bytes.value += size

    @contextlib.contextmanager
    def shown(self, description: str, total: int) -> Iterator[None]:
        """Shows it on a progress bar; `total` in bytes."""
        ended = threading.Event()

        # Read without the lock, which a killed process may keep.
        def show() -> None:
            while not ended.wait(_SECONDS_BETWEEN_UPDATES):
                bar.update(self._bytes.get_obj().value - bar.n)

        with progress_bar(description, total, "B") as bar:
            thread = threading.Thread(target=show, daemon=True)
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                bar.update(self._bytes.get_obj().value - bar.n)


class WorkerPool(contextlib.AbstractContextManager):
    """A pool of worker processes; with `count` 1, the work is done in this process.

    Workers are spawned, not forked, because libraries in use here have threads, which do not survive a fork. After an
    exception, Ctrl-C included, no further task starts, and tasks end when they next add to a `SharedProgress`.
    """

    def __init__(self, count: int, initializer: Callable[..., None], initargs: tuple = ()):
        """The initializer, which must be importable, runs once in each process, before its first task."""
        self._count = count
        self._initialized = False
        self._initialize = functools.partial(initializer, *initargs)
        self._pool = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            self._stop_requested = context.RawValue(ctypes.c_bool, False)
            self._pool = ProcessPoolExecutor(
                count, context, _init_worker, (self._stop_requested, initializer, initargs)
            )
            # Submits tasks, which may start a process: one whose start is interrupted would never be joined, and one
            # that a signal reaches at its start prints a traceback. This thread runs no handlers, and processes that
            # it starts have its signal mask.
            signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
            self._submitter = ThreadPoolExecutor(
                1, initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, signals)
            )

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        if self._pool:
            self._stop_requested.value = error is not None
            self._pool.shutdown(cancel_futures=True)
            self._submitter.shutdown()

    def _submit(self, function: Callable[[Argument], Returned], task: Argument) -> Future[Returned]:
        return self._submitter.submit(self._pool.submit, _run, function, task).result()

    def map(
        self, function: Callable[[Argument], Returned], tasks: Iterable[Argument], name: Callable[[Argument], str]
    ) -> Iterator[Returned]:
        """Results in the order of the tasks.

        At most three tasks per worker are in flight, which bounds the memory.

        Args:
          function: importable or picklable.
          tasks: read lazily.
          name: of a task, for the message if its process dies.

        Raises:
          UserError: a worker process was killed, usually because memory ran out.
        """
        if self._pool is None:
            if not self._initialized:
                self._initialize()
                self._initialized = True
            yield from map(function, tasks)
            return
        pending = collections.deque()
        with _explained(lambda: name(pending[0][0] if pending else task)):
            for task in tasks:
                pending.append((task, self._submit(function, task)))
                if len(pending) >= self._count * _IN_FLIGHT_PER_WORKER:
                    yield pending[0][1].result()
                    pending.popleft()
            while pending:
                yield pending[0][1].result()
                pending.popleft()

    def map_unordered(
        self, function: Callable[[Argument], Returned], tasks: Iterable[Argument], name: Callable[[Argument], str]
    ) -> Iterator[Returned]:
        """`map`, but each result as soon as it is there: a long task delays no other."""
        if self._pool is None:
            yield from self.map(function, tasks, name)
            return
        pending: dict[Future[Returned], Argument] = {}
        waiting = iter(tasks)
        with _explained(lambda: name(next(iter(pending.values())))):
            while True:
                for task in itertools.islice(waiting, self._count * _IN_FLIGHT_PER_WORKER - len(pending)):
                    pending[self._submit(function, task)] = task
                if not pending:
                    return
                done = wait(pending, return_when=FIRST_COMPLETED).done
                for future in [future for future in pending if future in done]:  # in order: the first error counts
                    yield future.result()
                    del pending[future]


@contextlib.contextmanager
def _explained(where: Callable[[], str]) -> Iterator[None]:
    """Turns the death of a process into a UserError that names a task."""
    try:
        yield
    except BrokenProcessPool as error:
        raise UserError(
            f"a worker process died at or after {where()}; was it out of memory? Start the same command again,"
            " perhaps with fewer --workers"
        ) from error


def ordered_map(
    function: Callable[[Argument], Returned],
    tasks: Iterable[Argument],
    workers: int,
    name: Callable[[Argument], str],
    initializer: Callable[..., None],
    initargs: tuple = (),
) -> Iterator[Returned]:
    """`WorkerPool.map` with a pool for this call only."""
    with WorkerPool(workers, initializer, initargs) as processes:
        yield from processes.map(function, tasks, name)


def _init_worker(stop_requested: ctypes.c_bool, initializer: Callable[..., None], initargs: tuple) -> None:
    global _stop_requested
    _stop_requested = stop_requested
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the pool ends workers with it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    initializer(*initargs)


def _run(function: Callable[[Argument], Returned], task: Argument) -> Returned:
    _end_if_requested()  # a task that the pool had queued
    return function(task)


def _exit_with_parent() -> None:
    """Ends this worker when its parent is gone: a killed parent cannot stop its workers."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
