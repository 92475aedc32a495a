"""Curves, intervals and heatmaps as inline SVG, drawn by matplotlib.

Text remains text, and every color is a CSS variable of the page (`--c0` and so on, `--ink`, `--rule`), so that a figure
follows the page's light or dark colors. Figures are as wide as a phone; wider pages show two beside each other.
"""

import html
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from bert_jax.errors import UserError, install_command
from bert_jax.report import Curves, Heatmap, Intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PALETTE = (
    ("#2f6db3", "#6fa8e6"),
    ("#c2571a", "#f0935a"),
    ("#2e8045", "#69be82"),
    ("#8a4fa8", "#c592df"),
    ("#b0293f", "#ee7d8f"),
    ("#6d6a1d", "#bdb95a"),
    ("#197f8a", "#5cc0cb"),
    ("#7a5236", "#c99d7c"),
)
"""Colors of series on a light and on a dark page; further series repeat them."""
SHADES = (("#0b3a7e", "#a6caff"), ("#8f3206", "#ffb285"))
"""Colors of the largest values of a heatmap, and of those farthest below its center; others are mixed with the page."""
_INCHES = (5.0, 3.1)
_INCHES_PER_INTERVAL, _INCHES_OF_AXIS = 0.42, 0.5
_NAME_CHARACTERS = 26
"""Longer names beside intervals are cut."""
_LABEL_CHARACTERS = 46
"""Longer labels of an axis have several lines."""
_SHADES, _FAINTEST = 64, 0.06
"""Of a heatmap: steps of the opacity, and the least opacity."""
_NAMED_ROWS, _NAMED_COLUMNS = 40, 24
"""Of more rows or columns of a heatmap, every second or third is named, and so on."""
_CHARACTERS_OF_COLUMNS = 44
"""Names of a heatmap's columns that have more together are written upright."""
_CELLS_WITH_NUMBERS, _SMALLEST_NUMBER = 150, 4.5
"""Heatmaps with more cells have no numbers in them, and neither have those whose numbers would be smaller (points)."""
_MOST_MARKERS = 20
"""Curves with more points have no markers at them."""
_DARK = 0.5
"""Shade from which on numbers have the color of the page."""
_INK, _RULE = "#00fe00", "#00fe01"
"""Stand for CSS variables until the SVG is written."""
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bert_jax",
    "text.parse_math": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": _RULE,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "font.size": 11,
}


def to_svg(block: Curves | Intervals | Heatmap) -> str:
    """The figure as an `<svg>` element; the same block gives the same text.

    Raises:
      UserError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # matplotlib's own defaults, whatever the matplotlibrc of the user has.
    defaults = {name: matplotlib.rcParamsDefault[name] for name in matplotlib.rcParamsDefault if name != "backend"}
    with matplotlib.rc_context(defaults | _SETTINGS), warnings.catch_warnings():
        # Text is drawn by the browser, whose fonts have more letters than the one that measures it here.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=_INCHES, dpi=72, layout="constrained")
        FigureCanvasSVG(figure)
        cells = ""
        match block:
            case Curves():
                _draw_curves(figure.subplots(), block)
            case Intervals():
                figure.set_size_inches(_INCHES[0], _INCHES_PER_INTERVAL * len(block.intervals) + _INCHES_OF_AXIS)
                _draw_intervals(figure.subplots(), block)
            case Heatmap():
                cells = _draw_heatmap(figure, block)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _inline(file.getvalue(), block.title, cells)


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError(f"figures need the package matplotlib, which is missing: {install_command('plot')}") from error
    return matplotlib


def _draw_curves(axes: "Axes", block: Curves) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    for series, color in block.colored_series:
        drawn, style = _stand_in(color), "--" if series.dashed else "-"
        marker = "o" if len(series.x) <= _MOST_MARKERS else None
        axes.plot(series.x, series.y, style, color=drawn, linewidth=1.6, marker=marker, markersize=3.5)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=drawn, alpha=0.18, linewidth=0)
    axes.set(xlabel=_wrapped(block.x_label), ylabel=_wrapped(block.y_label, _LABEL_CHARACTERS // 2))
    if block.log_x and _all_positive(x for one in block.series for x in one.x):
        axes.set_xscale("log", subs=())
    if block.log_y and _all_positive(y for one in block.series for y in (*one.y, *(one.low or ()))):
        axes.set_yscale("log", subs=())
    if all(float(x).is_integer() for one in block.series for x in one.x):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
        _label_ticks(axis)


def _all_positive(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis can show the values; the axis is linear otherwise."""
    return all(value > 0 for value in values if math.isfinite(value))


