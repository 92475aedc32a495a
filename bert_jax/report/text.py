"""Renders sections for a terminal: aligned columns, and bars of block characters."""

import math
import textwrap
from collections.abc import Sequence

from bert_jax.report import (
    Bars,
    Command,
    Curves,
    Excerpt,
    Heatmap,
    Histogram,
    Intervals,
    Note,
    ReportBlock,
    Section,
    Series,
    Table,
)

_WIDTH = 100
_WIDEST = 160
"""Wider tables of heatmaps are left out."""
_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"


def render(sections: Sequence[Section]) -> str:
    """The text of the sections, without a final line end."""
    parts = []
    for section in sections:
        underline = "=-"[section.level - 1] * len(section.title)
        parts.append(f"{section.title}\n{underline}")
        parts += ["\n".join(_lines(block)) for block in section.blocks]
    return "\n\n".join(parts)


def _lines(block: ReportBlock) -> list[str]:
    match block:
        case Note():
            text = f"warning: {block.text}" if block.warning else block.text
            return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
        case Command():
            return ["    " + block.text]
        case Table():
            lines = _columns([block.header, *block.rows], left_aligned=block.words)
            if not block.marked:
                return lines
            return [f"{'* ' if row in block.marked else '  '}{line}" for row, line in enumerate(lines, -1)]
        case Bars():
            rows = [(label, f"{share:.2%}") for label, share, _ in block.scaled_bars]
            return _with_bars(_columns(rows), [length for *_, length in block.scaled_bars])
        case Histogram():
            rows = [
                (b.label, f"{b.count:,}", f"{count:.1%}", f"{total:.1%}") for b, count, total in block.bins_with_shares
            ]
            header, *lines = _columns([(block.title, block.things, "", f"of all {block.unit}"), *rows])
            longest = max(count for _, count, _ in block.bins_with_shares)
            return [header, *_with_bars(lines, [count / longest for _, count, _ in block.bins_with_shares])]
        case Excerpt():
            lines = [f"{block.caption}:"]
            for line in block.lines:
                lines += textwrap.wrap(line, _WIDTH - 4, initial_indent="  · ", subsequent_indent="    ")
            return lines + ["    ..."] * block.cut
        case Curves():
            header = ("", f"by {block.x_label}", "first", "last")
            return [f"{block.title}:", *_columns([header, *(_curve(one) for one in block.series)])]
        case Intervals():
            rows = [(one.name, *(f"{value:.4g}" for value in one[1:])) for one in block.intervals]
            margin = [] if block.margin is None else [f"equivalent within ±{block.margin:.4g}"]
            columns = _columns([(block.label, "estimate", "low", "high"), *rows])
            return [f"{block.title}:", *columns, *margin]
        case Heatmap():
            return _heatmap(block)


def _heatmap(block: Heatmap) -> list[str]:
    """A table if it is narrow enough, and the extreme values."""
    unit = f" ({block.unit})" if block.unit else ""
    header = (f"{block.row_label} \\ {block.column_label}", *block.columns)
    table = _columns([header, *((name, *numbers) for name, numbers in zip(block.rows, block.numbers, strict=True))])
    finite = [
        (value, f"{value:.3g} at {row}, {column}")
        for row, values in zip(block.rows, block.values, strict=True)
        for column, value in zip(block.columns, values, strict=True)
        if math.isfinite(value)
    ]
    ends = [f"smallest {min(finite)[1]}; largest {max(finite)[1]}"] if finite else []
    return [f"{block.title}{unit}:", *(table if len(table[0]) <= _WIDEST else ()), *ends]


def _curve(series: Series) -> tuple[str, ...]:
    """Name, sparkline of the curve, first and last value."""
    values = [value for value in series.y if math.isfinite(value)]
    if not values:
        return series.name, "", "", ""
    low, high = min(values), max(values)
    columns = min(len(values), _BAR)
    shown = [values[i * (len(values) - 1) // max(columns - 1, 1)] for i in range(columns)]
    levels = [round((value - low) / (high - low or 1) * (len(_LEVELS) - 1)) for value in shown]
    return series.name, "".join(_LEVELS[level] for level in levels), f"{values[0]:.5g}", f"{values[-1]:.5g}"


def _with_bars(lines: Sequence[str], shares: Sequence[float]) -> list[str]:
    """Lines with a bar in eighths of a character; positive shares have at least one eighth."""
    eighths = [max(round(share * _BAR * 8), share > 0) for share in shares]
    bars = ["█" * (eighth // 8) + _EIGHTHS[eighth % 8].strip() for eighth in eighths]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]


def _columns(rows: Sequence[Sequence[str]], left_aligned: bool = False) -> list[str]:
    """Lines with aligned cells; the first cells are left-aligned, the others right-aligned by default."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [cell.ljust(width) if left_aligned else cell.rjust(width) for cell, width in others]
        lines.append("  ".join([first[0].ljust(first[1]), *cells]).rstrip())
    return lines
