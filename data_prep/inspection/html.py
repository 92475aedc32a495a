"""Renders sections as one self-contained HTML page: style and plots are inline, and there is no script."""

import functools
from collections.abc import Sequence
from html import escape

from data_prep.inspection import svg
from data_prep.inspection.report import Bars, Command, Histogram, Note, Section, Table
from data_prep.inspection.statistics import Sample

_STYLE = """
:root { color-scheme: light; }
body { max-width: 50rem; margin: 2rem auto 4rem; padding: 0 1.25rem; background: #fff; color: #1d2430;
  font: 1rem/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 3rem 0 .5rem; }
h1:first-child { margin-top: 0; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; padding-top: .5rem; border-top: 1px solid #d8dee6; }
p { margin: .5rem 0; color: #465264; overflow-wrap: anywhere; }
pre { padding: .6rem .8rem; background: #f3f5f8; border-radius: .3rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem; }
table { border-collapse: collapse; margin: .75rem 0 1.25rem; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem 0 .22rem 1.5rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; }
th:first-child, td:first-child, table.words th, table.words td { text-align: left; overflow-wrap: anywhere; }
th { font-weight: 600; color: #465264; border-bottom: 1px solid #b9c3cf; }
td { border-bottom: 1px solid #edf0f4; }
svg { display: block; width: 100%; height: auto; margin: .75rem 0 1.25rem; }
svg text { font-size: 11px; fill: #465264; }
svg .title { font-size: 13px; font-weight: 600; fill: #1d2430; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .column { fill: #3f78b5; }
svg .track { fill: #e9edf2; }
svg .line { fill: none; stroke: #c8641b; stroke-width: 1.75; }
svg .dot { fill: #c8641b; }
svg .axis { stroke: #7b8797; }
svg .grid { stroke: #e6eaef; }
figure { margin: .9rem 0; padding: .6rem .9rem; border-left: 3px solid #3f78b5; background: #f7f9fb; }
figcaption { font-size: .85rem; color: #465264; }
figure ol { margin: .3rem 0 0; padding-left: 1.4rem; }
figure li::marker { color: #8b97a6; font-size: .8rem; }
@media print {
  html { font-size: 11px; }
  body { max-width: none; margin: 0; }
  h1, h2 { break-after: avoid; }
  table, svg, figure, pre { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


def render(sections: Sequence[Section]) -> str:
    """The page, to be encoded as UTF-8."""
    title = ", ".join(section.title for section in sections if section.level == 1)
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    heading = f"<h{section.level}>{escape(section.title)}</h{section.level}>"
    return "\n".join([heading, *(_block(block) for block in section.blocks)])


@functools.singledispatch
def _block(block) -> str:
    raise TypeError(f"no HTML for a {type(block).__name__}")


@_block.register
def _(block: Note) -> str:
    return f"<p>{escape(block.text)}</p>"


@_block.register
def _(block: Command) -> str:
    return f"<pre>{escape(block.text)}</pre>"


@_block.register
def _(block: Table) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in block.header)
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in block.rows)
    style = ' class="words"' if block.words else ""
    return f"<table{style}>\n<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


@_block.register
def _(block: Histogram) -> str:
    return svg.histogram(block)


@_block.register
def _(block: Bars) -> str:
    return svg.bars(block)


@_block.register
def _(block: Sample) -> str:
    sentences = [escape(sentence) for sentence in block.sentences]
    if block.cut:
        sentences[-1] += " …"
    items = "\n".join(f"<li>{sentence}</li>" for sentence in sentences)
    caption = f"document {block.document:,}, {block.tokens:,} tokens"
    return f"<figure>\n<figcaption>{caption}</figcaption>\n<ol>\n{items}\n</ol>\n</figure>"
