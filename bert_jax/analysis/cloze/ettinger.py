"""The diagnostics of Ettinger (2020, arXiv:1907.13528): CPRAG-102, ROLE-88, NEG-136-SIMP and NEG-136-NAT.

A context ends in a mask and a period, as in the author's code. A file is recognised by its header. Two measures:
whether the expected word is among the most probable ones (accuracy), and whether the model prefers the completion that
people prefer (sensitivity), also by more than `THRESHOLD` in probability.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.cloze.cloze_scores import preference, share_with_interval, wins
from bert_jax.analysis.cloze.item_files import read_tab_separated
from bert_jax.analysis.cloze.predictions import (
    MASK,
    encode_masked,
    lone_mask_log_probabilities,
    mask_log_probabilities,
    token_of_word,
)
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.errors import UserError, require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.storage.paths import StoredPath

THRESHOLD = 0.01
"""Difference of probabilities, section 5 of the paper."""


class Context(NamedTuple):
    """A text with a mask, and the words that are expected there."""

    text: str
    expected: tuple[str, ...]
    """Any of them counts; empty: the context does not count for accuracy."""
    group: str
    """Of the accuracy."""


class WordComparison(NamedTuple):
    """A word that should be more probable in its context than each of some words in theirs."""

    better: tuple[int, str]
    """Index of the context, and the word."""
    worse: tuple[tuple[int, str], ...]
    groups: tuple[str, ...]
    """In which the sensitivity counts it."""
    cloze_difference: float | None = None
    """Human cloze probability of the better word in its context minus that in the other context."""


class Dataset(NamedTuple):
    """A file."""

    name: str
    contexts: list[Context]
    comparisons: list[WordComparison]


TsvRow = Mapping[str, str]


def masked(context: str) -> str:
    """A context with a mask and a period after it."""
    return f"{context.strip()} {MASK} ."


def build_cprag(rows: Sequence[tuple[str, TsvRow]]) -> tuple[list[Context], list[WordComparison]]:
    """CPRAG-102: the expected word against those within and between categories; by constraint of the context."""
    contexts, comparisons = [], []
    for _, row in rows:
        group, index = f"constraint {row['constraint']}", len(contexts)
        expected, within, between = (row[key] for key in ("expected", "within_category", "between_category"))
        contexts.append(Context(masked(f"{row['context_s1']} {row['context_s2']}"), (expected,), group))
        others = ((index, within), (index, between))
        comparisons += [
            WordComparison((index, expected), others, ("all", group)),
            WordComparison((index, within), ((index, between),), (f"within over between category, {group}",)),
        ]
    return contexts, comparisons


def build_role(rows: Sequence[tuple[str, TsvRow]]) -> tuple[list[Context], list[WordComparison]]:
    """ROLE-88: the target in its context (item N-a) against the same word with the roles reversed (N-b)."""
    contexts: list[Context] = []
    by_item: dict[str, dict[str, tuple[int, str, float]]] = {}
    for where, row in rows:
        item, _, condition = row["item"].partition("-")
        require(condition in ("a", "b"), f"{where}: item '{row['item']}': expected a number, '-' and a or b")
        words = tuple(word.split()[0] for word in row["expected"].split("|") if word.strip())
        target = row["target"].split()
        require(bool(target), f"{where}: an empty target")
        cloze = _number(row["tgt_cloze"], where)
        by_item.setdefault(item, {})[condition] = (len(contexts), target[0], cloze)
        contexts.append(Context(masked(row["context"]), words, "all"))
    comparisons = []
    for item, pair in by_item.items():
        require(len(pair) == 2, f"{rows[0][0].split(', line')[0]}: item {item} has only one of the conditions a and b")
        good, bad = pair["a"], pair["b"]
        comparisons.append(WordComparison(good[:2], (bad[:2],), ("all",), good[2] - bad[2]))
    return contexts, comparisons


def build_negation(rows: Sequence[tuple[str, TsvRow]]) -> tuple[list[Context], list[WordComparison]]:
    """NEG-136: the true word against the false one, in affirmative and in negated contexts; accuracy: affirmative.

    An article ``(a|an)`` is the one that the word at the mask needs, so that true and false words have own contexts.
    """
    contexts, comparisons = [], []
    for _, row in rows:
        licensing = {"Y": ", licensed", "N": ", not licensed"}.get(row.get("licensing", ""), "")
        for polarity, true, false in (
            ("affirmative", row["target_aff"], row["target_neg"]),
            ("negated", row["target_neg"], row["target_aff"]),
        ):
            text, indices = row["context_aff" if polarity == "affirmative" else "context_neg"], []
            for word in (true, false):
                article = "an" if re.match("[aeiouAEIOU]", word) else "a"
                expected = (true,) if polarity == "affirmative" and word == true else ()
                indices.append(len(contexts))
                contexts.append(Context(masked(text.replace("(a|an)", article)), expected, polarity))
            groups = tuple(dict.fromkeys(("all", polarity, polarity + licensing)))
            comparisons.append(WordComparison((indices[0], true), ((indices[1], false),), groups))
    return contexts, comparisons


Builder = Callable[[Sequence[tuple[str, TsvRow]]], tuple[list[Context], list[WordComparison]]]
FORMS: dict[str, tuple[tuple[str, ...], Builder]] = {
    "CPRAG-102": (
        ("item", "context_s1", "context_s2", "expected", "within_category", "between_category", "constraint"),
        build_cprag,
    ),
    "ROLE-88": (
        ("item", "context", "expected", "exp_cloze", "target", "tgt_cloze", "tgt_cloze(strict)"),
        build_role,
    ),
    "NEG-136-NAT": (("item", "context_aff", "context_neg", "target_aff", "target_neg", "licensing"), build_negation),
    "NEG-136-SIMP": (("item", "context_aff", "context_neg", "target_aff", "target_neg"), build_negation),
}
"""Header and reader of each dataset."""


def read_dataset(path: StoredPath) -> Dataset:
    """A file in one of the published forms.

    Raises:
      UserError: another header, a line with another number of fields, an empty field, or no line after the header.
    """
    (_, header), *lines = read_tab_separated(path)
    found = [name for name, (columns, _) in FORMS.items() if tuple(header) == columns]
    known = "; ".join(f"{name}: {' '.join(columns)}" for name, (columns, _) in FORMS.items())
    require(bool(found), f"{path}, line 1: the header is that of no dataset of Ettinger (2020). {known}")
    require(bool(lines), f"{path}: no line after the header")
    rows = []
    for where, fields in lines:
        require(len(fields) == len(header), f"{where}: {len(fields)} fields, the header has {len(header)}")
        require(all(field.strip() for field in fields), f"{where}: an empty field")
        rows.append((where, dict(zip(header, map(str.strip, fields), strict=True))))
    return Dataset(found[0], *FORMS[found[0]][1](rows))


def run(files: Sequence[StoredPath], models: Mapping[str, LoadedModel]) -> tuple[dict[str, Any], dict[str, ItemScores]]:
    """Accuracy and sensitivity of each dataset for the model and the baselines, and the items of its sensitivity.

    Args:
      files: as published, each dataset at most once.
      models: ``model`` and ``random_weights``, with one tokenizer.

    Raises:
      UserError: as `read_dataset`, or two files with one dataset.
    """
    results: dict[str, Any] = {}
    items: dict[str, ItemScores] = {}
    for path in files:
        dataset = read_dataset(path)
        require(dataset.name not in results, f"{path}: a second file with {dataset.name}: keep one of them")
        results[dataset.name], items[dataset.name] = measure(dataset, models)
    return results, {name: one for name, one in items.items() if one.items}


def measure(dataset: Dataset, models: Mapping[str, LoadedModel]) -> tuple[dict[str, Any], ItemScores]:
    """The result of one dataset, and whether the model prefers the better word of each comparison of the group "all".

    Contexts that are too long and words that are several tokens are skipped and counted.

    Args:
      dataset: from `read_dataset`.
      models: as in `run`.
    """
    model = models["model"]
    encoded = encode_masked([context.text for context in dataset.contexts], model)
    fits = [index for index, row in enumerate(encoded) if row is not None]
    words = {word for one in dataset.comparisons for _, word in (one.better, *one.worse)}
    words |= {word for context in dataset.contexts for word in context.expected}
    # The mask is never the first word of a context.
    token_of = {word: token_of_word(word, model.tokenizer) for word in sorted(words)}
    row_of = {index: row for row, index in enumerate(fits)}
    results: dict[str, Any] = {"contexts_too_long": len(encoded) - len(fits), "accuracy": {}, "sensitivity": {}}
    predictions = {name: mask_log_probabilities(one, [encoded[i] for i in fits]) for name, one in models.items()}
    predictions["lone_mask"] = np.tile(lone_mask_log_probabilities(model), (len(fits), 1))
    preferred: dict[str, np.ndarray] = {}
    usable: list[int] = []
    for name, found in predictions.items():
        results["accuracy"][name] = word_accuracy(dataset.contexts, found, token_of, row_of)
        results["sensitivity"][name], by_item = sensitivity(dataset.comparisons, found, token_of, row_of)
        usable, preferred[name] = list(by_item), np.array(list(by_item.values()))
    return results, ItemScores(tuple(f"{dataset.name}, comparison {i}" for i in usable), None, preferred)


def word_accuracy(
    contexts: Sequence[Context],
    predictions: np.ndarray,
    token_of: Mapping[str, int | None],
    row_of: Mapping[int, int],
) -> dict[str, Any]:
    """Share of contexts with an expected word among the 1 and the 5 most probable tokens, by group and over all.

    A context without an expected word that is one token is skipped. Contexts that are equal count once.

    Args:
      contexts: of the dataset.
      predictions: log-probabilities [rows, V].
      token_of: token of each word, None for words of several tokens.
      row_of: row of the context of each index; contexts that are too long are missing.
    """
    ranks: dict[str, list[float]] = {}
    skipped, seen = Counter(not_one_token=0, too_long=0), set()
    for index, context in enumerate(contexts):
        if not context.expected or (context.text, context.expected) in seen:
            continue
        seen.add((context.text, context.expected))
        tokens = [token for token in map(token_of.__getitem__, context.expected) if token is not None]
        if index not in row_of or not tokens:
            skipped["too_long" if index not in row_of else "not_one_token"] += 1
            continue
        row = predictions[row_of[index]]
        best = row[tokens].max()
        rank = 1 + (row > best).sum() + ((row == best).sum() - 1) / 2
        for group in {"all", context.group}:
            ranks.setdefault(group, []).append(float(rank))
    groups = {}
    for group, found in sorted(ranks.items()):
        top_1, top_5 = (share_with_interval(f"top_{k}", sum(r <= k for r in found), len(found)) for k in (1, 5))
        groups[group] = top_1 | top_5 | {"items": len(found)}
    return {"groups": groups, "skipped": dict(skipped)}


def sensitivity(
    comparisons: Sequence[WordComparison],
    predictions: np.ndarray,
    token_of: Mapping[str, int | None],
    row_of: Mapping[int, int],
) -> tuple[dict[str, Any], dict[int, float]]:
    """How often the better word is more probable than all worse ones, and by more than the threshold, by group.

    Arguments as in `word_accuracy`.

    Returns:
      the groups, the skipped comparisons by reason, and, for ROLE-88, the correlation over items of the difference in
      probability with that of human cloze probability; and
      for each comparison of the group "all" that is not skipped, by index, 1 if the better word is preferred, 0.5 for
      a tie, else 0.
    """
    scores: dict[str, list[tuple[float, float]]] = {}
    skipped, differences, by_item = Counter(not_one_token=0, too_long=0), [], {}
    for index, one in enumerate(comparisons):
        pairs = [(row_of.get(context), token_of[word]) for context, word in (one.better, *one.worse)]
        if any(None in pair for pair in pairs):
            skipped["not_one_token" if any(token is None for _, token in pairs) else "too_long"] += 1
            continue
        better, *worse = (float(np.exp(predictions[row, token])) for row, token in pairs)
        for group in one.groups:
            scores.setdefault(group, []).append((better, max(worse)))
        if "all" in one.groups:
            by_item[index] = better, max(worse)
        if one.cloze_difference is not None:
            differences.append((better - worse[0], one.cloze_difference))
    groups = {}
    for group, found in sorted(scores.items()):
        better, worse = np.array(found).T
        above = int((better - worse > THRESHOLD).sum())
        means = {"mean_probability_better": float(better.mean()), "mean_probability_worse": float(worse.mean())}
        groups[group] = (
            preference(better, worse) | share_with_interval("accuracy_above_threshold", above, len(found)) | means
        )
    result: dict[str, Any] = {"groups": groups, "skipped": dict(skipped)}
    if differences:
        probability, cloze = np.array(differences).T
        # Of two items it is 1 or -1, whatever they are.
        defined = len(differences) > 2 and min(probability.std(), cloze.std()) > 0
        result["correlation_with_cloze"] = float(np.corrcoef(probability, cloze)[0, 1]) if defined else None
    preferred = wins(*np.array(list(by_item.values())).reshape(-1, 2).T)
    return result, dict(zip(by_item, preferred.tolist(), strict=True))


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{where}: '{text}' is not a number") from None
