"""Renders sections as one self-contained HTML page: style and figures are inline, and there is no script.

matplotlib is not used: it would draw the histogram in as many lines, but it takes a second to import, is an optional
extra, and its figures have no tooltips and do not adapt to the width of a phone.
"""

from collections.abc import Sequence

import jinja2

from bert_jax.report import Histogram, Section

# Of a histogram, in user units; the page scales it to its width.
_WIDTH, _HEIGHT = 640, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 16, 40
_GRID_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
_MAX_GRID_LINES = 6
_ALL_LABELLED = 10


def render(sections: Sequence[Section]) -> str:
    """The page, to be encoded as UTF-8."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    title = ", ".join(section.title for section in sections if section.level == 1)
    page = environment.get_template("page.html")
    return page.render(title=title, sections=sections, kind=lambda block: type(block).__name__, columns=_columns) + "\n"


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
