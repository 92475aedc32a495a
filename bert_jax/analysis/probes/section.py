"""The section of the page about probes, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bert_jax.analysis.item_scores import test_title
from bert_jax.analysis.probes.probe_items import ATTENTION, CONTROL, TITLES, UUAS, label_test
from bert_jax.analysis.probes.tree_section import erasure_blocks, tree_blocks
from bert_jax.analysis.quantities import (
    RANDOM,
    Quantity,
    by_index,
    cells,
    interval_cells,
    scalar_of_mean,
    scalar_of_test,
)
from bert_jax.analysis.suite import UNCERTAINTY, Scalar, SuiteResult
from bert_jax.report import Note, ReportBlock, Table


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    tests, found = result[UNCERTAINTY], {}
    for name, task in result["tasks"].items():
        title, test = TITLES[name], label_test(name, task["metric"])
        found[test_title(test, "%")] = scalar_of_test(result, test)
        selectivity, random = tests[test]["model_minus"][CONTROL], task["random_weights"]
        best = int(np.argmax(random["score"]["value"]))
        found[f"{title}: selectivity of that state (points)"] = scalar_of_mean(
            {**selectivity, "value": selectivity["difference"]}, {RANDOM: random["selectivity"]["value"][best]}, 100
        )
        if (spans := label_test(name, "span F1")) in tests:
            found[test_title(spans, "%")] = scalar_of_test(result, spans)
        centre, of_random = (one["mix"]["centre_of_gravity"] for one in (task["model"], random))
        baselines = {RANDOM: of_random["value"], "equal weights": result["layers"] / 2}
        found[f"{title}: centre of gravity (state)"] = scalar_of_mean(centre, baselines)._replace(over="seeds")
    for test in (UUAS, ATTENTION):
        if test in tests:
            found[test_title(test, "%")] = scalar_of_test(result, test)
    return found


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, figures, tables, and how to read them."""
    found: list[ReportBlock] = [
        Note(
            "From which hidden state can a linear probe read parts of speech, dependency relations, entities and "
            "trees, how much of that does the probe learn by itself, and does the model need it?"
        ),
        _sizes("treebank", result["treebank"]),
        _sizes("entities", result["entities"]),
    ]
    for name, task in result["tasks"].items():
        found += _task_blocks(TITLES[name], task)
    found += _mix_blocks(result["tasks"])
    if result["treebank"] is not None:
        trees = result["treebank"]
        found += tree_blocks(trees["structure"], trees["attention_trees"], result[UNCERTAINTY])
        found += erasure_blocks(result["treebank"]["erasure"])
    seeds = next((task["model"]["seeds"] for task in result["tasks"].values()), 0)
    found.append(
        Note(
            "Bands and square brackets: 95 % over the dev sentences. "
            + (
                f"Scores are means over {seeds} seeds of probes, control tasks and random weights; ± is the standard "
                "deviation of one seed. Description lengths, weights of mixes, their centres of gravity and K(s) are "
                "functions of the training: their bands and brackets are 95 % over the seeds. "
                if seeds > 1
                else "One seed of probes, control tasks and random weights: what another seed changes is not measured "
                "(--probes.seeds), so description lengths, weights of mixes, their centres of gravity and K(s), which "
                "are functions of the training, have no interval. "
            )
            + "A probe learns, too: compare it with its control task, in which every word type has a random label, and "
            "with random weights. State 0 has word and position alone. A label that can be read need not be used by "
            f"the model. Seed {result['seed']}."
        )
    )
    return tuple(found)


def _sizes(folder: str, sizes: dict[str, Any] | None) -> Note:
    if sizes is None:
        return Note(f"The data have no folder {folder}/.")
    return Note(
        f"{folder}/: probes are fitted on {sizes['train_words']:,} words of {sizes['train_sentences']:,} sentences and "
        f"scored on {sizes['dev_words']:,} words of {sizes['dev_sentences']:,} others; {sizes['skipped_sentences']:,} "
        "sentences had too many tokens or a word without one."
    )


def _task_blocks(title: str, task: dict[str, Any]) -> list[ReportBlock]:
    of_model, random = task["model"], task["random_weights"]
    lines = {"model": of_model["score"], "control task": of_model["control_score"]}
    constants = {"most frequent label": task["majority"], "word's most frequent label": task["word_type"]}
    compression = {"model": of_model["compression"]}, {RANDOM: random["compression"]}
    header = ("state", task["metric"], "control", "selectivity", "code (kbit)", "random weights", "random, selectivity")
    keys = ("score", "control_score", "selectivity", "code_kilobits")
    columns = [of_model[key] for key in keys] + [random["score"], random["selectivity"]]
    if "span_f1" in of_model:
        header = (*header, "span F1", "random, span F1")
        columns += [of_model["span_f1"], random["span_f1"]]
    texts = [interval_cells(line) for line in columns]
    for row, places in ((of_model, {"score": 0, "selectivity": 2}), (random, {"score": 4, "selectivity": 5})):
        for key, deviation in (row["deviation_of_seeds"] or {}).items():
            texts[places[key]] = [f"{one} ± {of}" for one, of in zip(texts[places[key]], cells(deviation), strict=True)]
    return [
        Note(
            f"{title}: {task['labels']} labels, {task['dev_examples']:,} dev examples. "
            f"{task['labels_that_occur_once']} labels occur once in training; {task['dev_examples_with_unseen_label']} "
            "dev examples have a label that does not occur there, which counts as an error. "
            f"{task['dev_share_with_seen_type']:.1%} of the dev examples have a word of the training sentences; in "
            "the control task, the others can be right by chance only."
        ),
        Quantity(f"{title}: linear probes", task["metric"], lines, {RANDOM: random["score"], **constants}).curves(),
        Quantity(f"{title}: description length", "uniform code / online code", *compression).curves(),
        by_index(header, texts, words=True),
    ]


def _mix_blocks(tasks: dict[str, Any]) -> list[ReportBlock]:
    if not tasks:
        return []
    mixes = {TITLES[name]: (task["model"]["mix"], task["random_weights"]["mix"]) for name, task in tasks.items()}
    gains = {title: model["score"] for title, (model, _) in mixes.items()}
    random_gains = {f"{title}, {RANDOM}": random["score"] for title, (_, random) in mixes.items()}
    keys = ("centre_of_gravity", "weights_divergence_bits", "expected_layer", "gain_concentration_bits")
    rows = []
    for name, task in tasks.items():
        for row, suffix in (("model", ""), ("random_weights", f", {RANDOM}")):
            means = [task[row]["mix"][key] for key in keys]
            of_keys = {end: [mean[end] for mean in means] for end in ("value", "low", "high")}
            rows.append((f"{TITLES[name]}{suffix}", *interval_cells(of_keys, ".2f")))
    metric, weights = "accuracy or label F1", {title: model["weights"] for title, (model, _) in mixes.items()}
    return [
        Note(
            "A scalar mix is a weighted mean of hidden states whose weights are learnt with the probe. The gain from "
            "the mix of states 0 to l - 1 to that of 0 to l shows what state l adds; the expected layer is the mean "
            "of l by gain. K is the divergence from equal weights (K(s)) or equal gains (K(Delta))."
        ),
        Quantity("Mixes of the states 0 to l", metric, gains, random_gains, "l", same_colors=True).curves(),
        Quantity("Weights of the mix of all states", "softmax weight", weights).curves(),
        Table(
            ("task", "centre of gravity", "K(s) (bits)", "expected layer", "K(Delta) (bits)"), tuple(rows), words=True
        ),
    ]
