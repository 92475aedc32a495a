"""Renders sections for a terminal: aligned columns, and bars of block characters."""

import functools
import textwrap
from collections.abc import Sequence

from data_prep.inspection.report import Bars, Command, Histogram, Note, Section, Table
from data_prep.inspection.statistics import Sample

_WIDTH = 100
_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def render(sections: Sequence[Section]) -> str:
    """The text of the sections, without a final line end."""
    parts = []
    for section in sections:
        underline = "=-"[section.level - 1] * len(section.title)
        parts.append(f"{section.title}\n{underline}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts)


@functools.singledispatch
def _block(block) -> str:
    raise TypeError(f"no text for a {type(block).__name__}")


@_block.register
def _(block: Note) -> str:
    return textwrap.fill(block.text, _WIDTH, break_long_words=False, break_on_hyphens=False)


@_block.register
def _(block: Command) -> str:
    return "    " + block.text


@_block.register
def _(block: Table) -> str:
    return "\n".join(_columns([block.header, *block.rows], left_aligned=block.words))


@_block.register
def _(block: Histogram) -> str:
    count, tokens = (sum(getattr(one, what) for one in block.bins) for what in ("count", "tokens"))
    rows = [(block.title, block.things, "", "of all tokens")]
    rows += [(b.label, f"{b.count:,}", f"{b.count / count:.1%}", f"{b.tokens / tokens:.1%}") for b in block.bins]
    longest = max(one.count for one in block.bins)
    bars = ["", *(_bar(one.count / longest) for one in block.bins)]
    return "\n".join(f"{line}  {bar}".rstrip() for line, bar in zip(_columns(rows), bars, strict=True))


@_block.register
def _(block: Bars) -> str:
    greatest = 1 if block.whole else max(block.shares)
    rows = [(label, f"{share:.2%}") for label, share in zip(block.labels, block.shares, strict=True)]
    bars = (_bar(share / greatest) for share in block.shares)
    return "\n".join(f"{line}  {bar}".rstrip() for line, bar in zip(_columns(rows), bars, strict=True))


@_block.register
def _(block: Sample) -> str:
    lines = [f"document {block.document:,}, {block.tokens:,} tokens:"]
    for sentence in block.sentences:
        lines += textwrap.wrap(sentence, _WIDTH - 4, initial_indent="  · ", subsequent_indent="    ")
    return "\n".join(lines + ["    ..."] * block.cut)


def _bar(share: float) -> str:
    """A bar in eighths of a character; positive shares have at least one eighth."""
    eighths = max(round(share * _BAR * 8), share > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _columns(rows: Sequence[Sequence[str]], left_aligned: bool = False) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [
            cell.ljust(width) if left_aligned else cell.rjust(width)
            for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
