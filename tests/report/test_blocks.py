"""Blocks of reports as HTML and as text."""

import dataclasses
import math
import re
import sys
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

from bert_jax.errors import UserError, install_command
from bert_jax.report import (
    Bars,
    Bin,
    Command,
    Curves,
    Excerpt,
    Heatmap,
    Histogram,
    Interval,
    Intervals,
    Note,
    Section,
    Series,
    Table,
    html,
    text,
)
from bert_jax.report.cells import cell, make_table

HOSTILE = """<script>alert('x')</script> & $\\frac{1}$ --> "]]>"""
CURVES = Curves(
    "held-out loss",
    (Series("first", (1, 2, 3), (4.0, 3.0, 2.5), (3.5, 2.5, 2.0), (4.5, 3.5, 3.0)), Series("unigram", (1, 3), (5, 5))),
    "step",
)
INTERVALS = Intervals("NSP", (Interval("sop", -1.5, -2.0, -1.0), Interval("none", 0.1, -0.2, 0.4)), "points", 0.5)
HEATMAP = Heatmap(
    "share", ((0.0, 0.25, 1.0), (0.5, math.nan, -1.0)), ("0", "1"), ("a", "b", "c"), "layer", "head", "points", 0.0
)
BLOCKS = {
    "note": (Note("A sentence."), "<p>A sentence.</p>", "A sentence."),
    "warning": (Note("Not alike.", warning=True), '<p class="warning">Not alike.</p>', "warning: Not alike."),
    "command": (Command("bert-jax plan"), "<pre>bert-jax plan</pre>", "    bert-jax plan"),
    "table": (Table(("a", "b"), (("c", "1"),)), "<td>c</td><td>1</td>", "a  b\nc  1"),
    "marked": (
        Table(("a", "b"), (("c", "1"), ("d", "2")), marked=frozenset({1})),
        '<tr class="marked"><td>d</td><td>2</td></tr>',
        "  a  b\n  c  1\n* d  2",
    ),
    "names": (
        Table(("a_b", "b"), (("phases.0.seq_len", "0.25 </b>"),)),
        "<td>phases.0.seq_<wbr>len</td><td>0.25 &lt;/b&gt;</td>",
        "a_b                       b\nphases.0.seq_len  0.25 </b>",
    ),
    "bars": (Bars(("c",), (0.5,), True), '<i style="width:50.0%">', "c  50.00%  ████████████████████"),
    "histogram": (Histogram("size", "things", "tokens", (Bin(1, 1, 2, 2),)), "<title>1 tokens: 2 things", "size"),
    "excerpt": (Excerpt("Caption", ("line",), True), "<li>line …</li>", "Caption:\n  · line\n    ..."),
    "curves": (CURVES, "</i>unigram</span>", "first        █▃▁      4   2.5\nunigram       ▁▁      5     5"),
    "heatmap": (
        HEATMAP,
        "<figcaption><b>share</b></figcaption>",
        "share (points):\nlayer \\ head    a    b     c\n0             0.0  0.2   1.0\n1             0.5       -1.0\n"
        "smallest -1 at 1, c; largest 1 at 0, c",
    ),
    "intervals": (INTERVALS, "points. Band: equivalent within ±0.5.", "sop         -1.5    -2    -1"),
}


def page(*blocks) -> str:
    return html.render([Section("Title", blocks, level=1)])


@pytest.mark.parametrize("name", BLOCKS)
def test_each_block(name):
    block, in_html, in_text = BLOCKS[name]
    assert in_html in page(block)
    assert in_text in text.render([Section("Title", (block,), level=1)])


def svg_of(block) -> str:
    (svg,) = re.findall("<svg.*?</svg>", page(block), re.S)
    return svg


def points(svg: str, color: str) -> list[list[tuple[float, float]]]:
    """Vertices of each path with this color."""
    paths = re.findall(rf'<path d="([^"]*)"[^>]*(?:stroke|fill): var\({color}\)', svg)
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path)] for path in paths]


