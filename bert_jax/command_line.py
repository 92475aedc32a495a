"""Shared by `bert-jax` and `bert-data`: exit codes, one-line errors, versions."""

import contextlib
import importlib.metadata
import io
import itertools
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import bert_jax
from bert_jax import storage
from bert_jax.errors import INTERRUPTED, TRY_AGAIN, PeerError, UserError

MAX_LINE_LENGTH = 2000
"""Characters of an error's line; a longer line, which repeats a long value, loses its middle."""


def run(command: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Call a command; if it fails for a reason that is not a bug, print one line on stderr.

    Args:
      command: returns an exit code; None is 0.
      interrupted: the line to print after Ctrl-C.

    Returns:
      an exit code. 0: done. 2: a user's mistake. 75: a peer is lost; the same command continues the run.
      130: Ctrl-C. 141: the reader of stdout has closed it, as in ``bert-jax schedule CONFIG | head``.

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
            description = storage.describe_error(error)
            if error is not output.error and description is None:
                raise
            line = "" if error is output.error else f"error: {description}"
        with contextlib.suppress(OSError):
            output.flush()
    if output.error and not line:
        if isinstance(output.error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        line, code = f"error: standard output: {output.error.strerror}", 2
    if line:
        line = " ".join(line.splitlines())
        half = MAX_LINE_LENGTH // 2
        print(line if len(line) <= MAX_LINE_LENGTH else f"{line[:half]} ... {line[-half:]}", file=sys.stderr)
    return code


def check_no_empty_words(words: Sequence[str]) -> None:
    """Refuse empty words, such as unset shell variables: an empty path would be the current directory.

    Raises:
      UserError: names the flag, or the position from 1, whose value is empty.
    """
    for position, (before, word) in enumerate(itertools.pairwise(["", *words]), start=1):
        name, equals, value = word.partition("=")
        if equals and not value and name.startswith("--"):
            raise UserError(f"{name} is empty: give it a value")
        if not word and before.startswith("--") and "=" not in before and before != "--":
            raise UserError(f"{before} is empty: give it a value")
        if not word:
            raise UserError(f"argument {position} is empty: give it a value")


def version_line(name: str) -> str:
    """Return the line that ``--version`` prints."""
    jax, jaxlib = (importlib.metadata.version(package) for package in ("jax", "jaxlib"))
    return f"{name} {bert_jax.__version__} (jax {jax}, jaxlib {jaxlib}, Python {platform.python_version()})"


class _Output:
    """stdout that stores the error with which writing failed, and escapes characters that cannot be encoded."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.error: OSError | None = None
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except OSError as error:
            self.error = error
            # The interpreter flushes stdout once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise
