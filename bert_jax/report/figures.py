"""Curves and intervals as inline SVG, drawn by matplotlib.

Text remains text, and every color is a CSS variable of the page (`--c0` and so on, `--ink`, `--rule`), so that a figure
follows the page's light or dark colors. Figures are as wide as a phone; wider pages show two beside each other.
"""

import html
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from bert_jax.errors import UserError, install_command
from bert_jax.report import Curves, Intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
_INCHES = (5.0, 3.1)
_INCHES_PER_INTERVAL, _INCHES_OF_AXIS = 0.42, 0.5
_NAME_CHARACTERS = 26
"""Longer names beside intervals are cut."""
_LABEL_CHARACTERS = 46
"""Longer labels of an axis have several lines."""
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


def to_svg(block: Curves | Intervals) -> str:
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
        figure = Figure(figsize=_INCHES, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        match block:
            case Curves():
                _draw_curves(axes, block)
            case Intervals():
                figure.set_size_inches(_INCHES[0], _INCHES_PER_INTERVAL * len(block.intervals) + _INCHES_OF_AXIS)
                _draw_intervals(axes, block)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    return _inline(file.getvalue(), block.title)


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError(f"figures need the package matplotlib, which is missing: {install_command('plot')}") from error
    return matplotlib


def _draw_curves(axes: "Axes", block: Curves) -> None:
    from matplotlib.ticker import LogLocator

    for series, color in block.colored_series:
        drawn, style = _stand_in(color), "--" if series.dashed else "-"
        marker = "o" if len(series.x) == 1 else None
        axes.plot(series.x, series.y, style, color=drawn, linewidth=1.6, marker=marker, markersize=4)
        if series.low is not None and series.high is not None:
            axes.fill_between(series.x, series.low, series.high, color=drawn, alpha=0.18, linewidth=0)
    axes.set(xlabel=_wrapped(block.x_label), ylabel=_wrapped(block.y_label, _LABEL_CHARACTERS // 2))
    if block.log_x and _all_positive(x for one in block.series for x in one.x):
        axes.set_xscale("log", subs=())
    if block.log_y and _all_positive(y for one in block.series for y in (*one.y, *(one.low or ()))):
        axes.set_yscale("log", subs=())
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)))
        axis.set_major_formatter(_tick_label)


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
    axes.xaxis.set_major_formatter(_tick_label)


def _tick_label(value: float, position: int | None = None) -> str:
    """A number in few characters: 0.25, 12k, 1e-5."""
    scales = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0, 1, ""))
    unit, suffix = next((unit, suffix) for least, unit, suffix in scales if abs(value) >= least)
    return f"{value / unit:.4g}{suffix}".replace("e-0", "e-").replace("-", "−")


def _wrapped(label: str, characters: int = _LABEL_CHARACTERS) -> str:
    return "\n".join(textwrap.wrap(label, characters))


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else f"{name[: _NAME_CHARACTERS - 1]}…"


def _stand_in(color: int) -> str:
    """The color that stands for a CSS variable of the palette."""
    return f"#00fd{color % len(PALETTE):02x}"


def _inline(svg: str, title: str) -> str:
    """The `<svg>` element of a file, for a page: no size, date, styles that apply outside of it, or unused ids."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", svg, flags=re.S)
    view_box = re.search(r'viewBox="[^"]*"', svg)[0]
    svg = f'<svg class="plot" {view_box} role="img" aria-label="{html.escape(title)}">{svg[svg.index(">") + 1 :]}'
    # The figure is laid out for DejaVu Sans, which has wide letters; the page's font fits.
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    used = set(re.findall(r"[(\"]#([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = svg.replace(f": {_INK}", ": var(--ink)").replace(f": {_RULE}", ": var(--rule)")
    svg = re.sub(r": #00fd([0-9a-f]{2})", lambda match: f": var(--c{int(match[1], 16)})", svg)
    return re.sub(r">\s*\n\s*<", ">\n<", svg)
