"""The section of the page about heads, and its numbers over checkpoints."""

from collections.abc import Mapping

import numpy as np

from bert_jax.analysis.quantities import RANDOM, by_head, by_index, cells, compared
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Curves, Note, ReportBlock, Series, Table

SHOWN = 10
"""Heads in the table of those that matter most."""


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    losses, rise, loss = np.array(result["leave_one_out"]["loss"]), result["rise"], result["loss"]
    whole = {"no head removed": loss}
    random_order = {"random order": result["removable_share_random_order"]}
    equal = {RANDOM: result["random_weights_top_tenth_share"], "all heads equal": 0.1}
    return {
        f"heads that can be removed until the loss rises by {rise:.0%} (%)": compared(
            result["removable_share"], random_order, 100
        ),
        "share of the importance in the top tenth of the heads (%)": compared(result["top_tenth_share"], equal, 100),
        "loss": Scalar(loss, {"no head": result["pruning"]["iterative"]["loss"][-1]}),
        "loss without the head that matters most": Scalar(float(losses.max()), whole),
        "loss without any head": Scalar(result["pruning"]["iterative"]["loss"][-1], whole),
        "rank correlation of importance and leaving one out": Scalar(result["importance_ablation_correlation"]),
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
        by_head("Loss without one head, less the loss", differences, "difference", center=0.0),
        _most(result),
        _pruning(result, "loss"),
        _pruning(result, "score"),
        _layers(result),
        Note(
            f"{result['removable_share']:.0%} of the heads can be removed until the loss rises by "
            f"{result['rise']:.0%}; in random order {result['removable_share_random_order']:.0%}. The most important "
            f"tenth of the heads has {result['top_tenth_share']:.0%} of the importance, with random weights "
            f"{result['random_weights_top_tenth_share']:.0%}."
        ),
        Note(
            "A head whose removal changes little can still work: another head may do the same (that is why removing "
            "one is not removing both), or other data may need it. A difference below two standard errors is noise. "
            "Removing a head sets its context to zero, a value that no head has in training; a rise of the loss can "
            "come from that alone. No model was trained after the removal."
        ),
    )


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
    return f"{what}. Loss {result['loss']:.4f}, score {result['score']:.4f} with all heads; seed {result['seed']}."


def _most(result: SuiteResult) -> Table:
    """The heads without which the loss is highest, by row: layer and head, loss, score, importance."""
    removed = {name: np.array(values) for name, values in result["leave_one_out"].items()}
    importances = np.array(result["importance"])
    ranks = np.empty(importances.size, np.int64)
    ranks[np.argsort(-importances, axis=None, kind="stable")] = np.arange(1, importances.size + 1)
    order = np.argsort(-removed["loss_difference"], axis=None, kind="stable")[:SHOWN]
    rows = [
        (
            f"{layer}.{head}",
            f"{removed['loss_difference'][layer, head]:+.4f}",
            f"{removed['standard_error'][layer, head]:.4f}",
            f"{removed['score'][layer, head] - result['score']:+.4f}",
            str(ranks[layer * result["heads"] + head]),
        )
        for layer, head in (divmod(int(index), result["heads"]) for index in order)
    ]
    return Table(("layer.head removed", "loss", "standard error", "score", "rank of importance"), tuple(rows))


def _pruning(result: SuiteResult, name: str) -> Curves:
    curves = result["pruning"]
    x = tuple(100 * count / (result["layers"] * result["heads"]) for count in curves["iterative"]["removed"])
    random = curves["random"]
    series = [
        Series("least important first", x, tuple(curves["iterative"][name])),
        Series("importances computed once", x, tuple(curves["once"][name])),
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
    return Curves(f"{title} (band: lowest to highest random order)", tuple(series), "heads removed (%)", name)


def _layers(result: SuiteResult) -> Table:
    removed = result["layers_removed"]

    def less(row: str) -> list[list[str]]:
        return [cells([value - result[name] for value in removed[row][name]], "+.4f") for name in ("loss", "score")]

    kept = list(map(str, removed["one_head"]["head"]))
    header = ("layer", "no head: loss", "score", "head kept", "only this head: loss", "score")
    return by_index(header, [*less("no_head"), kept, *less("one_head")])
