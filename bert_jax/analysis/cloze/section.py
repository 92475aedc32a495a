"""The section of the page about cloze tests, and their numbers over checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bert_jax.analysis.cloze.minimal_pairs import HEADLINE
from bert_jax.analysis.cloze.pll import VARIANTS
from bert_jax.analysis.item_scores import interval
from bert_jax.analysis.quantities import RANDOM, cells, compared, interval_cells
from bert_jax.analysis.suite import Scalar, SuiteResult
from bert_jax.report import Note, ReportBlock, Table
from bert_jax.report.cells import cell

NAMES = {
    "original": "PLL, original",
    "within_word_l2r": "PLL, within-word left-to-right",
    "whole_word": "PLL, whole-word",
    "fewer_tokens": "fewer tokens",
    "lone_mask": "a mask without context",
    "random_weights": "random weights",
    "most_frequent_object": "most frequent object",
    "random_weights_original": "random weights, original",
    "random_weights_within_word_l2r": "random weights, left-to-right",
    "random_weights_whole_word": "random weights, whole-word",
}
MAX_ROWS = 80
"""Largest number of groups that a table lists."""


def scalars(result: SuiteResult) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints: accuracy by test, in percent."""
    found: dict[str, Scalar] = {}

    def put(name: str, scalar: Scalar, test: str) -> None:
        found[name] = scalar._replace(interval=interval(result, test))

    if "minimal_pairs" in result:
        means = result["minimal_pairs"]["mean_of_uids"]
        baselines = {RANDOM: means[f"random_weights_{HEADLINE}"], "lone mask": means["lone_mask"]}
        baselines |= {"fewer tokens": means["fewer_tokens"], "chance": 0.5}
        name = "minimal pairs, left-to-right PLL, mean of UIDs (%)"
        put(name, compared(means[HEADLINE], baselines, 100), "minimal_pairs")
    if "agreement" in result:
        accuracies = {name: one["accuracy"] for name, one in result["agreement"]["all_sentences"].items()}
        put("agreement, all sentences (%)", _percent_of_rows(accuracies, chance=0.5), "agreement")
    for name, one in result.get("ettinger", {}).items():
        for part, key, what in (
            ("accuracy", "top_5", "expected word in top 5"),
            ("sensitivity", "accuracy", "completion preferred"),
        ):
            if (of_model := one[part]["model"]["groups"].get("all")) is not None:
                values = {row: one[part][row]["groups"].get("all", {}).get(key) for row in one[part]}
                low, high = of_model[f"{key}_interval"]
                of_test = interval(result, name) if part == "sensitivity" else None
                scalar = _percent_of_rows(values)._replace(interval=of_test or (100 * low, 100 * high))
                found[f"{name}, {what} (%)"] = scalar
    if "lama" in result:
        precisions = {row: one.get("precision_at_1") for row, one in result["lama"]["mean_of_relations"].items()}
        most_frequent = {"most frequent object": precisions["most_frequent_object"]}
        put("facts, P@1, mean of relations (%)", _percent_of_rows(precisions, **most_frequent), "lama")
    return found


def _percent_of_rows(values: Mapping[str, float | None], **more: float) -> Scalar:
    """Of the rows of the model, of random weights and of a lone mask."""
    rows = {RANDOM: values.get("random_weights"), "lone mask": values.get("lone_mask")}
    return compared(values["model"], rows | more, 100)


def blocks(result: SuiteResult) -> tuple[ReportBlock, ...]:
    """Question, tables, and how to read them."""
    parts: dict[str, Callable[[dict[str, Any]], Iterator[ReportBlock]]] = {
        "minimal_pairs": _minimal_pairs,
        "agreement": _agreement,
        "ettinger": _ettinger,
        "lama": _lama,
    }
    shown: list[ReportBlock] = [
        Note("Which of two sentences, and which word at a mask, does the model prefer? A tie counts half.")
    ]
    for name, part in parts.items():
        if name in result:
            shown += part(result[name])
    shown.append(
        Note(
            "Random weights show what the architecture and the tokenizer give; a mask without context shows which "
            "words the model prefers anyway. Chance is 50 % where one of two is chosen. Square brackets: 95 % over the "
            "items of the row, of shares Wilson's interval, of means over UIDs or relations and of mean reciprocal "
            "ranks that of the bootstrap."
        )
    )
    return tuple(shown)


