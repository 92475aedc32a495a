"""The section of the page about activation patching, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.analysis.item_scores import test_title
from bert_jax.analysis.quantities import by_head, floats, scalar_of_mean, scalar_of_test
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Heatmap, Note, ReportBlock, Table

CONTEXT = "attention.context"
BEST_HEAD = "restored by the best head"
CONTROL = "another pair's activation"
TITLES = {
    "hidden": "Output of a layer",
    "attention.output": "Output of attention",
    "feed_forward.output": "Output of the feed-forward",
}
LISTED_HEADS = 10
COLUMNS = ("restored (%)", f"{CONTROL} (%)", "difference (points)")
ABOUT = (
    "1, or 100 %: all of the effect comes back; 0: nothing; below 0: the patch leads further away. In brackets: 95 % "
    "intervals by bootstrap over pairs, too narrow with few pairs. The heads are listed because they are the largest, "
    f"so that the first ones are overestimated. {CONTROL.capitalize()}: what the activation of a better sentence that "
    "is not this one does. Where an activation carries no more than a feature with two values, such as number, this "
    "restores about half of the effect, because half of the other sentences have the same value; where it carries "
    "nothing, 0; where it brings words of the other sentence, often less than 0. What comes back shows that the "
    "activation is enough, not that it is needed: several can each be enough."
)


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    return {
        test_title(BEST_HEAD, "%"): scalar_of_test(result, BEST_HEAD),
        "total effect (nats)": scalar_of_mean(result["total_effect_nats"], {"none": 0.0}),
    }


def _best_heads(result: SuiteResult) -> list[tuple[int, int]]:
    """Layer and head, the one that restores most first."""
    restored = np.array(result["model"][CONTEXT]["value"])
    order = np.argsort(-restored, axis=None, kind="stable")
    return [tuple(map(int, np.unravel_index(i, restored.shape))) for i in order]


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, maps, the heads that restore most, and how to read them."""
    effect = result["total_effect_nats"]
    widest = max(one["half_width"] for one in result["model"].values())
    shown: list[ReportBlock] = [
        Note(
            "Which activation carries the difference between the two sentences of a minimal pair? The model reads the "
            "worse sentence with one activation of the better one; shown is the share of the total effect that comes "
            "back."
        ),
        Note(
            f"{result['pairs']:,} of {result['drawn']:,} pairs ({_reasons(result['skipped'])}); the mean total effect "
            f"is {effect['value']:.2f} nats ({effect['low']:.2f} to {effect['high']:.2f}); seed {result['seed']}."
        ),
    ]
    for part, beside in (("model", ""), ("another_pair", f", {CONTROL}")):
        shown += [_by_role(f"{title}{beside}", result, result[part][site]) for site, title in TITLES.items()]
        restored = result[part][CONTEXT]["value"]
        shown.append(by_head(f"A head, at all tokens{beside}", restored, "share restored", center=0.0))
    heads = " and ".join(f"{layer}.{head}" for layer, head in result["best_heads_of_halves"])
    about_best = (
        f"Each half of the pairs chooses its best head ({heads}), which is measured on the other half: the test"
    )
    shown += [
        _roles_table(result),
        _heads_table(result),
        Note(f'{about_best} "{BEST_HEAD}". Intervals of cells of the maps reach at most {widest:.2f} to either side.'),
        Note(ABOUT),
    ]
    return tuple(shown)


def _by_role(title: str, result: SuiteResult, found: Mapping[str, Any]) -> Heatmap:
    rows = tuple(map(floats, found["value"]))
    layers = tuple(map(str, range(len(rows))))
    return Heatmap(title, rows, layers, tuple(result["roles"]), "layer", "tokens", "share restored", 0.0)


def _heads_table(result: SuiteResult) -> Table:
    chosen = _best_heads(result)[:LISTED_HEADS]
    rows = tuple((f"{layer}.{head}", *_cells(result, CONTEXT, layer, head)) for layer, head in chosen)
    return Table(("layer.head", *COLUMNS), rows, words=True)


def _roles_table(result: SuiteResult) -> Table:
    """The output of each layer, where the share moves: from the tokens that differ to the masked one."""
    rows = tuple(
        (f"{layer}, {name}", *_cells(result, "hidden", layer, result["roles"].index(name)))
        for layer in range(len(result["model"]["hidden"]["value"]))
        for name in ("tokens that differ", "masked token")
    )
    return Table(("output of layer, at", *COLUMNS), rows, words=True)


def _cells(result: SuiteResult, site: str, layer: int, column: int) -> tuple[str, ...]:
    cells = []
    for part in ("model", "another_pair", "difference"):
        value, low, high = (100 * result[part][site][key][layer][column] for key in ("value", "low", "high"))
        cells.append(f"{value:.1f} ({low:.1f} to {high:.1f})")
    return tuple(cells)


def _reasons(skipped: Mapping[str, int]) -> str:
    left_out = [f"{reason.replace('_', ' ')} {count:,}" for reason, count in skipped.items() if count]
    return "left out: " + (", ".join(left_out) or "none")