def test_curves_are_at_their_values():
    svg = svg_of(CURVES)
    (line,) = (path for path in points(svg, "--c0") if len(path) == 3)
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx(x2 - x1) and y2 > y1 > y0
    assert (y1 - y0) == pytest.approx(2 * (y2 - y1), rel=1e-4)
    assert "fill-opacity: 0.18" in svg and "stroke-dasharray" not in svg
    dashed = dataclasses.replace(CURVES, series=(dataclasses.replace(CURVES.series[1], dashed=True, color=9),))
    assert re.search(r"stroke-dasharray[^>]*var\(--c1\)", svg_of(dashed))


@pytest.mark.parametrize(("ys", "is_log"), [((1.0, 10.0, 100.0), True), ((0.0, 10.0, 100.0), False)])
def test_logarithmic_axes_need_positive_values(ys, is_log):
    """The middle value of a geometric series is in the middle of a logarithmic axis."""
    block = Curves("norm", (Series("norm", (1, 10, 100), ys),), "step", log_x=True, log_y=True)
    lines = [path for path in points(svg_of(block), "--c0") if path]
    ((x0, y0), (x1, y1), (x2, y2)) = lines[0]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=1e-3)
    assert ((y1 - y0) == pytest.approx(y2 - y1, abs=1e-3)) is is_log


def test_labels_of_ticks_are_distinct():
    """Also where the values differ in the fifth digit only; numbers with fewer digits stay short."""

    def labels(*ys):
        svg = svg_of(Curves("loss", (Series("loss", (1, 2), ys),), "step"))
        return [label for label in re.findall(r"<text[^>]*>([^<]*)</text>", svg) if label.startswith("5")]

    near = labels(5.6400, 5.6412)
    assert len(near) >= 3 and len(set(near)) == len(near)
    assert "5.1" in labels(5.0, 5.2)


def test_intervals_are_at_their_values():
    lines = [path for path in points(svg_of(INTERVALS), "--c0") if len(path) == 2]
    ((a, _), (b, _)), ((c, _), (d, _)) = lines
    assert (b - a) / (d - c) == pytest.approx(1.0 / 0.6, rel=1e-3)
    assert (c - a) / (b - a) == pytest.approx(1.8, rel=1e-3)


def cells(svg: str) -> dict[str, str]:
    """Color and opacity, or "empty", by the place of each cell of the first matrix, e.g. "0 1"."""
    found = {}
    for style, path in re.findall(r'<path style="([^"]*)" d="([^"]*)"/>', svg.split("</g>")[0]):
        color = re.fullmatch(r"fill: var\(--(\w+)\); fill-opacity: ([\d.]+)", style)
        for column, row, n in re.findall(r"M(\d+) (\d+)(?:h(\d+)|l)", path):
            for i in range(int(n or 1)):
                found[f"{row} {int(column) + i}"] = f"{color[1]} {color[2]}" if color else "empty"
    return found


def test_cells_of_a_heatmap_have_the_shades_of_their_values():
    assert cells(svg_of(HEATMAP)) == {
        "0 0": "above 0.06",
        "0 1": "above 0.295",
        "0 2": "above 1",
        "1 0": "above 0.53",
        "1 1": "empty",
        "1 2": "below 1",
    }
    sequential = cells(svg_of(dataclasses.replace(HEATMAP, center=None)))
    assert sequential["1 2"] == "above 0.06" and sequential["0 0"] == "above 0.53" and sequential["0 2"] == "above 1"
    for value in (3.0, math.nan):
        equal = dataclasses.replace(HEATMAP, values=((value,) * 3,) * 2)
        assert set(cells(svg_of(equal)).values()) == {"above 1" if value == 3 else "empty"}


def test_numbers_in_the_cells_of_a_heatmap():
    svg = svg_of(HEATMAP)
    numbers = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" style="fill: var\(--(\w+)\)">([^<]*)</text>', svg)
    assert [(color, number) for *_, color, number in numbers] == [
        ("text", "0.0"),
        ("text", "0.2"),
        ("page", "1.0"),
        ("text", "0.5"),
        ("page", "−1.0"),
    ]
    x, y, width, height = map(float, re.search(r"translate\((\S+) (\S+)\) scale\((\S+) (\S+)\)", svg).groups())
    assert float(numbers[4][0]) == pytest.approx(x + 2.5 * width, abs=0.1)
    assert y + height < float(numbers[4][1]) < y + 2 * height


