"""Shared by `bert-jax` and `bert-data`: choice of the command, exit codes, one-line errors."""

import contextlib
import importlib.metadata
import inspect
import io
import itertools
import os
import platform
import select
import shutil
import signal
import stat
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bert_jax
from bert_jax.errors import (
    INTERRUPTED,
    TRY_AGAIN,
    DeviceOrConnectionError,
    OutageError,
    PeerError,
    UserError,
    did_you_mean,
    printable,
)
from bert_jax.storage.failures import describe_error, is_object_store_error

MAX_LINE_LENGTH = 2000
"""Characters of an error's line; a longer line, which repeats a long value, loses its middle."""


def run_guarded(command: Callable[[], int | None], interrupted: str = "stopped") -> int:
    """Call a command; if it fails for a reason that is not a bug, print one line on stderr.

    Args:
      command: returns an exit code; None is 0.
      interrupted: the line to print after Ctrl-C.

    Returns:
      an exit code. 0: done. 2: a user's mistake. 75: a peer, a device or an object store is lost; the same command
      continues the run. 130: Ctrl-C. 141: the reader of stdout has closed it, as in ``bert-jax schedule | head``. If
      the reader of stderr has, the command goes on, and its messages are lost.

    Raises:
      Exception: a bug.
    """
    line, code = "", 2
    output = _Output(sys.stdout or io.StringIO())
    errors = _Output(sys.stderr or io.StringIO(), stops=False)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code = command() or 0
        except BaseException as error:
            explained = ("", 2) if error is output.error else explain_error(error, interrupted)
            if explained is None:
                raise
            line, code = explained
        with contextlib.suppress(OSError):
            output.flush()
    if output.error and not line:
        if isinstance(output.error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        line, code = f"error: standard output: {output.error.strerror}", 2
    if line:
        line = printable(line)
        half = MAX_LINE_LENGTH // 2
        print(line if len(line) <= MAX_LINE_LENGTH else f"{line[:half]} ... {line[-half:]}", file=errors)
    return code


def explain_error(error: BaseException, interrupted: str = "stopped") -> tuple[str, int] | None:
    """The line that is printed about what ended a command, and its exit code (`run_guarded`); None: a bug.

    Args:
      error: what was raised.
      interrupted: the line after Ctrl-C.
    """
    match error:
        case SystemExit(code=str(line)):
            return line, 1
        case SystemExit(code=int(code)):
            return "", code
        case SystemExit(code=code):
            return "", int(code is not None)
        case UserError():
            return f"error: {error}", TRY_AGAIN if isinstance(error, OutageError) else 2
        case PeerError() | DeviceOrConnectionError():
            return f"error: {error}: the same command continues from the newest checkpoint", TRY_AGAIN
        case KeyboardInterrupt():
            return str(error) or interrupted, INTERRUPTED
        case Exception() if (description := describe_error(error)) is not None:
            return f"error: {description}", TRY_AGAIN if is_object_store_error(error) else 2
    return None


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGHUP (the terminal is gone) and SIGINT (Ctrl-C), without those that are ignored: SIGHUP under `nohup`,
    SIGINT in a command that a script starts with `&`.
    """
    return [
        number
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
        if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN
    ]


def leave_lost_terminal() -> None:
    """After SIGHUP: write to nowhere instead of to a terminal that is gone, which would raise before the save."""
    descriptors = {1, 2}
    with contextlib.suppress(AttributeError, OSError, ValueError):  # replaced, or closed
        descriptors.add(sys.stderr.fileno())
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, 0)
        with contextlib.suppress(OSError):  # closed
            is_terminal = stat.S_ISCHR(os.fstat(descriptor).st_mode)
            if is_terminal and any(events & select.POLLHUP for _, events in poll.poll(0)):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def dispatch(
    program: str,
    commands: Mapping[str, object],
    call: Callable[[str, list[str]], int | None],
    words: Sequence[str],
    about: str = "",
) -> int | None:
    """Call the command that the first word names, or print the overview or the versions.

    Args:
      program: ``bert-jax`` or ``bert-data``.
      commands: by name; the first sentence of each docstring is its line in the overview.
      call: gets the name of the command and the words after it; returns an exit code.
      words: the command line after the program's name.
      about: last paragraph of the overview.

    Raises:
      UserError: there is no such command, or a word is empty.
    """
    if not words:
        names = ", ".join(commands)
        raise UserError(f"a command is missing: commands are {names}; `{program} --help` explains them")
    name, *rest = words
    if name in ("-h", "--help", "--help-all", "help"):
        print(_overview(program, commands, about))
        return 0
    if name in ("-V", "--version"):
        jax, jaxlib = (importlib.metadata.version(package) for package in ("jax", "jaxlib"))
        print(f"{program} {bert_jax.__version__} (jax {jax}, jaxlib {jaxlib}, Python {platform.python_version()})")
        return 0
    if name not in commands:
        hint = did_you_mean(name.lower().replace("_", "-"), commands)
        raise UserError(f"there is no command '{name}': {hint and f'{hint} '}Commands are {', '.join(commands)}")
    _refuse_empty_words(rest)
    return call(name, rest)


def _overview(program: str, commands: Mapping[str, object], about: str) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [f"usage: {program} COMMAND ...", ""]
    for name, kind in commands.items():
        text = f"  {name:<10} {(inspect.getdoc(kind) or '').partition('.')[0]}"
        lines += textwrap.wrap(text, width, subsequent_indent=" " * 13)
    explanation = f"`{program} COMMAND --help` explains a command, `{program} --version` prints versions. {about}"
    return "\n".join([*lines, "", *textwrap.wrap(explanation, width)])


def _refuse_empty_words(words: Sequence[str]) -> None:
    """Refuse empty words, such as unset shell variables: an empty path would be the current directory."""
    for position, (before, word) in enumerate(itertools.pairwise(["", *words]), start=1):
        name, equals, value = word.partition("=")
        if equals and not value and name.startswith("--"):
            raise UserError(f"{name} is empty: give it a value")
        if not word and before.startswith("--") and "=" not in before and before != "--":
            raise UserError(f"{before} is empty: give it a value")
        if not word:
            raise UserError(f"argument {position} is empty: give it a value")


class _Output:
    """stdout or stderr that stores the error with which writing failed, and escapes characters that cannot be encoded.

    Args:
      stream: to write to.
      stops: whether a pipe that nobody reads any more is an error, too; if not, what is written to it is lost.
    """

    def __init__(self, stream: Any, stops: bool = True):
        self._stream, self._stops = stream, stops
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
            # The interpreter flushes the stream once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._stops or not isinstance(error, BrokenPipeError):
                raise
            return operation()
