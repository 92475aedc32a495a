"""Reports: sections of prose, tables and figures, rendered by `html` as a page, by `text` for a terminal, and without
figures by `markdown`.

Pages with `Curves`, `Intervals` or `Heatmap` need matplotlib (the extra `plot`); all other blocks, and text,
do not.
"""

import dataclasses
import math
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence or two."""

    text: str
    warning: bool = False
    """set off from the rest, e.g. for runs that cannot be compared"""


@dataclasses.dataclass(frozen=True)
class Command:
    """A shell command."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells; cells after the first are numbers unless `words` is set."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = False
    marked: frozenset[int] = frozenset()
    """indices of rows that stand out"""


class Bin(NamedTuple):
    """Values from `first` to `last`, both included."""

    first: int
    last: int
    count: int
    """number of such values"""
    total: int
    """sum of such values"""

    @property
    def label(self) -> str:
        """The range as text."""
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,}–{self.last:,}"


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Distribution of a quantity over things: the share of things in each bin, and their share of the total."""

    title: str
    """e.g. "tokens in a sentence" """
    things: str
    """e.g. "sentences" """
    unit: str
    """of the quantity, e.g. "tokens" """
    bins: tuple[Bin, ...]
    """ascending, without gaps"""

    @property
    def bins_with_shares(self) -> list[tuple[Bin, float, float]]:
        """Each bin with its share of the things and its share of the total."""
        count, total = sum(one.count for one in self.bins), sum(one.total for one in self.bins)
        return [(one, one.count / count, one.total / total) for one in self.bins]


@dataclasses.dataclass(frozen=True)
class Bars:
    """Named shares in [0, 1]; the axis ends at 1 if `whole` is set, otherwise at the largest share."""

    labels: tuple[str, ...]
    shares: tuple[float, ...]
    whole: bool

    @property
    def scaled_bars(self) -> list[tuple[str, float, float]]:
        """Each bar's label, share, and length as a share of the axis."""
        end = 1 if self.whole else max(self.shares) or 1
        return [(label, share, share / end) for label, share in zip(self.labels, self.shares, strict=True)]


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """The first lines of something longer."""

    caption: str
    lines: tuple[str, ...]
    cut: bool
    """whether there is more"""


@dataclasses.dataclass(frozen=True)
class Series:
    """A named curve. A value of y that is NaN is a gap."""

    name: str
    x: tuple[float, ...]
    """ascending"""
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    """lower end of a band around y, e.g. the smallest value over seeds"""
    high: tuple[float, ...] | None = None
    """upper end of the band"""
    dashed: bool = False
    """e.g. for a baseline"""
    color: int | None = None
    """index into the palette; None: the position among the series"""


@dataclasses.dataclass(frozen=True)
class Curves:
    """Curves over one x axis, at least one; the caption should state what a band is."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False

    @property
    def colored_series(self) -> list[tuple[Series, int]]:
        """Each series with its color."""
        return [(one, index if one.color is None else one.color) for index, one in enumerate(self.series)]


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    name: str
    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Estimates of differences with their intervals (a forest plot), at least one, and a line at zero."""

    title: str
    intervals: tuple[Interval, ...]
    """from top to bottom"""
    label: str
    """what the axis shows, with the unit, e.g. "difference of accuracy (points)" """
    margin: float | None = None
    """differences in [-margin, margin] count as equivalent; drawn as a band"""


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """A matrix of numbers as colors, e.g. a quantity by layer and head; NaN is empty.

    Up to 150 cells have their numbers in them.
    """

    title: str
    values: tuple[tuple[float, ...], ...]
    """rows from top to bottom"""
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_label: str
    """what the rows are, e.g. "layer" """
    column_label: str
    unit: str = ""
    """of the values, at the color bar"""
    center: float | None = None
    """colors diverge from this value; None: from the smallest to the largest value"""

    @property
    def numbers(self) -> list[list[str]]:
        """The values as text, empty for NaN, with as many decimals as two digits of the largest need."""
        largest = max((abs(value) for row in self.values for value in row if math.isfinite(value)), default=0.0)
        decimals = max(0, 1 - math.floor(math.log10(largest))) if largest else 0
        form = f".{decimals}f" if decimals <= 3 and largest < 1e5 else ".2g"
        return [[f"{value:{form}}" if math.isfinite(value) else "" for value in row] for row in self.values]


ReportBlock = Note | Command | Table | Histogram | Bars | Excerpt | Curves | Intervals | Heatmap


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its content."""

    title: str
    blocks: tuple[ReportBlock, ...]
    level: int = 2
    """1: the subject, e.g. a corpus; 2: a section about it"""
