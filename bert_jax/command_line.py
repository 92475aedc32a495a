"""What `bert-jax` and `bert-data` have in common: exit codes, the one line of an error, versions."""

import contextlib
import importlib.metadata
import io
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import Any

import bert_jax
from bert_jax import storage
from bert_jax.errors import INTERRUPTED, TRY_AGAIN, PeerError, UserError

LINE = 2000
"""Characters of an error's line; of a longer one, which repeats a long value, the middle is left out."""


def run(command: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Call a command; print what the user has to know about its failure as one line on stderr.

    Args:
      command: returns an exit code; None is 0.
      interrupted: the line after Ctrl-C.

    Returns:
      an exit code. 0: done. 2: the user has something to change. 75: a peer is gone, the same command continues.
      130: Ctrl-C. 141: the reader of stdout closed it, as in ``bert-jax schedule CONFIG | head``.

    Raises:
      Exception: a bug.
    """
    line, code = "", 2
    output = _Output(sys.stdout or io.StringIO())
    with contextlib.redirect_stdout(output):
        try:
            code = command() or 0
        except SystemExit as stop:
            line = stop.code if isinstance(stop.code, str) else ""
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except UserError as error:
            line = f"error: {error}"
        except PeerError as error:
            line, code = f"error: {error}: the same command continues from the newest checkpoint", TRY_AGAIN
        except KeyboardInterrupt as interrupt:
            line, code = str(interrupt) or interrupted, INTERRUPTED
        except Exception as error:
            described = storage.trouble(error)
            if error is not output.lost and described is None:
                raise
            line = "" if error is output.lost else f"error: {described}"
        with contextlib.suppress(OSError):
            output.flush()
    if output.lost and not line:
        if isinstance(output.lost, BrokenPipeError):
            return 128 + signal.SIGPIPE
        line, code = f"error: standard output: {output.lost.strerror}", 2
    if line:
        line = " ".join(line.splitlines())
        print(line if len(line) <= LINE else f"{line[: LINE // 2]} ... {line[-LINE // 2 :]}", file=sys.stderr)
    return code


def versions(name: str) -> str:
    """One line for ``--version``."""
    jax, jaxlib = (importlib.metadata.version(package) for package in ("jax", "jaxlib"))
    return f"{name} {bert_jax.__version__} (jax {jax}, jaxlib {jaxlib}, Python {platform.python_version()})"


class _Output:
    """stdout that keeps the error which ended it, and can show every character."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.lost: OSError | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except OSError as error:
            self.lost = error
            # The interpreter flushes stdout once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise
