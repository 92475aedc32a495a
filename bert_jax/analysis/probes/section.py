"""The section of the page about probes, and its numbers over checkpoints."""

from collections.abc import Mapping
from typing import Any

from bert_jax.analysis.suite import Result
from bert_jax.report import Block, Curves, Note, Series, Table

STATE = "hidden state (0: embeddings)"
TITLES = {"pos": "Parts of speech", "relations": "Dependency relations", "entities": "Entities"}


def scalars(result: Result) -> Mapping[str, float]:
    """Numbers to draw over checkpoints."""
    found = {}
    for name, task in result["tasks"].items():
        title, of_model = TITLES[name].lower(), task["model"]
        best = max(range(result["layers"] + 1), key=lambda state: of_model["accuracy"][state])
        found[f"{title}, best state (accuracy, %)"] = 100 * of_model["accuracy"][best]
        found[f"{title}, selectivity of that state (points)"] = 100 * of_model["selectivity"][best]
        if "f1" in of_model:
            found[f"{title}, best state (F1, %)"] = 100 * max(of_model["f1"])
    return found


def blocks(result: Result) -> tuple[Block, ...]:
    """Question, figures, tables, and how to read them."""
    x = tuple(range(result["layers"] + 1))
    found: list[Block] = [
        Note(
            "From which hidden state can a linear probe read parts of speech, dependency relations and entities, and "
            "how much of that does it learn by itself?"
        )
    ]
    for folder in ("treebank", "entities"):
        found.append(_sizes(folder, result[folder]))
    for name, task in result["tasks"].items():
        found += _task_blocks(TITLES[name], task, x)
    return (*found, Note(f"Seed {result['seed']}."))


def _sizes(folder: str, sizes: dict[str, int] | None) -> Note:
    if sizes is None:
        return Note(f"The data have no folder {folder}/.")
    return Note(
        f"{folder}/: probes are fitted on {sizes['train_words']:,} words of {sizes['train_sentences']:,} sentences and "
        f"scored on {sizes['dev_words']:,} words of {sizes['dev_sentences']:,} others; {sizes['skipped_sentences']:,} "
        "sentences had too many tokens or a word without one."
    )


def _task_blocks(title: str, task: dict[str, Any], x: tuple[int, ...]) -> list[Block]:
    of_model, random = task["model"], task["random_weights"]

    def constant(name: str, key: str) -> Series:
        return Series(name, x, (task[key],) * len(x), dashed=True)

    accuracy = [
        Series("model", x, tuple(of_model["accuracy"])),
        Series("control task", x, tuple(of_model["control_accuracy"])),
        Series("random weights", x, tuple(random["accuracy"]), dashed=True),
        constant("most frequent label", "majority_accuracy"),
        constant("word's most frequent label", "word_type_accuracy"),
    ]
    compression = [
        Series("model", x, tuple(of_model["compression"])),
        Series("random weights", x, tuple(random["compression"]), dashed=True),
    ]
    header = ("state", "accuracy", "control", "selectivity", "compression", "random weights", "random, selectivity")
    keys = ("accuracy", "control_accuracy", "selectivity", "compression")
    columns = [of_model[key] for key in keys] + [random["accuracy"], random["selectivity"]]
    if "f1" in of_model:
        header, columns = (*header, "F1", "random, F1"), [*columns, of_model["f1"], random["f1"]]
    rows = tuple((str(state), *(f"{column[state]:.3f}" for column in columns)) for state in x)
    return [
        Note(
            f"{title}: {task['labels']} labels, {task['dev_examples']:,} dev examples. "
            f"{task['labels_that_occur_once']} labels occur once in training; {task['dev_examples_with_unseen_label']} "
            "dev examples have a label that does not occur there, which counts as an error. "
            f"{task['dev_examples_with_seen_type']:.1%} of the dev examples have a word of the training sentences; in "
            "the control task, the others can be right by chance only."
        ),
        Curves(f"{title}: linear probes", tuple(accuracy), STATE, "accuracy"),
        Curves(f"{title}: description length", tuple(compression), STATE, "compression"),
        Table(header, rows),
    ]
