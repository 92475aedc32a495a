"""Initialisation of a reader process: it ignores the run's signals and exits when the run exits."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def init_reader_process(worker_index: int, worker_count: int) -> None:
    """Ignores SIGTERM and SIGINT, and exits as soon as the parent process is gone, however it ended.

    A scheduler sends SIGTERM to every process of a job: a reader that exited on it would prevent the last save.
    """
    del worker_index, worker_count
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(multiprocessing.parent_process(),), daemon=True).start()


def _exit_with_parent(parent: "multiprocessing.process.BaseProcess | None") -> None:
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
