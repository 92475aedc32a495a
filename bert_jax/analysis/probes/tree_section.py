"""The parts of the page about trees and about erasure."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from bert_jax.analysis.item_scores import MODEL, with_interval
from bert_jax.analysis.probes.probe_items import ATTENTION
from bert_jax.analysis.probes.probe_items import RANDOM as RANDOM_ROW
from bert_jax.analysis.quantities import RANDOM, Quantity, by_head, by_index, cells, interval_cells
from bert_jax.report import Curves, Note, ReportBlock, Table
from bert_jax.report.cells import cell

SCORES = {
    "uuas": "UUAS",
    "distance_spearman": "distances, Spearman",
    "root_accuracy": "root accuracy",
    "depth_spearman": "depths, Spearman",
}
BASELINES = {"control": "shuffled labels erased", "random": "random subspace erased"}
ERASED = {"none": "nothing erased", "leace": "parts of speech erased", **BASELINES}
"""Titles by `erasure.ROWS`."""
ABOVE = {
    f"leace_minus_{name}": f"parts of speech less {title.removesuffix(' erased')}" for name, title in BASELINES.items()
}
"""Titles of `erasure.rises`."""


def tree_blocks(structure: dict[str, Any], attention: dict[str, Any], tests: Mapping[str, Any]) -> list[ReportBlock]:
    """Structural probes and trees from attention.

    Args:
      structure: by row, and of the chain.
      attention: UUAS of every head by row.
      tests: of `item_scores.uncertainty`.
    """
    model, random, chain = (structure[name] for name in ("model", "random_weights", "chain"))
    control = structure["control"]
    uuas, of_chain = (interval_cells({k: [v] for k, v in control[name].items()})[0] for name in ("uuas", "chain_uuas"))
    figures = [
        Quantity(
            f"Structural probe: {SCORES[key]}",
            SCORES[key],
            {"model": model[key]},
            {RANDOM: random[key], "chain": chain[key]},
        ).curves()
        for key in ("uuas", "depth_spearman")
    ]
    columns = [interval_cells(model[key]) + cells([chain[key]]) for key in SCORES]
    columns += [interval_cells(random[key]) for key in SCORES]
    titles = (*SCORES.values(), *(f"{RANDOM}, {title}" for title in SCORES.values()))
    return [
        Note(
            "The structural probe maps vectors so that squared distances fit distances in the dependency tree, and "
            "squared norms the depths. UUAS is the share of the gold edges in the minimum spanning tree, without "
            "punctuation; the chain joins every word to its right neighbour. Control: in trees whose arcs depend on "
            f"word types only, state {control['state']} has UUAS {uuas}, the chain {of_chain}."
        ),
        *figures,
        by_index(("state", *titles), columns, ["chain"], words=True),
        *_attention_blocks(attention, tests[ATTENTION]["columns"]),
    ]


def _attention_blocks(attention: dict[str, Any], columns: Mapping[str, Any]) -> list[ReportBlock]:
    model = attention["model"]
    best, layer, head = max((value, i, j) for i, heads in enumerate(model) for j, value in enumerate(heads))
    names = {MODEL: "best head", RANDOM_ROW: f"{RANDOM}, best head", "chain": "chain", "random_trees": "random trees"}
    rows = tuple((title, with_interval(columns[name])) for name, title in names.items())
    return [
        by_head("Trees from attention: UUAS of every head", model, "UUAS"),
        Table(("trees from attention", "UUAS (%)"), rows, words=True),
        Note(
            f"{attention['edges']:,} edges. The tree is the maximum spanning tree over the attention between words, "
            "both directions added. The best head is chosen on half of the sentences and scored on the other half, "
            f"both ways; on all of them it is head {head} of layer {layer}, with {best:.3f}. The 95 % interval of a "
            f"head in the map is at most {cell(attention['half_width'], '.3f')} to either side."
        ),
    ]


def erasure_blocks(erasure: dict[str, Any]) -> list[ReportBlock]:
    """LEACE: the probe and the model with parts of speech erased from one layer's output, beside its baselines.

    Args:
      erasure: from `erasure.measure`.
    """
    draws = len(erasure["probe_accuracy"]["random"][0])
    ranks, mlm = sorted(set(erasure["ranks"])), erasure["mlm"]
    majority = {"most frequent label": erasure["majority_accuracy"]}
    found: list[ReportBlock] = [
        Note(
            "Erasure (LEACE) removes from the output of one layer the subspace that a linear probe can use, of rank "
            f"{' or '.join(map(str, ranks))}; at every word, in sentences with masked tokens. Its baselines have the "
            f"same rank: LEACE of shuffled labels, and a random subspace, uniform in the whitened space; {draws} draws "
            "of each, shown as mean ± standard deviation. An effect is one of parts of speech only as far as it "
            f"exceeds both. Fitted on {erasure['fitted_tokens']:,} tokens, scored on {erasure['scored_tokens']:,}."
        ),
        _erasure_table("variance removed (%)", erasure["variance_removed"], 100, tuple(ERASED)[1:]),
        _erasure_curves("linear probe for parts of speech", "accuracy", erasure["probe_accuracy"], majority),
        _erasure_table("accuracy of the probe (%)", erasure["probe_accuracy"], 100),
    ]
    if mlm is None:
        return [*found, Note("The model has no MLM head for masked tokens, so what it loses is not measured.")]
    return [
        *found,
        _erasure_curves("loss at masked tokens", "nats", mlm["loss_nats"]),
        _erasure_table("loss (nats)", mlm["loss_nats"]),
        by_index(
            ("rise of the loss (nats), layer", *(ERASED[name] for name in ERASED if name != "none"), *ABOVE.values()),
            [interval_cells(mlm["rise_nats"][name]) for name in (*tuple(ERASED)[1:], *ABOVE)],
            words=True,
        ),
        _erasure_table("accuracy of the MLM head (%)", mlm["accuracy"], 100),
        Note(
            f"{mlm['masked_tokens']:,} masked tokens in {mlm['sentences']:,} sentences, over which the intervals are."
        ),
    ]


def _erasure_curves(
    what: str, unit: str, by_row: dict[str, list[list[float]]], constants: Mapping[str, float] = {}
) -> Curves:
    """Means over draws, by layer."""
    means = {title: list(map(fmean, by_row[name])) for name, title in ERASED.items()}
    baselines = {title: means.pop(title) for title in BASELINES.values()}
    return Quantity(f"Erasure: {what}", unit, means, baselines | constants, axis="layer").curves()


def _erasure_table(
    what: str, by_row: dict[str, list[list[float]]], scale: float = 1.0, names: Sequence[str] = tuple(ERASED)
) -> Table:
    """Mean over draws, and their standard deviation if there are several, by layer."""

    def text(draws: list[float]) -> str:
        mean = f"{scale * fmean(draws):.3f}"
        return f"{mean} ± {scale * stdev(draws):.3f}" if len(draws) > 1 else mean

    header = (f"{what}, layer", *(ERASED[name] for name in names))
    return by_index(header, [list(map(text, by_row[name])) for name in names])