def test_large_heatmaps_are_small():
    """100 x 100 cells, as of a loss surface: no numbers, and every third row and fifth column is named."""
    rows = tuple(tuple(math.sin(r / 30) * math.cos(c / 20) for c in range(100)) for r in range(100))
    names = tuple(f"at {i}" for i in range(100))
    block = Heatmap("loss", rows, names, names, "second direction", "first direction")
    svg = svg_of(block)
    assert len(cells(svg)) == 10_000 and len(svg) < 150_000
    assert "numbers" not in svg and len(re.findall(">at ", svg)) == 20 + 34
    lines = text.render([Section("Title", (block,), level=1)]).splitlines()
    assert lines[-2:] == ["loss:", "smallest -1 at at 47, at 63; largest 1 at at 47, at 0"]


def test_pages_are_deterministic(monkeypatch):
    """Also with another matplotlibrc."""
    blocks = (CURVES, INTERVALS, HEATMAP)
    before = page(*blocks)
    monkeypatch.setitem(matplotlib.rcParams, "axes.linewidth", 9)
    monkeypatch.setitem(matplotlib.rcParams, "xtick.major.size", 20)
    assert page(*blocks) == before


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.ids = set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]


def test_hostile_names_are_escaped_and_nothing_is_loaded():
    series = (Series(HOSTILE, (1, 2), (1, 2)), Series(HOSTILE, (1, 2), (2, 3)))
    blocks = (
        Note(HOSTILE),
        Note(HOSTILE, warning=True),
        Command(HOSTILE),
        Table((HOSTILE,), ((HOSTILE,),)),
        Bars((HOSTILE,), (0.1,), False),
        Histogram(HOSTILE, HOSTILE, HOSTILE, (Bin(1, 1, 2, 2),)),
        Excerpt(HOSTILE, (HOSTILE,), False),
        Curves(HOSTILE, series, HOSTILE, HOSTILE),
        Intervals(HOSTILE, (Interval(HOSTILE[:20], 1, 0, 2),), HOSTILE),
        Heatmap(HOSTILE, ((1.0,),), (HOSTILE[:20],), (HOSTILE[:20],), HOSTILE, HOSTILE, HOSTILE),
    )
    content = html.render([Section(HOSTILE, blocks, level=1)])
    tags = _Tags()
    tags.feed(content)
    assert tags.tags.isdisjoint({"script", "link", "img", "iframe", "object", "image", "metadata"})
    assert "alert" in content and "<script" not in content and "http" not in content and "@import" not in content
    links = [value for name, value in tags.attributes if name.endswith("href") or name == "src"]
    assert links and all(link.startswith("#") for link in links)  # markers within a figure
    assert html.GENERATOR in content


def test_labels_in_other_scripts_and_long_ones():
    """matplotlib's font lacks the letters; a label that does not fit into a line has two."""
    assert "言語モデル" in svg_of(Intervals("title", (Interval("言語モデル", 1, 0, 2),), "points"))
    svg = svg_of(dataclasses.replace(CURVES, x_label="tokens of the corpus " * 4))
    assert len(re.findall("<text[^>]*>tokens of", svg)) == 2
    values = Curves("diverged", (Series("loss", (1, 2), (math.nan, math.nan)),), "step", log_y=True)
    assert "<svg" in page(values) and "loss" in text.render([Section("Title", (values,), level=1)])


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "<table" in page(BLOCKS["table"][0]) and "<svg" in page(BLOCKS["histogram"][0])
    with pytest.raises(UserError, match="matplotlib, which is missing") as error:
        page(CURVES)
    assert install_command("plot") in str(error.value)


def test_cells_of_numbers_and_of_what_is_missing():
    assert [cell(one, ".2f") for one in (1, None, math.nan, np.float32("inf"))] == ["1.00", "-", "-", "-"]
    assert [cell(size, "bytes") for size in (999, 1000, 2_500_000, 3 * 10**12)] == [
        "999 B",
        "1.00 kB",
        "2.50 MB",
        "3,000.00 GB",
    ]
    rows = [{"name": "a", "size": 1234, "inner": {"x": None}}]
    table = make_table(rows, {"name": "{name}", "x of y": "{inner[x]:.1%} of {size:,}", "f": lambda row: row["name"]})
    assert table == Table(("name", "x of y", "f"), (("a", "- of 1,234", "a"),))
