"""Exceptions that are not bugs (a user's mistake, a lost process), exit codes, and parts of error messages."""

import difflib
import importlib.metadata
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path


class UserError(Exception):
    """A request of the user cannot be carried out.

    The message is one line: what is wrong, where, and what to do about it. The commands print it after `error:`
    and exit with code 2; a traceback therefore always means a bug.
    """


class OutageError(UserError):
    """An object store cannot be connected to. It may come back, so the commands exit with code 75."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def require(condition: bool, message: str) -> None:
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def short_repr(value: object) -> str:
    """Return `repr(value)`, truncated to 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more than 4,300 digits, or something with one
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'X'?`` with the known word that is closest to `word`; "" if none is close."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{matches[0]}'?" if matches else ""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra (setup.cfg), however bert_jax was installed."""
    try:
        requirements = importlib.metadata.requires("bert_jax") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return f"pip install {shlex.quote(f'{Path(__file__).parents[1]}[{extra}]')}"
    extra_marker = re.compile(rf"""extra == ["']{extra}["']""")
    packages = [text.partition(";")[0].strip() for text in requirements if extra_marker.search(text)]
    return f"pip install {shlex.join(packages)}"


class PeerError(Exception):
    """Another process of the run has ended, or is late.

    The message is one line that names it. The commands print it and exit with code 75, "try again": the same command
    continues from the newest checkpoint.
    """


class DeviceOrConnectionError(Exception):
    """A device, or a connection between processes, failed while a program ran.

    The message is one line. The commands print it and exit with code 75, as for `PeerError`.
    """


TRY_AGAIN = 75
"""Exit code (EX_TEMPFAIL of sysexits.h): the run is not finished, and the same command continues it."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, 128 + SIGINT. Launchers restart a run after `TRY_AGAIN`, but not after this code."""


def printable(text: str) -> str:
    """One line in which characters that control a terminal are escaped, e.g. names from a damaged file."""
    line = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