def _draw_intervals(axes: "Axes", block: Intervals) -> None:
    for row, one in enumerate(block.intervals):
        axes.plot((one.low, one.high), (row, row), color=_stand_in(0), linewidth=2, solid_capstyle="butt")
        axes.plot((one.estimate,), (row,), "o", color=_stand_in(0), markersize=6)
    if block.margin is not None:
        axes.axvspan(-block.margin, block.margin, color=_RULE, alpha=0.7, linewidth=0, zorder=0)
    axes.axvline(0, color=_INK, linewidth=1, zorder=1)
    axes.set_yticks(range(len(block.intervals)), [_cut(one.name) for one in block.intervals])
    axes.set_ylim(len(block.intervals) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _label_ticks(axes.xaxis)


def _draw_heatmap(figure: "Figure", block: Heatmap) -> str:
    """Draw everything but the cells, which are returned as SVG."""
    rows, columns, (low, high) = len(block.rows), len(block.columns), _limits(block)
    row_step, column_step = -(-rows // _NAMED_ROWS), -(-columns // _NAMED_COLUMNS)
    row_names = [_cut(name) for name in block.rows[::row_step]]
    column_names = [_cut(name) for name in block.columns[::column_step]]
    longest = max(map(len, column_names))
    upright = longest * len(column_names) > _CHARACTERS_OF_COLUMNS
    inches = rows * (0.24 if 2 * rows <= _NAMED_ROWS else 0.17) if row_step == 1 else 4
    figure.set_size_inches(_INCHES[0], max(inches, 1) + 0.8 + 0.08 * longest * upright)
    axes, scale = figure.subplots(ncols=2, width_ratios=(1, 0.04))
    least = 0 if block.center is None else -1
    shades = [[least + (1 - least) * (value - low) / (high - low) for value in row] for row in block.values]
    axes.set(xlim=(0, columns), ylim=(rows, 0), xlabel=_wrapped(block.column_label), ylabel=block.row_label)
    axes.set_xticks([0.5 + i * column_step for i in range(len(column_names))], column_names, rotation=90 * upright)
    axes.set_yticks([0.5 + i * row_step for i in range(len(row_names))], row_names)
    scale.set(xlim=(0, 1), ylim=(low, high), xticks=(), ylabel=_wrapped(block.unit, _LABEL_CHARACTERS // 2))
    scale.yaxis.set(ticks_position="right", label_position="right")
    _label_ticks(scale.yaxis)
    for one in (axes, scale):
        one.tick_params(labelsize=9, length=0)
        one.grid(visible=False)
        one.spines[:].set(visible=True, color=_RULE)
    figure.draw_without_rendering()
    of_scale = [[1 - (1 - least) * (step + 0.5) / _SHADES] for step in range(_SHADES)]
    numbers = block.numbers if rows * columns <= _CELLS_WITH_NUMBERS else None
    return _cells(figure, axes, shades, numbers) + _cells(figure, scale, of_scale)


def _limits(block: Heatmap) -> tuple[float, float]:
    """Values with the first and the last shade, which differ."""
    finite = [value for row in block.values for value in row if math.isfinite(value)] or [0.0]
    if block.center is not None:
        reach = max(abs(value - block.center) for value in finite) or 1.0
        return block.center - reach, block.center + reach
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _cells(
    figure: "Figure", axes: "Axes", shades: Sequence[Sequence[float]], numbers: list[list[str]] | None = None
) -> str:
    """A matrix over the area of the axes: a path for each opacity of a color; what is not finite has a diagonal.

    Args:
      figure: of the axes, laid out.
      axes: they are filled.
      shades: in [-1, 1], from the lower color over none to the upper one.
      numbers: written in the cells, unless they are too small there.
    """
    shapes: dict[str, str] = {}
    for r, row in enumerate(shades):
        c = 0
        for style, run in itertools.groupby(map(_style, row)):
            n = len(list(run))
            cells = f"M{c} {r}h{n}v1h-{n}z" if "fill" in style else "".join(f"M{c + i} {r}l1 1" for i in range(n))
            shapes[style] = shapes.get(style, "") + cells
            c += n
    paths = "".join(f'<path style="{style}" d="{shape}"/>' for style, shape in shapes.items())
    area, (width, height) = axes.get_position(), figure.get_size_inches() * 72
    x, y = area.x0 * width, (1 - area.y1) * height
    cell_width, cell_height = area.width * width / len(shades[0]), area.height * height / len(shades)
    place = f'transform="translate({x:.2f} {y:.2f}) scale({cell_width:.5g} {cell_height:.5g})"'
    size = min(8, 1.6 * cell_width / (1 + max(len(number) for row in numbers for number in row))) if numbers else 0
    texts = [
        f'<text x="{x + (c + 0.5) * cell_width:.1f}" y="{y + (r + 0.5) * cell_height + 0.35 * size:.1f}"'
        f' style="fill: var(--{"page" if abs(shades[r][c]) > _DARK else "text"})">{number.replace("-", "−")}</text>'
        for r, row in enumerate(numbers or ())
        for c, number in enumerate(row)
        if number and size >= _SMALLEST_NUMBER
    ]
    texts = f'<g class="numbers" style="font-size: {size:.2g}px">{"".join(texts)}</g>' if texts else ""
    return f'<g shape-rendering="crispEdges" {place}>{paths}</g>{texts}'


def _style(shade: float) -> str:
    if not math.isfinite(shade):
        return "stroke: var(--rule); vector-effect: non-scaling-stroke"
    opacity = _FAINTEST + (1 - _FAINTEST) * round(abs(shade) * _SHADES) / _SHADES
    return f"fill: var(--{'below' if shade < 0 else 'above'}); fill-opacity: {opacity:.3g}"


def _label_ticks(axis: "Axis") -> None:
    """Label the ticks of an axis with the digits that distinguish them, at least 4."""
    from matplotlib.ticker import Formatter

    formatter = Formatter()
    formatter.format_ticks = _tick_labels  # one label's digits depend on the other ticks
    axis.set_major_formatter(formatter)


def _tick_labels(ticks: Iterable[float]) -> list[str]:
    different = [float(tick) for tick in {*ticks}]
    enough = (n for n in range(4, 12) if len({_tick_label(tick, n) for tick in different}) == len(different))
    digits = next(enough, 12)
    return [_tick_label(tick, digits) for tick in ticks]


def _tick_label(value: float, digits: int = 4) -> str:
    """A number in few characters: 0.25, 12k, 1e-5."""
    scales = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0, 1, ""))
    unit, suffix = next((unit, suffix) for least, unit, suffix in scales if abs(value) >= least)
    return f"{value / unit:.{digits}g}{suffix}".replace("e-0", "e-").replace("-", "−")


def _wrapped(label: str, characters: int = _LABEL_CHARACTERS) -> str:
    return "\n".join(textwrap.wrap(label, characters))


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"


def _stand_in(color: int) -> str:
    """The color that stands for a CSS variable of the palette."""
    return f"#00fd{color % len(PALETTE):02x}"


def _inline(svg: str, title: str, first: str) -> str:
    """The `<svg>` element of a file, for a page: no size, date, styles that apply outside of it, or unused ids.

    Args:
      svg: the file.
      title: for readers that do not see.
      first: elements that the others are drawn over.
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.S)
    view_box = re.search(r'viewBox="[^"]*"', svg)[0]
    svg = (
        f'<svg class="plot" {view_box} role="img" aria-label="{html.escape(title)}">{first}{svg[svg.index(">") + 1 :]}'
    )
    # The figure is laid out for DejaVu Sans, which has wide letters; the page's font fits.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    used = set(re.findall(r"[(\"]#([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    for color, variable in ((_INK, "ink"), (_RULE, "rule")):
        svg = svg.replace(f": {color}", f": var(--{variable})")
    svg = re.sub(r": #00fd([0-9a-f]{2})", lambda match: f": var(--c{int(match[1], 16)})", svg)
    return re.sub(r">\s*\n\s*<", ">\n<", svg)
