"""The section of the page about fine-tuning, and its numbers over checkpoints."""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from bert_jax.analysis.fine_tuning.dev_scores import restored_parts
from bert_jax.analysis.quantities import (
    RANDOM,
    Quantity,
    by_head,
    by_index,
    interval_cells,
    paired,
    scalar_of_mean,
)
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Curves, Heatmap, Note, ReportBlock, Table
from bert_jax.report.cells import cell
from bert_jax.training.param_paths import LAYERS


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    similarity = result["similarity"]

    def with_random(key: str) -> Scalar:
        return Quantity("", "", *({row: similarity[row][key]} for row in ("base", "random_weights"))).at(-1)

    attention = [similarity[name]["attention_cosine_mean"] for name in ("base", "random_weights")]
    scores = {"random body": result["random_body_score"]["value"], "best constant": result["best_constant_score"]}
    by_part = Quantity("", "", {"": result["restored_score"]}, scores)
    return {
        "CKA with the base, last state": with_random("cka_of_tokens"),
        "cosine of tokens with the base, last state": with_random("cosine_of_tokens"),
        "attention cosine with the base, mean of heads": scalar_of_mean(attention[0], {RANDOM: attention[1]["value"]}),
        "score": by_part.at(0),
        "score with the base's body": by_part.at(-1),
    }


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    similarity = result["similarity"]
    return (
        Note("What does fine-tuning change, in which layers, and does the task need it?"),
        Note(
            f"Task {result['task']}: vectors of {similarity['tokens']:,} tokens and attention in "
            f"{result['compared_examples']:,} examples of dev; losses over {result['loss_examples']['train']:,} "
            f"examples of train and {result['loss_examples']['dev']:,} of dev; seed {result['seed']}. Head and pooler "
            "are those of the fine-tuned model at every point: a pretrained model has no task head. Scores are of all "
            f"{result['scored_examples']:,} examples of dev. Bands and square brackets: 95 % over examples, of CKA by "
            "leaving out tenths of them, of a head in the map at most "
            f"{cell(similarity['base']['attention_half_width'], '.3f')} to either side; a score that is a correlation "
            "has none."
        ),
        *_similarities(result),
        *_distances(result),
        *_restored(result),
        _line(result),
        Note(
            "A layer that changes little may still matter, and a large change of weights need not change what is "
            "computed. Linear CKA ignores rotations, the cosine does not. A head was trained on the fine-tuned last "
            "state, so a low score with restored layers shows what this head needs, not what the restored body lacks. "
            "The line is one of very many directions: a flat line does not show a flat minimum."
        ),
    )


def _similarities(result: SuiteResult) -> list[ReportBlock]:
    base, random = (result["similarity"][row] for row in ("base", "random_weights"))
    names = {"cosine_of_tokens": "cosine, tokens", "cosine_of_cls": "cosine, [CLS]", "cka_of_tokens": "CKA, tokens"}
    lines = {name: base[key] for key, name in names.items()}
    baselines = {f"{name}, {RANDOM}": random[key] for key, name in names.items()}
    means = (one["attention_cosine_of_layers"] for one in (base, random))
    columns = [*(paired(base[key], random[key]) for key in names), ["", *paired(*means)]]
    return [
        Quantity("Similarity to the pretrained model", "similarity", lines, baselines, same_colors=True).curves(),
        by_head("Cosine of attention maps", base["attention_cosine"], "cosine"),
        by_index(("state (random weights)", *names.values(), "attention of the layer below"), columns, words=True),
    ]


def _distances(result: SuiteResult) -> list[ReportBlock]:
    distances = result["parameter_distance"]
    stacked = {path.removeprefix(LAYERS): by_layer for path, by_layer in distances.items() if path.startswith(LAYERS)}
    kernels = {path: by_layer for path, by_layer in stacked.items() if path.endswith("/kernel")}
    values = np.array(list(kernels.values())).T
    columns = tuple(path.removesuffix("/kernel") for path in kernels)
    rows = [(path, f"{one:.4f}") for path, one in distances.items() if not path.startswith(LAYERS)]
    rows += [(f"{LAYERS}{path} (mean of layers)", f"{np.mean(by_layer):.4f}") for path, by_layer in stacked.items()]
    return [
        Heatmap(
            "Change of the weights, relative to their length",
            tuple(map(tuple, values.tolist())),
            tuple(map(str, range(len(values)))),
            columns,
            "layer",
            "matrix",
            "relative distance",
        ),
        Table(("tensor", "relative distance"), tuple(rows)),
    ]


def _restored(result: SuiteResult) -> list[ReportBlock]:
    scores, losses = result["restored_score"], result["restored_loss"]
    random, constant = result["random_body_score"], result["best_constant_score"]
    restored = Quantity(
        "Score with early parts set back to the pretrained ones",
        result["metric"],
        {"early parts restored": scores},
        {"body of random weights": random["value"], "best constant": constant},
        "restored parts (1: embeddings, then layers from below)",
    )
    names = [*restored_parts(len(losses) - 2), RANDOM, "best constant prediction"]
    with_random = {key: [*of_parts, random[key]] for key, of_parts in scores.items()}
    of_models = [*interval_cells(with_random, ".4f"), cell(constant, ".4f")]
    every = [*losses, result["random_body_loss"]]
    by_split = (interval_cells(_over_points(every, split), ".4f") for split in ("train", "dev"))
    columns = [names, of_models, *by_split]
    return [
        restored.curves(),
        Table(
            ("restored", "score", "loss, train", "loss, dev"),
            tuple(itertools.zip_longest(*columns, fillvalue="")),
            words=True,
        ),
    ]


def _over_points(losses: list[dict[str, dict[str, float]]], split: str) -> dict[str, list[float]]:
    return {end: [one[split][end] for one in losses] for end in ("value", "low", "high")}


def _line(result: SuiteResult) -> Curves:
    order = np.argsort(result["line"])
    losses = [result["line_loss"][i] for i in order]
    lines = {split: _over_points(losses, split) for split in ("train", "dev")}
    curves = Quantity("Loss on the line", "loss", lines, axis="0: pretrained body, 1: fine-tuned").curves()
    x = tuple(result["line"][i] for i in order)
    return dataclasses.replace(curves, series=tuple(dataclasses.replace(one, x=x) for one in curves.series))
