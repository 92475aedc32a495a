"""The section of the page about heads, and its numbers over checkpoints."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from bert_jax.analysis.item_scores import test_title
from bert_jax.analysis.quantities import (
    RANDOM,
    Quantity,
    by_head,
    by_index,
    cells,
    interval_cells,
    scalar_of_mean,
    scalar_of_test,
    seeds_text,
)
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Curves, Note, ReportBlock, Series, Table
from bert_jax.report.cells import cell

SHOWN = 10
"""Heads in the table of those that matter most."""


LOSS, RISE = "loss", "rise of the loss without the head that matters most"


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    pruned, whole = result["pruning"]["iterative"]["loss"], {"no head removed": result["loss"]["value"]}
    random_order = {"random order": result["removable_share_random_order"]}
    equal = {RANDOM: result["random_weights_top_tenth_share"]["value"], "all heads equal": 0.1}
    deviation = result["random_weights_top_tenth_share"]["deviation_of_seeds"]
    deviations = {} if deviation is None else {RANDOM: 100 * deviation}
    last = {key: values[-1] for key, values in pruned.items()}
    return {
        f"heads that can be removed until the loss rises by {result['rise']:.0%} (%)": scalar_of_mean(
            result["removable_share"], random_order, 100
        ),
        "share of the importance in the top tenth of the heads (%)": scalar_of_mean(
            result["top_tenth_share"], equal, 100
        )._replace(deviations=deviations),
        **{test_title(test, "nats"): scalar_of_test(result, test) for test in (LOSS, RISE)},
        "loss without any head (nats)": scalar_of_mean(last, whole),
        "rank correlation of importance and leaving one out": scalar_of_mean(
            result["importance_ablation_correlation"], {"no relation": 0.0}
        ),
    }


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    by_layer = ", divided by its norm in the layer" if result["normalize_by_layer"] else ""
    importances = result["importance_normalized" if by_layer else "importance"]
    differences = result["leave_one_out"]["loss_difference"]
    return (
        Note("Which heads does the loss depend on, and how many can be removed?"),
        Note(_about(result)),
        by_head(f"Importance: mean of |d loss / d factor|{by_layer}", importances, "importance"),
        by_head("Loss without one head, less the loss", differences["value"], "difference", center=0.0),
        _most(result),
        _pruning(result, "loss"),
        _pruning(result, "score"),
        _layers(result),
        Note(
            f"{_percent(result['removable_share'])} of the heads can be removed until the loss rises by "
            f"{result['rise']:.0%}; in random order {result['removable_share_random_order']:.0%}. The most important "
            f"tenth of the heads has {_percent(result['top_tenth_share'])} of the importance, with random weights "
            f"{_percent(result['random_weights_top_tenth_share'])}. Bands and brackets: 95 % over the examples, of a "
            f"cell of the map of importances at most {cell(result['importance_half_width'], '.3g')} to either side."
        ),
        Note(
            "A head whose removal changes little can still work: another head may do the same (that is why removing "
            "one is not removing both), or other data may need it. A difference whose interval has 0 is noise. "
            "Removing a head sets its context to zero, a value that no head has in training; a rise of the loss can "
            "come from that alone. No model was trained after the removal."
        ),
    )


def _percent(share: Mapping[str, float]) -> str:
    if share["low"] is None:  # of a single example
        return f"{share['value']:.0%}"
    beside = f", ± {share['deviation_of_seeds']:.0%} of one seed" if share.get("deviation_of_seeds") else ""
    return f"{share['value']:.0%} ({share['low']:.0%} to {share['high']:.0%}{beside})"


def _about(result: SuiteResult) -> str:
    if result["objective"] == "mlm":
        what = (
            f"Loss of {result['labels']:,} masked tokens in {result['examples']:,} texts ({result['mask_share']:.0%} "
            f"of the tokens, all replaced by the mask token), importances from {result['importance_examples']:,} other "
            f"texts; {result['skipped_lines']:,} lines had too many tokens or none"
        )
    else:
        what = (
            f"Task {result['objective']}: loss and score ({result['metric']}) of {result['examples']:,} examples of "
            f"dev, importances from {result['importance_examples']:,} of train; the best constant prediction has score "
            f"{result['best_constant_score']:.4f}"
        )
    values = f"Loss {result['loss']['value']:.4f}, score {result['score']:.4f} with all heads"
    return f"{what}. {values}; {seeds_text(result)}."


def _most(result: SuiteResult) -> Table:
    """The heads without which the loss is highest, by row: layer and head, loss, score, importance."""
    differences = {key: np.array(of) for key, of in result["leave_one_out"]["loss_difference"].items()}
    scores, importances = np.array(result["leave_one_out"]["score"]), np.array(result["importance"])
    ranks = np.empty(importances.size, np.int64)
    ranks[np.argsort(-importances, axis=None, kind="stable")] = np.arange(1, importances.size + 1)
    order = np.argsort(-differences["value"], axis=None, kind="stable")[:SHOWN]
    rows = [
        (
            f"{layer}.{head}",
            interval_cells({key: [of[layer, head]] for key, of in differences.items()}, "+.4f")[0],
            f"{scores[layer, head] - result['score']:+.4f}",
            str(ranks[layer * result["heads"] + head]),
        )
        for layer, head in (divmod(int(index), result["heads"]) for index in order)
    ]
    return Table(("layer.head removed", "loss", "score", "rank of importance"), tuple(rows), words=True)


def _pruning(result: SuiteResult, name: str) -> Curves:
    curves = result["pruning"]
    x = tuple(100 * count / (result["layers"] * result["heads"]) for count in curves["iterative"]["removed"])
    random = curves["random"]
    orders = {"least important first": "iterative", "importances computed once": "once"}
    drawn = Quantity("", "", {title: curves[order][name] for title, order in orders.items()}).curves().series
    series = [
        *(dataclasses.replace(one, x=x) for one in drawn),
        Series(
            "random order",
            x,
            tuple(random[f"{name}_mean"]),
            tuple(random[f"{name}_lowest"]),
            tuple(random[f"{name}_highest"]),
            dashed=True,
        ),
    ]
    if name == "score" and result["best_constant_score"] is not None:
        series.append(Series("best constant", x, (result["best_constant_score"],) * len(x), dashed=True))
    title = {"loss": "Loss of pruned models", "score": f"Score of pruned models: {result['metric']}"}[name]
    bands = "bands: 95 % over examples; lowest to highest random order" if name == "loss" else "band: random orders"
    return Curves(f"{title} ({bands})", tuple(series), "heads removed (%)", name)


def _layers(result: SuiteResult) -> Table:
    removed, whole = result["layers_removed"], {"loss": result["loss"]["value"], "score": result["score"]}

    def less(row: str) -> list[list[str]]:
        return [cells([value - whole[name] for value in removed[row][name]], "+.4f") for name in ("loss", "score")]

    kept = list(map(str, removed["one_head"]["head"]))
    header = ("layer", "no head: loss", "score", "head kept", "only this head: loss", "score")
    return by_index(header, [*less("no_head"), kept, *less("one_head")])
