"""Renders sections as Markdown (CommonMark with the tables of GitHub), for cards at the Hugging Face Hub.

Text is escaped: names of files, or documents, make no markup and no HTML.
"""

import re
from collections.abc import Iterable, Sequence

from bert_jax.errors import printable
from bert_jax.report import Command, Excerpt, Note, ReportBlock, Section, Table

_MARKUP = re.compile(r"[\\`*_\[\]<>|~&#$]")


def render(sections: Sequence[Section]) -> str:
    """The text of the sections, with a final line end.

    Raises:
      ValueError: a section has a plot.
    """
    parts = []
    for section in sections:
        parts.append(f"{'#' * section.level} {escape(section.title)}")
        parts += ["\n".join(_lines(block)) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """The text on one line, in which no character is markup; control characters are escaped as in Python."""
    return _MARKUP.sub(r"\\\g<0>", printable(text))


def _lines(block: ReportBlock) -> list[str]:
    match block:
        case Note():
            return [escape(f"warning: {block.text}" if block.warning else block.text)]
        case Command():
            return ["    " + printable(block.text)]
        case Table():
            side = "---" if block.words else "---:"
            header, *rows = (_row(map(escape, row)) for row in (block.header, *block.rows))
            return [header, _row(["---", *[side] * (len(block.header) - 1)]), *rows]
        case Excerpt():
            lines = [printable(line) for line in block.lines]
            return [f"{escape(block.caption)}:", "", *(f"    {line}" for line in [*lines, *["..."] * block.cut])]
        case _:
            raise ValueError(f"{type(block).__name__} has no form in Markdown")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
