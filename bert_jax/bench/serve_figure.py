"""The figure of `bert-jax bench --serve`: throughput above score, both as ratios to the first model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_jax.errors import UserError, install_command, require
from bert_jax.report.figures import PALETTE

ENDINGS = (".svg", ".png")
INCHES_PER_MODEL, LEAST_INCHES, HEIGHT = 1.5, 6.0, 3.0


def check_file(path: Path) -> None:
    """Check the name before anything is measured.

    Raises:
      UserError: the name or its directory does not fit, the file exists, or matplotlib is missing.
    """
    require(path.suffix in ENDINGS, f"--figure {path}: its name must end in {' or '.join(ENDINGS)}")
    require(path.parent.is_dir(), f"--figure {path}: there is no directory {path.parent}")
    require(not path.exists(), f"--figure {path} exists: choose another name, or delete it")
    try:
        import matplotlib  # noqa: F401 (whether it is there)
    except ModuleNotFoundError as error:
        raise UserError(f"--figure needs the package matplotlib: {install_command('plot')}") from error


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the results of `serve.measure`; the same results give the same file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [row["model"] for row in results["models"]]
    panels = 2 if "quality" in results else 1
    settings = {name: matplotlib.rcParamsDefault[name] for name in matplotlib.rcParamsDefault if name != "backend"}
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "bert_jax", "text.parse_math": False, "font.size": 10}
    settings |= {"axes.spines.right": False, "axes.spines.top": False}
    with matplotlib.rc_context(settings):
        size = max(LEAST_INCHES, INCHES_PER_MODEL * len(names)), HEIGHT * panels
        figure = Figure(figsize=size, dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
        lengths = list(dict.fromkeys(row["tokens"] for row in results["throughput"]))
        speeds = {
            f"{length} tokens": [
                next(row["speed / first"]["median"] for row in results["throughput"] if _is(row, name, length))
                for name in names
            ]
            for length in lengths
        }
        _draw_bars(axes[0], speeds, f"throughput / that of {names[0]}")
        axes[-1].set_xticks(range(len(names)), names)
        axes[0].legend(frameon=False, ncols=len(lengths), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
        if panels == 2:
            scores = [
                next(row["score / first"] for row in results["quality"] if row["model"] == name) for name in names
            ]
            label = f"score of {results['quality'][0]['task']} / that of {names[0]}"
            _draw_points(axes[1], scores, label)
            lowest, highest = min([*scores, 1.0]), max([*scores, 1.0])
            margin = max(0.01, 0.5 * (highest - lowest))
            axes[1].set_ylim(max(0.0, lowest - margin), highest + margin)
        part = path.with_name(f".{path.name}.part")
        figure.savefig(part, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
        part.replace(path)


def _is(row: Mapping[str, Any], name: str, length: int) -> bool:
    return row["model"] == name and row["tokens"] == length


def _draw_bars(axes: Any, groups: Mapping[str, Sequence[float]], label: str) -> None:
    """Bars side by side for each model, one per group, with their values."""
    width = 0.8 / len(groups)
    for i, (group, values) in enumerate(groups.items()):
        places = [x + (i - (len(groups) - 1) / 2) * width for x in range(len(values))]
        bars = axes.bar(places, values, 0.92 * width, label=group, color=PALETTE[i % len(PALETTE)][0])
        axes.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7)
    _draw_first(axes, label)


def _draw_points(axes: Any, values: Sequence[float], label: str) -> None:
    """A point for each model with its value: not bars, because the axis does not begin at 0."""
    axes.plot(range(len(values)), values, "o", color=PALETTE[0][0])
    for x, value in enumerate(values):
        axes.annotate(f"{value:.3f}", (x, value), (0, 6), textcoords="offset points", ha="center", fontsize=7)
    _draw_first(axes, label)


def _draw_first(axes: Any, label: str) -> None:
    """The line of the first model, and the label of the axis."""
    axes.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_ylabel(label, fontsize=9)
