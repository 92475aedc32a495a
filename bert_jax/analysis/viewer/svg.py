"""A head as a static SVG: the tokens as queries on the left and as keys on the right, a line for each large weight.

The button of the page draws the same with the same numbers (viewer.js), which `DRAWING` passes on to it.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import numpy as np

from bert_jax.analysis.viewer.attention_maps import AttentionMaps

DRAWING = {
    "row": 15,
    "top": 44,
    "left": 170,
    "right": 430,
    "width": 600,
    "gap": 6,
    "font": 11,
    "characters": 22,
    "faintest": 0.12,
    "most_lines": 4000,
}
"""User units of the SVG: height of a token's row, space above the tokens, where the texts of queries end and those of
keys begin, width, space between text and line, size of the font; characters of a token, longer ones are cut; opacity of
a line of weight 0; lines of a figure, the weakest others are left out."""
LIGHT = {"page": "#ffffff", "text": "#1d2430", "grey": "#465264", "rule": "#dde2e9", "line": "#2f6db3"}
"""Colors of an SVG file, those of a light page (report/page.html)."""


def lines_svg(maps: AttentionMaps, weights_ST: np.ndarray, title: str, least: float = 0.05) -> str:
    """An SVG document with the tokens and a line for each weight of at least `least`.

    The opacity of a line grows with its weight. Of more than 4,000 lines the largest weights are drawn; the line below
    the title counts what is drawn.

    Args:
      maps: of `read_attention`.
      weights_ST: [S, T], e.g. ``maps.probabilities[3, 7]`` or ``maps.norm_weighted(3, 7)``.
      title: above the tokens.
      least: weights below it are not drawn.
    """
    tokens, row, top, gap = maps.tokens, DRAWING["row"], DRAWING["top"], DRAWING["gap"]
    height = top + row * len(tokens) + row
    size = {"width": str(DRAWING["width"]), "height": str(height), "viewBox": f"0 0 {DRAWING['width']} {height}"}
    svg = ElementTree.Element("svg", size | {"xmlns": "http://www.w3.org/2000/svg"})
    svg.set("font-family", "system-ui, Arial, sans-serif")
    svg.set("font-size", str(DRAWING["font"]))
    ElementTree.SubElement(svg, "rect", {"width": "100%", "height": "100%", "fill": LIGHT["page"]})
    queries, keys = largest(weights_ST, least)
    share = weights_ST[queries, keys].sum() / weights_ST.sum()
    more = "" if len(queries) < DRAWING["most_lines"] else ", the largest"
    counted = f"{len(queries):,} weights of at least {least:g}{more}: {100 * share:.1f} % of all attention"
    _text(svg, 8, 14, "start", LIGHT["text"], _xml_text(title))
    _text(svg, 8, 29, "start", LIGHT["grey"], counted)
    lines = ElementTree.SubElement(svg, "g", {"stroke": LIGHT["line"], "stroke-width": "1.5", "class": "lines"})
    for query, key in zip(queries, keys, strict=True):
        opacity = DRAWING["faintest"] + (1 - DRAWING["faintest"]) * float(weights_ST[query, key])
        ends = {"x1": DRAWING["left"] + gap, "y1": _middle(query), "x2": DRAWING["right"] - gap, "y2": _middle(key)}
        line = {name: f"{value:g}" for name, value in ends.items()} | {"stroke-opacity": f"{opacity:.3f}"}
        ElementTree.SubElement(lines, "line", line)
    for index in np.flatnonzero(np.diff(maps.token_types) > 0) + 1:
        rule = {"x1": "0", "x2": str(DRAWING["width"]), "y1": str(top + row * index), "y2": str(top + row * index)}
        ElementTree.SubElement(svg, "line", rule | {"stroke": LIGHT["rule"], "class": "second-text"})
    for x, anchor in ((DRAWING["left"], "end"), (DRAWING["right"], "start")):
        column = ElementTree.SubElement(svg, "g", {"class": "queries" if anchor == "end" else "keys"})
        for index, label in enumerate(labels(tokens)):
            _text(column, x, _middle(index) + 4, anchor, LIGHT["text"], label)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def largest(weights_ST: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of the weights that are drawn, the smallest first, so that large ones are on top."""
    chosen = np.flatnonzero(weights_ST >= least)
    order = np.argsort(weights_ST.ravel()[chosen], kind="stable")[-DRAWING["most_lines"] :]
    return np.divmod(chosen[order], weights_ST.shape[1])


def labels(tokens: Sequence[str]) -> list[str]:
    """Tokens as they are drawn: long ones are cut, and characters that XML does not allow are replaced."""
    longest = DRAWING["characters"]
    short = [token if len(token) <= longest else token[: longest - 1] + "…" for token in tokens]
    return [_xml_text(token) for token in short]


def _xml_text(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _middle(index: int) -> float:
    return DRAWING["top"] + DRAWING["row"] * (index + 0.5)


def _text(parent: ElementTree.Element, x: float, y: float, anchor: str, color: str, text: str) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor, "fill": color}
    ElementTree.SubElement(parent, "text", place).text = text
