"""Stacks of all threads of a process and of the reader processes that it starts; ``kill -USR1`` asks for them.

faulthandler writes them in C, whatever the process is waiting for, to a file on the local disk for each process.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

_DIRECTORY_ENV = "BERT_JAX_STACKS"
"""Environment variable of reader processes: the directory with the files, whose names are process ids."""


def write_stacks_on_signal() -> int | None:
    """Called in a reader process: from now on SIGUSR1 writes its stacks. Returns the descriptor of the file."""
    directory = os.environ.get(_DIRECTORY_ENV, "")
    if not os.path.isdir(directory):  # noqa: PTH112 ("" is no path)
        return None
    file = os.open(Path(directory) / str(os.getpid()), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return file


def ignore_requests() -> None:
    """SIGUSR1 ends no process: outside of a `Stacks`, as while corpora are opened, nothing else would handle it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Stacks:
    """A context manager: inside it, SIGUSR1 to this process or to its reader processes writes stacks to local files.

    Where no directory for temporary files can be written, there are no stacks, and SIGUSR1 is ignored.
    """

    def __enter__(self) -> "Stacks":
        self._file, self._directory, self._before = None, None, None
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="bert_jax-stacks-"))
            os.environ[_DIRECTORY_ENV] = str(self._directory)
            self._file = write_stacks_on_signal()
        except OSError:
            self._before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        return self

    def __exit__(self, *exception: object) -> None:
        os.environ.pop(_DIRECTORY_ENV, None)
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)
        if self._file is not None:
            faulthandler.unregister(signal.SIGUSR1)
            os.close(self._file)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def were_asked_for(self) -> bool:
        """Whether SIGUSR1 has come since the last call of `collect`."""
        return self._file is not None and os.fstat(self._file).st_size > 0

    def collect(self, seconds: float) -> str:
        """Stacks of this process, those of the moment of SIGUSR1 if it has come, and of its reader processes.

        Args:
          seconds: for the reader processes to write theirs.
        """
        if self._file is None or self._directory is None:
            return "no stacks: no directory for temporary files can be written\n"
        if not self.were_asked_for():
            faulthandler.dump_traceback(self._file, all_threads=True)
        own = str(os.getpid())
        files = sorted(self._directory.iterdir(), key=lambda file: (file.name != own, file.name))
        for file in files:
            if file.name != own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(file.name), signal.SIGUSR1)
        time.sleep(seconds if len(files) > 1 else 0.0)
        texts = [f"process id {file.name}\n{file.read_text(errors='replace')}" for file in files]
        for file in files:
            os.truncate(file, 0)
        return "\n".join(texts)
