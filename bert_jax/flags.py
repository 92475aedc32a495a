"""What the words of a command line say, and one line for those that say nothing."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any, Literal

import tyro

from bert_jax.errors import UserError


def micro_batch(text: str) -> int | Literal["auto"]:
    """What ``--micro-batch`` says; UserError if it is neither a number of rows nor auto."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--micro-batch {text}: give a number of rows on each device, or auto")
    return int(text)


def window(text: str) -> tuple[int, int]:
    """What ``--profile A:B`` says; UserError if it is no such window."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile {text}: write the first update and the one after the last, as in 100:110")
    return int(match[1]), int(match[2])


def parse(kind: type, arguments: Sequence[str], command: str, default: Any = None) -> Any:
    """tyro's parse; what it would frame in a box of many lines becomes one: the text of a UserError."""
    box = io.StringIO()
    given = {} if default is None else {"default": default}
    try:
        if "--help" in arguments or "-h" in arguments:
            return tyro.cli(kind, args=arguments, prog=f"bert-jax {command}", **given)
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(box):
            return tyro.cli(kind, args=arguments, prog=f"bert-jax {command}", **given)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """What a framed message says, without its frame, title, help text and footer."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[│╭╮╰╯]", "", line).strip() for line in plain.splitlines()]
    parts: list[list[str]] = [[]]
    for line in filter(None, lines):
        if re.fullmatch(r"[─-]{3,}|.*[─]{3,}", line):
            parts.append([])
        else:
            parts[-1].append(line)
    message, *hints = [" ".join(part) for part in parts[1:] if part]
    return " ".join([message] + [hint for hint in hints if hint.startswith("Perhaps you meant")])