def _minimal_pairs(found: dict[str, Any]) -> Iterator[ReportBlock]:
    yield Note(
        f"Minimal pairs: {found['pairs']:,} pairs of {len(found['by_uid']):,} UIDs ({found['pairs_in_files']:,} in the "
        f"files, {found['not_drawn']:,} not drawn, {found['skipped_too_long']:,} too long). The score of a sentence is "
        "its pseudo-log-likelihood; accuracy is the share of pairs whose better sentence has the higher score."
    )
    rows = [
        (
            NAMES[name],
            _share(found["mean_of_uids"], name),
            _share(one, "accuracy"),
            f"{one['items']:,}",
            f"{one['ties']:,}",
        )
        for name, one in found["all_pairs"].items()
    ]
    yield Table(("score", "mean of UIDs (%)", "all pairs (%)", "pairs", "ties"), tuple(rows))
    columns = (*VARIANTS, "fewer_tokens", "lone_mask")
    for title, key in (("phenomenon", "by_phenomenon"), ("field", "by_field"), ("UID", "by_uid")):
        if found[key]:
            yield from _groups(title, found[key], columns, "pairs")


def _agreement(found: dict[str, Any]) -> Iterator[ReportBlock]:
    yield Note(
        f"Agreement: the right form of a masked verb against the wrong one; {found['sentences']:,} of "
        f"{found['sentences_in_files']:,} sentences ({_reasons(found['skipped'])})."
    )
    groups = {"all": found["all_sentences"], **found["by_group"]}
    yield from _groups("group", groups, tuple(found["scores"]), "sentences")


def _groups(title: str, groups: Mapping[str, Any], columns: tuple[str, ...], unit: str) -> Iterator[ReportBlock]:
    """Accuracies by group; ties are those of the first column."""
    rows = [
        (
            group,
            *(_share(one[name], "accuracy") for name in columns),
            f"{one[columns[0]]['items']:,}",
            f"{one[columns[0]]['ties']:,}",
        )
        for group, one in groups.items()
    ]
    header = (title, *(f"{NAMES.get(name, name)} (%)" for name in columns), unit, "ties")
    yield Table(header, tuple(rows[:MAX_ROWS]), words=True)
    if len(rows) > MAX_ROWS:
        yield Note(f"{len(rows) - MAX_ROWS:,} more groups are in the JSON file.")


def _ettinger(found: dict[str, Any]) -> Iterator[ReportBlock]:
    yield Note(
        "Diagnostics of Ettinger (2020): is the expected word among the 1 and the 5 most probable ones, and is the "
        "completion that people prefer more probable than the others, also by more than 0.01?"
    )
    scores = ("model", "random_weights", "lone_mask")
    rows = [
        (
            f"{name}, {group}",
            *(_share(one["accuracy"][score]["groups"][group], f"top_{k}") for score in scores for k in (1, 5)),
            f"{values['items']:,}",
            f"{sum(one['accuracy']['model']['skipped'].values()):,}",
        )
        for name, one in found.items()
        for group, values in one["accuracy"]["model"]["groups"].items()
    ]
    header = [f"{NAMES.get(score, score)}, top {k} (%)" for score in scores for k in (1, 5)]
    yield Table(("group", *header, "contexts", "skipped in the file"), tuple(rows), words=True)
    rows = [
        (
            f"{name}, {group}",
            *(_share(one["sensitivity"][score]["groups"][group], "accuracy") for score in scores),
            _share(values, "accuracy_above_threshold"),
            f"{values['items']:,}",
            f"{values['ties']:,}",
            f"{sum(one['sensitivity']['model']['skipped'].values()):,}",
        )
        for name, one in found.items()
        for group, values in one["sensitivity"]["model"]["groups"].items()
    ]
    header = [f"{NAMES.get(score, score)} (%)" for score in scores]
    columns = ("completion preferred", *header, "model, by more than 0.01 (%)", "items", "ties", "skipped in the file")
    yield Table(columns, tuple(rows), words=True)
    for name, one in found.items():
        for part, what in (("accuracy", "context with an expected word"), ("sensitivity", "item with completions")):
            if not one[part]["model"]["groups"]:
                yield Note(f"{name}: no {what} can be used ({_reasons(one[part]['model']['skipped'])}).")
        correlation, random = (
            one["sensitivity"][row].get("correlation_with_cloze") for row in ("model", "random_weights")
        )
        if correlation is not None:
            beside = "" if random is None else f", of random weights {random:.2f}"
            yield Note(
                f"{name}: the difference in probability between the contexts of an item has a correlation of "
                f"{correlation:.2f}{beside} with the difference in human cloze probability "
                f"({one['sensitivity']['model']['groups']['all']['items']:,} items)."
            )


