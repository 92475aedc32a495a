"""Maps a function over tasks in worker processes: ordered results, bounded memory."""

import collections
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from bert_jax.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")

_IN_FLIGHT_PER_WORKER = 3


def ordered_map(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    workers: int,
    name: Callable[[Task], str],
    initializer: Callable[..., None],
    initargs: tuple = (),
) -> Iterator[Result]:
    """Results in the order of the tasks, from `workers` processes, or from this one if that is 1.

    At most three tasks a worker are under way, so that a fast source does not fill the memory. Workers
    are spawned, not forked: libraries here have threads, which a fork breaks.

    Args:
      function, initializer, initargs: importable, picklable; the initializer runs once in each process.
      tasks: read as needed.
      name: what a task is called in the message when its process dies.

    Raises:
      UserError: a worker process was killed, most often for want of memory.
    """
    if workers == 1:
        initializer(*initargs)
        yield from map(function, tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (initializer, initargs))
    pending = collections.deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(function, task)))
            if len(pending) >= workers * _IN_FLIGHT_PER_WORKER:
                yield pending[0][1].result()
                pending.popleft()
        while pending:
            yield pending[0][1].result()
            pending.popleft()
    except BrokenProcessPool as error:
        where = name(pending[0][0] if pending else task)
        raise UserError(
            f"a worker process died at or after {where}; was it out of memory? Try fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(initializer: Callable[..., None], initargs: tuple) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    initializer(*initargs)


def _die_with_parent() -> None:
    """Ends this worker when its parent is gone: killed, it could not tell us, and we would wait for ever."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
