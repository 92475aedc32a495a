"""What a reader process does before it reads: make sure that it ends with the run, and not before it."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def begin(worker: int, workers: int) -> None:
    """Ignore signals that are meant for the run, and end as soon as the run is gone, however it went.

    A scheduler's SIGTERM reaches every process of a job: readers that died of it would spoil the save.
    """
    del worker, workers
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(run: "multiprocessing.process.BaseProcess | None") -> None:
    if run is not None:
        multiprocessing.connection.wait([run.sentinel])
        os._exit(1)
