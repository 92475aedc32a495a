"""The section of the page about activation patching, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.analysis.quantities import by_head, compared, floats
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Heatmap, Note, ReportBlock, Table

CONTEXT = "attention.context"
CONTROL = "another pair's activation"
TITLES = {
    "hidden": "Output of a layer",
    "attention.output": "Output of attention",
    "feed_forward.output": "Output of the feed-forward",
}
LISTED_HEADS = 10


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    found, control = result["model"][CONTEXT], result["another_pair"][CONTEXT]
    layer, head = _best_heads(result)[0]
    best = compared(found["restored"][layer][head], {CONTROL: control["restored"][layer][head]}, 100)
    interval = 100 * found["low"][layer][head], 100 * found["high"][layer][head]
    return {
        "restored by the best head (%)": best._replace(interval=interval),
        "total effect (nats)": Scalar(result["mean_total_effect_nats"], {"none": 0.0}),
    }


def _best_heads(result: SuiteResult) -> list[tuple[int, int]]:
    """Layer and head, the one that restores most first."""
    restored = np.array(result["model"][CONTEXT]["restored"])
    order = np.argsort(-restored, axis=None, kind="stable")
    return [tuple(map(int, np.unravel_index(i, restored.shape))) for i in order]


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, maps, the heads that restore most, and how to read them."""
    shown: list[ReportBlock] = [
        Note(
            "Which activation carries the difference between the two sentences of a minimal pair? The model reads the "
            "worse sentence with one activation of the better one; shown is the share of the total effect that comes "
            "back."
        ),
        Note(
            f"{result['pairs']:,} of {result['drawn']:,} pairs ({_reasons(result['skipped'])}); the mean total effect "
            f"is {result['mean_total_effect_nats']:.2f} nats; seed {result['seed']}."
        ),
    ]
    for part, beside in (("model", ""), ("another_pair", f", {CONTROL}")):
        shown += [_by_role(f"{title}{beside}", result, result[part][site]) for site, title in TITLES.items()]
        restored = result[part][CONTEXT]["restored"]
        shown.append(by_head(f"A head, at all tokens{beside}", restored, "share restored", center=0.0))
    shown += [
        _heads_table(result),
        Note(
            "1: all of the effect comes back; 0: nothing; below 0: the patch leads further away. Intervals are of 95 "
            "%, by bootstrap over pairs; the heads are listed because they are the largest, so that the first ones are "
            f"overestimated. {CONTROL.capitalize()}: what the activation of a better sentence that is not this one "
            "does. What comes back shows that the activation is enough, not that it is needed: several can each be "
            "enough."
        ),
    ]
    return tuple(shown)


def _by_role(title: str, result: SuiteResult, found: Mapping[str, Any]) -> Heatmap:
    rows = tuple(map(floats, found["restored"]))
    layers = tuple(map(str, range(len(rows))))
    return Heatmap(title, rows, layers, tuple(result["roles"]), "layer", "tokens", "share restored", 0.0)


def _heads_table(result: SuiteResult) -> Table:
    found, control = result["model"][CONTEXT], result["another_pair"][CONTEXT]
    rows = []
    for layer, head in _best_heads(result)[:LISTED_HEADS]:
        one, low, high = (f"{100 * found[key][layer][head]:.1f}" for key in ("restored", "low", "high"))
        rows.append((f"{layer}.{head}", f"{one} ({low} to {high})", f"{100 * control['restored'][layer][head]:.1f}"))
    return Table(("layer.head", "restored (%)", f"{CONTROL} (%)"), tuple(rows), words=True)


def _reasons(skipped: Mapping[str, int]) -> str:
    left_out = [f"{reason.replace('_', ' ')} {count:,}" for reason, count in skipped.items() if count]
    return "left out: " + (", ".join(left_out) or "none")
