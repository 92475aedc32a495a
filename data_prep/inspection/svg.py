"""Plots as inline SVG. Sizes are in user units; the page scales a plot to its width."""

from html import escape

from data_prep.inspection.report import Bars, Histogram

_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 40, 40
_ROW, _LABEL, _FIGURE = 24, 190, 64
_GRID_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
_MAX_GRID_LINES = 6
_ALL_LABELLED = 10


def histogram(block: Histogram) -> str:
    """Columns: share of `things` in each bin; line: share of tokens. The x axis is logarithmic."""
    things = _shares([one.count for one in block.bins])
    tokens = _shares([one.tokens for one in block.bins])
    top = max(*things, *tokens)
    step = next((step for step in _GRID_STEPS if top / step <= _MAX_GRID_LINES), _GRID_STEPS[-1])
    ceiling = step * -(-top // step)
    each = (_WIDTH - _LEFT - _RIGHT) / len(block.bins)
    ground = _HEIGHT - _BOTTOM

    def height(share: float) -> float:
        return (ground - _TOP) * share / ceiling

    parts = [*_legend(block), *_grid(step, ceiling, height)]
    for index, (one, thing, token) in enumerate(zip(block.bins, things, tokens, strict=True)):
        x = _LEFT + index * each
        title = f"{one.label} tokens: {one.count:,} {block.things} ({thing:.2%}), {token:.2%} of all tokens"
        parts.append(
            f'<rect class="column" x="{x + 0.08 * each:.1f}" y="{ground - height(thing):.1f}" width="{0.84 * each:.1f}"'
            f' height="{height(thing):.1f}"><title>{escape(title)}</title></rect>'
        )
        # Powers of 4 are bin edges, and their labels do not overlap.
        power_of_4 = one.first & (one.first - 1) == 0 and one.first.bit_length() % 2
        if power_of_4 or len(block.bins) <= _ALL_LABELLED:
            parts.append(f'<path class="axis" d="M{x:.1f} {ground}v5"/>')
            parts.append(f'<text class="middle" x="{x:.1f}" y="{ground + 18}">{one.first:,}</text>')
    middles = [_LEFT + (index + 0.5) * each for index in range(len(tokens))]
    points = [f"{x:.1f},{ground - height(share):.1f}" for x, share in zip(middles, tokens, strict=True)]
    parts.append(f'<polyline class="line" points="{" ".join(points)}"/>')
    for point in points:
        x, y = point.split(",")
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"/>')
    parts.append(f'<path class="axis" d="M{_LEFT} {ground}H{_WIDTH - _RIGHT}"/>')
    parts.append(f'<text class="middle" x="{_WIDTH / 2}" y="{_HEIGHT - 4}">tokens</text>')
    return _svg(_WIDTH, _HEIGHT, block.title, parts)


def bars(block: Bars) -> str:
    """Horizontal bars, one under the other, each with its label and its share."""
    greatest = 1 if block.whole else max(block.shares) or 1
    room = _WIDTH - _LABEL - _FIGURE
    parts = []
    for index, (label, share) in enumerate(zip(block.labels, block.shares, strict=True)):
        y = index * _ROW
        text_y = y + _ROW / 2 + 4
        parts.append(f'<text class="end" x="{_LABEL - 8}" y="{text_y}">{escape(label)}</text>')
        if block.whole:
            parts.append(f'<rect class="track" x="{_LABEL}" y="{y + 4}" width="{room}" height="{_ROW - 8}"/>')
        parts.append(
            f'<rect class="column" x="{_LABEL}" y="{y + 4}" width="{room * share / greatest:.1f}" height="{_ROW - 8}"/>'
        )
        parts.append(f'<text x="{_LABEL + room * (1 if block.whole else share / greatest) + 6:.1f}" y="{text_y}">')
        parts.append(f"{share:.2%}</text>")
    return _svg(_WIDTH, _ROW * len(block.labels), "shares", parts)


def _legend(block: Histogram) -> list[str]:
    return [
        f'<text class="title" x="{_LEFT}" y="12">{escape(block.title)}</text>',
        f'<rect class="column" x="{_WIDTH - 250}" y="4" width="10" height="10"/>',
        f'<text x="{_WIDTH - 236}" y="13">share of {escape(block.things)}</text>',
        f'<path class="line" d="M{_WIDTH - 116} 9h14"/><circle class="dot" cx="{_WIDTH - 109}" cy="9" r="2.5"/>',
        f'<text x="{_WIDTH - 98}" y="13">share of tokens</text>',
    ]


def _grid(step: float, ceiling: float, height) -> list[str]:
    parts = []
    for line in range(round(ceiling / step) + 1):
        y = _HEIGHT - _BOTTOM - height(line * step)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{line * step:.0%}</text>')
    return parts


def _shares(counts: list[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]


def _svg(width: int, height: int, label: str, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
