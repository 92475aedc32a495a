"""Renders sections as one self-contained HTML page: style and figures are inline, and there is no script.

The page depends on the sections only: rendering it twice gives the same bytes. matplotlib draws curves, intervals
and heatmaps (`figures`). The template draws histograms and bars, so that pages about corpora do not need that optional
package.
"""

from collections.abc import Sequence

import jinja2
from markupsafe import Markup, escape

from bert_jax.report import Histogram, Section, figures

# Of a histogram, in user units; the page scales it to its width.
_WIDTH, _HEIGHT = 640, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 16, 40
_GRID_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
_MAX_GRID_LINES = 6
_ALL_LABELLED = 10
GENERATOR = '<meta name="generator" content="bert_jax.report">'
"""In the head of every page."""


def render(sections: Sequence[Section]) -> str:
    """The page, to be encoded as UTF-8.

    Raises:
      UserError: a figure needs matplotlib, and it is not installed.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    title = ", ".join(section.title for section in sections if section.level == 1)
    page = environment.get_template("page.html")
    functions = {"columns": _columns, "svg": figures.to_svg, "breakable": _breakable}
    functions["kind"] = lambda block: type(block).__name__
    constants = {"generator": GENERATOR, "palette": figures.PALETTE, "shades": figures.SHADES}
    return page.render(title=title, sections=sections, **functions, **constants) + "\n"


def _breakable(cell: str) -> Markup:
    """A cell whose text may also break after an underscore, so that tables of metrics and settings are narrow."""
    return Markup(str(escape(cell)).replace("_", "_<wbr>"))


def _columns(block: Histogram) -> dict:
    """Coordinates of a histogram; the x axis is logarithmic, as the bins are."""
    top = max(max(things, total) for _, things, total in block.bins_with_shares)
    step = next((step for step in _GRID_STEPS if top / step <= _MAX_GRID_LINES), _GRID_STEPS[-1])
    lines = round(-(-top // step))
    width, ground = (_WIDTH - _LEFT - _RIGHT) / len(block.bins), _HEIGHT - _BOTTOM
    scale = (ground - _TOP) / (lines * step)
    columns = []
    for index, (one, things, total) in enumerate(block.bins_with_shares):
        # Powers of 4 are edges of bins, and their labels do not overlap.
        power_of_4 = one.first & (one.first - 1) == 0 and one.first.bit_length() % 2
        columns.append(
            {
                "bin": one,
                "things": things,
                "total": total,
                "x": _LEFT + index * width,
                "height": things * scale,
                "y": ground - total * scale,
                "labelled": power_of_4 or len(block.bins) <= _ALL_LABELLED,
            }
        )
    grid = [(line * step, ground - line * step * scale) for line in range(lines + 1)]
    frame = {"width": _WIDTH, "height": _HEIGHT, "left": _LEFT, "right": _WIDTH - _RIGHT, "ground": ground}
    return frame | {"columns": columns, "column_width": width, "grid": grid}
