"""The section of the page about probes, and its numbers over checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

from bert_jax.analysis.probes.tree_section import erasure_blocks, tree_blocks
from bert_jax.analysis.quantities import RANDOM, Quantity, by_index, cells, compared, is_finite
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Note, ReportBlock, Table

TITLES = {"pos": "Parts of speech", "relations": "Dependency relations", "entities": "Entities"}


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    found: dict[str, Scalar] = {}
    for name, task in result["tasks"].items():
        title, of_model, random = TITLES[name], task["model"], task["random_weights"]
        best, best_random = (max(range(len(one["score"])), key=one["score"].__getitem__) for one in (of_model, random))
        constants = {"most frequent label": task["majority"], "word's most frequent label": task["word_type"]}
        for what, key, more in (
            (f"{task['metric']}, best state (%)", "score", constants),
            ("selectivity of that state (points)", "selectivity", {}),
        ):
            baselines = {RANDOM: random[key][best_random], **more}
            found[f"{title}: {what}"] = compared(of_model[key][best], baselines, 100)
        if "span_f1" in of_model:
            scores = [max(one["span_f1"]) for one in (of_model, random)]
            found[f"{title}: span F1, best state (%)"] = compared(scores[0], {RANDOM: scores[1]}, 100)
        centres = [one["mix"]["centre_of_gravity"] for one in (of_model, random)]
        baselines = {RANDOM: centres[1], "equal weights": result["layers"] / 2}
        found[f"{title}: centre of gravity (state)"] = compared(centres[0], baselines)
    if result["treebank"] is not None:
        structure, attention = result["treebank"]["structure"], result["treebank"]["attention_trees"]
        probes = [
            max(filter(is_finite, structure[name]["uuas"]), default=math.nan) for name in ("model", "random_weights")
        ]
        heads = [max(map(max, attention[name])) for name in ("model", "random_weights")]
        baselines = {RANDOM: probes[1], "chain": structure["chain"]["uuas"]}
        found["UUAS of the structural probe, best state (%)"] = compared(probes[0], baselines, 100)
        trees = {RANDOM: heads[1], "chain": attention["chain_uuas"], "random trees": attention["random_uuas"]}
        found["UUAS of trees from attention, best head (%)"] = compared(heads[0], trees, 100)
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
        found += tree_blocks(result["treebank"]["structure"], result["treebank"]["attention_trees"])
        found += erasure_blocks(result["treebank"]["erasure"])
    found.append(
        Note(
            "A probe learns, too: compare it with its control task, in which every word type has a random label, and "
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
        by_index(header, list(map(cells, columns))),
    ]


def _mix_blocks(tasks: dict[str, Any]) -> list[ReportBlock]:
    if not tasks:
        return []
    mixes = {TITLES[name]: (task["model"]["mix"], task["random_weights"]["mix"]) for name, task in tasks.items()}
    gains = {title: model["score"] for title, (model, _) in mixes.items()}
    random_gains = {f"{title}, {RANDOM}": random["score"] for title, (_, random) in mixes.items()}
    keys = ("centre_of_gravity", "weights_divergence_bits", "expected_layer", "gain_concentration_bits")
    rows = [
        (f"{title}{suffix}", *cells((one[key] for key in keys), ".2f"))
        for title, pair in mixes.items()
        for one, suffix in zip(pair, ("", ", random weights"), strict=True)
    ]
    metric, weights = "accuracy or label F1", {title: model["weights"] for title, (model, _) in mixes.items()}
    return [
        Note(
            "A scalar mix is a weighted mean of hidden states whose weights are learnt with the probe. The gain from "
            "the mix of states 0 to l - 1 to that of 0 to l shows what state l adds; the expected layer is the mean "
            "of l by gain. K is the divergence from equal weights (K(s)) or equal gains (K(Delta))."
        ),
        Quantity("Mixes of the states 0 to l", metric, gains, random_gains, "l", same_colors=True).curves(),
        Quantity("Weights of the mix of all states", "softmax weight", weights).curves(),
        Table(("task", "centre of gravity", "K(s) (bits)", "expected layer", "K(Delta) (bits)"), tuple(rows)),
    ]
