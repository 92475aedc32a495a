"""Exceptions that are not bugs: a mistake of the user, a process that is gone; and how to install what is missing."""

import difflib
import importlib.metadata
import re
import shlex
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Something the user asked for cannot be done.

    The message is one line: what is wrong, where, and what to do about it. The commands print it
    after `error:` and leave with exit code 2; a traceback therefore always means a bug.
    """


def require(condition: bool, message: str) -> None:
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def brief(value: object) -> str:
    """A value for a message, cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def near(word: str, known: Iterable[str]) -> str:
    """``did you mean 'X'?`` for a word that is almost one of the known; "" if there is none."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{found[0]}'?" if found else ""


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra (setup.cfg), however bert_jax itself was installed."""
    try:
        requirements = importlib.metadata.requires("bert_jax") or []
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return f"pip install {shlex.quote(f'{Path(__file__).parents[1]}[{extra}]')}"
    marked = re.compile(rf"""extra == ["']{extra}["']""")
    packages = [text.partition(";")[0].strip() for text in requirements if marked.search(text)]
    return f"pip install {shlex.join(packages)}"


class PeerError(Exception):
    """Another process of the run is gone or late.

    The message is one line that names it. The commands print it and leave with exit code 75, "try again": the same
    command continues from the newest checkpoint.
    """


TRY_AGAIN = 75
"""Exit code (EX_TEMPFAIL of sysexits.h): the run is not over, and the same command continues it."""

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended, 128 + SIGINT: what restarts a run that ends with `TRY_AGAIN` must not."""
