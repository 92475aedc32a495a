"""The page of the viewer: weights, tokens, style and script in one HTML file; it loads nothing else.

The page depends on its arguments only: rendering it twice gives the same bytes.
"""

import importlib.resources
import json
from collections.abc import Sequence
from typing import NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from bert_jax.analysis.viewer import svg
from bert_jax.analysis.viewer.attention_maps import LEVELS, AttentionMaps, encode_weights
from bert_jax.analysis.viewer.integrated_gradients import Attribution
from bert_jax.report import figures, html

DARKEST = 0.45
"""Opacity of the color behind the token with the largest value: the text on it has a contrast of 4.5 or more."""


class ColoredText(NamedTuple):
    """The tokens of a text with a number each."""

    title: str
    tokens: tuple[tuple[str, str, float], ...]
    """Token, its number with the sign, and the opacity of its color, negative for a negative number."""


def render_page(
    maps: AttentionMaps,
    title: str,
    first: tuple[int, int] = (0, 0),
    made_by: Sequence[str] = (),
    attribution: Attribution | None = None,
) -> str:
    """The page as text, to be encoded as UTF-8.

    About 22 MB for 144 heads and 512 tokens (docs/analysis/viewer.md).

    Args:
      maps: of `read_attention`.
      title: of the page.
      first: layer and head that are shown first.
      made_by: lines about the page's provenance.
      attribution: of the same text, shown above the heads; None: there is none.
    """
    layers, heads = maps.probabilities.shape[:2]
    about = {
        "tokens": svg.labels(maps.tokens),
        "types": maps.token_types.tolist(),
        "boundary": maps.is_boundary.tolist(),
        "layers": layers,
        "heads": heads,
        "first": first,
        "levels": LEVELS,
        "norms": [[_rounded(head) for head in layer] for layer in maps.value_norms],
        "title": title,
        "drawing": svg.DRAWING,
        "light": svg.LIGHT,
        "shade": figures.SHADES[0][0],
    }
    weights = {f"{n}-{m}": encode_weights(maps.probabilities[n, m]) for n in range(layers) for m in range(heads)}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bert_jax.analysis.viewer", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    script = importlib.resources.files("bert_jax.analysis.viewer").joinpath("viewer.js").read_text("utf-8")
    page = environment.get_template("page.html")
    return page.render(
        title=title,
        generator=Markup(html.GENERATOR),
        about=_json_in_html(about),
        weights=weights,
        script=Markup(script),
        shades=figures.SHADES,
        palette=figures.PALETTE,
        layers=layers,
        heads=heads,
        tokens=len(maps.tokens),
        made_by=made_by,
        attribution=attribution,
        colored=_colored_texts(about["tokens"], attribution),
    )


def _colored_texts(tokens: Sequence[str], attribution: Attribution | None) -> list[ColoredText]:
    """Attributions, and what is shown beside them, in percent."""
    if attribution is None:
        return []
    texts = [_colored_text("integrated gradients", tokens, attribution.of_tokens, "+")]
    for name, shares in attribution.beside.items():
        texts.append(_colored_text(f"{name}, all layers (%)", tokens, 100 * shares, ""))
    return texts


def _colored_text(title: str, tokens: Sequence[str], values: np.ndarray, sign: str) -> ColoredText:
    largest = float(np.abs(values).max()) or 1.0
    decimals = int(np.clip(1 - np.floor(np.log10(largest)), 0, 8))
    numbers = [f"{value:{sign}.{decimals}f}" for value in values]
    return ColoredText(title, tuple(zip(tokens, numbers, DARKEST * values / largest, strict=True)))


def _rounded(norms: np.ndarray) -> list[float]:
    """With 4 digits, so that the page is small."""
    return [float(f"{norm:.4g}") for norm in norms]


def _json_in_html(value: dict) -> Markup:
    """JSON that cannot end the <script> element it is in: `<` is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