def _lama(found: dict[str, Any]) -> Iterator[ReportBlock]:
    yield Note(
        f"Facts: {found['facts']:,} of {found['facts_in_files']:,} ({_reasons(found['skipped'])}); the object is one "
        f"of {found['candidates']:,} tokens (vocabulary: {found['vocabulary']}). Means are over relations."
    )
    means = found["mean_of_relations"]
    rows = [
        (
            NAMES.get(name, name),
            *(_share(means[name], key) for key in ("precision_at_1", "precision_at_10")),
            _share(means[name], "mean_reciprocal_rank", ".3f", 1),
        )
        for name in ("model", "random_weights", "lone_mask", "most_frequent_object")
    ]
    yield Table(("score", "P@1 (%)", "P@10 (%)", "mean reciprocal rank"), tuple(rows))
    yield _variants(found)
    rows = [
        (
            name,
            *(_share(one["model"], key) for key in ("precision_at_1", "precision_at_10")),
            _share(one["model"], "mean_reciprocal_rank", ".3f", 1),
            *(_share(one[part], "precision_at_1") for part in ("random_weights", "most_frequent_object")),
            f"{one['model']['facts']:,}",
            f"{one['model']['ties']:,}",
        )
        for name, one in found["by_relation"].items()
    ]
    header = ("relation", "P@1 (%)", "P@10 (%)", "MRR", "random weights, P@1 (%)", "most frequent object, P@1 (%)")
    yield Table((*header, "facts", "facts with ties"), tuple(rows), words=True)


def _variants(found: dict[str, Any]) -> Table:
    """What negation and mispriming change."""
    means = found["mean_of_relations"]
    negated, primed = means["negated"], means["misprimed"]
    correlation = cell(negated["rank_correlation"], ".3f", "")
    facts = {part: sum(one[part]["facts"] for one in found["by_relation"].values()) for part in means}
    rows = (
        (
            "negated",
            f"{facts['negated']:,}",
            _percent(negated["precision_at_1_original"]),
            _percent(negated["precision_at_1_of_object"]),
            f"same answer {_percent(negated['same_answer'])} %, rank correlation {correlation}",
        ),
        (
            "misprimed",
            f"{facts['misprimed']:,}",
            _percent(primed["precision_at_1_original"]),
            _percent(primed["precision_at_1"]),
            f"answers the misprime {_percent(primed['answers_the_misprime'])} %",
        ),
    )
    header = ("variant", "facts", "P@1 of the object, original (%)", "P@1 of the object, variant (%)", "answers")
    return Table(header, rows, words=True)


def _reasons(skipped: Mapping[str, int]) -> str:
    """Counts of what was left out, in words."""
    return "left out: " + ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in skipped.items())


def _share(values: Mapping[str, Any], key: str, form: str = ".1f", factor: float = 100) -> str:
    """A share with its interval, if it has one; empty if it is not there."""
    low, high = values.get(f"{key}_interval", (None, None))
    return interval_cells({"value": [values.get(key)], "low": [low], "high": [high]}, form, factor)[0]


def _percent(value: float | None) -> str:
    return cells([value], ".1f", 100)[0]
