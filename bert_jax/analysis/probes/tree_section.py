"""The parts of the page about trees and about erasure."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from bert_jax.report import Block, Curves, Heatmap, Note, Series, Table

STATE = "hidden state (0: embeddings)"
SCORES = {
    "uuas": "UUAS",
    "distance_spearman": "distances, Spearman",
    "root_accuracy": "root accuracy",
    "depth_spearman": "depths, Spearman",
}
BASELINES = {"control": "shuffled labels erased", "random": "random subspace erased"}
ERASED = {"none": "nothing erased", "leace": "parts of speech erased", **BASELINES}
"""Titles by `erasure.ROWS`."""


def tree_blocks(structure: dict[str, Any], attention: dict[str, Any], x: tuple[int, ...]) -> list[Block]:
    """Structural probes and trees from attention.

    Args:
      structure: by row, and of the chain.
      attention: UUAS of every head by row, and the baselines.
      x: hidden states.
    """
    model, random, chain, control = (
        structure["model"],
        structure["random_weights"],
        structure["chain"],
        structure["model"]["control"],
    )
    figures = []
    for key in ("uuas", "depth_spearman"):
        series = (
            Series("model", x, _floats(model[key])),
            Series("random weights", x, _floats(random[key]), dashed=True),
            Series("chain", x, _floats([chain[key]]) * len(x), dashed=True),
        )
        figures.append(Curves(f"Structural probe: {SCORES[key]}", series, STATE, SCORES[key]))
    rows = [(str(state), *(_number(one[key][state]) for one in (model, random) for key in SCORES)) for state in x]
    rows.append(("chain", *(_number(chain[key]) for key in SCORES), *[""] * len(SCORES)))
    titles = (*SCORES.values(), *(f"random weights, {title}" for title in SCORES.values()))
    return [
        Note(
            "The structural probe maps vectors so that squared distances fit distances in the dependency tree, and "
            "squared norms the depths. UUAS is the share of the gold edges in the minimum spanning tree, without "
            "punctuation; the chain joins every word to its right neighbour. Control: in trees whose arcs depend on "
            f"word types only, state {control['state']} has UUAS {_number(control['uuas'])}, the chain "
            f"{_number(control['chain_uuas'])}."
        ),
        *figures,
        Table(("state", *titles), tuple(rows)),
        *_attention_blocks(attention),
    ]


def _attention_blocks(attention: dict[str, Any]) -> list[Block]:
    model, random = attention["model"], attention["random_weights"]
    best, layer, head = max((value, i, j) for i, heads in enumerate(model) for j, value in enumerate(heads))
    return [
        Heatmap(
            "Trees from attention: UUAS of every head",
            tuple(map(tuple, model)),
            tuple(str(i) for i in range(len(model))),
            tuple(str(j) for j in range(len(model[0]))),
            "layer",
            "head",
            "UUAS",
        ),
        Table(
            ("trees from attention", "UUAS"),
            (
                (f"best head (layer {layer}, head {head})", f"{best:.3f}"),
                ("random weights, best head", f"{max(map(max, random)):.3f}"),
                ("chain", f"{attention['chain_uuas']:.3f}"),
                ("random trees", f"{attention['random_uuas']:.3f}"),
            ),
        ),
        Note(
            f"{attention['edges']:,} edges. The tree is the maximum spanning tree over the attention between words, "
            "both directions added. The best head is chosen on the sentences on which it is scored; the best head of "
            "random weights has the same advantage."
        ),
    ]


def erasure_blocks(erasure: dict[str, Any]) -> list[Block]:
    """LEACE: the probe and the model with parts of speech erased from one layer's output, beside its baselines.

    Args:
      erasure: from `erasure.measure`.
    """
    x, draws = tuple(range(len(erasure["ranks"]))), len(erasure["probe_accuracy"]["random"][0])
    ranks, mlm = sorted(set(erasure["ranks"])), erasure["mlm"]
    majority = Series("most frequent label", x, (erasure["majority_accuracy"],) * len(x), dashed=True)
    found: list[Block] = [
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
        _erasure_table("accuracy of the MLM head (%)", mlm["accuracy"], 100),
        Note(f"{mlm['masked_tokens']:,} masked tokens."),
    ]


def _erasure_curves(what: str, unit: str, by_row: dict[str, list[list[float]]], *more: Series) -> Curves:
    """Means over draws, by layer."""
    series = [
        Series(title, tuple(range(len(by_row[name]))), tuple(map(fmean, by_row[name])), dashed=name in BASELINES)
        for name, title in ERASED.items()
    ]
    return Curves(f"Erasure: {what}", (*series, *more), "layer", unit)


def _erasure_table(
    what: str, by_row: dict[str, list[list[float]]], scale: float = 1.0, names: Sequence[str] = tuple(ERASED)
) -> Table:
    """Mean over draws, and their standard deviation if there are several, by layer."""

    def cell(draws: list[float]) -> str:
        mean = f"{scale * fmean(draws):.3f}"
        return f"{mean} ± {scale * stdev(draws):.3f}" if len(draws) > 1 else mean

    layers = range(len(by_row["leace"]))
    rows = tuple((str(layer), *(cell(by_row[name][layer]) for name in names)) for layer in layers)
    return Table((f"{what}, layer", *(ERASED[name] for name in names)), rows)


def _floats(values: Sequence[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else ""
