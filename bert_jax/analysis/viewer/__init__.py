"""The viewer: all attention heads of a model on one text, as one HTML page that needs no network, and heads as SVG;
attributions of an output to the tokens of the text."""

from bert_jax.analysis.viewer.attention_maps import AttentionMaps, read_attention
from bert_jax.analysis.viewer.html_page import render_page
from bert_jax.analysis.viewer.integrated_gradients import Attribution, AttributionSettings, Baseline, Steps, attribute
from bert_jax.analysis.viewer.svg import lines_svg
from bert_jax.analysis.viewer.view_files import parse_heads, write_view

__all__ = [
    "AttentionMaps",
    "Attribution",
    "AttributionSettings",
    "Baseline",
    "Steps",
    "attribute",
    "lines_svg",
    "parse_heads",
    "read_attention",
    "render_page",
    "write_view",
]
