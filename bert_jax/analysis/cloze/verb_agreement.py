"""Subject-verb agreement with masked verbs, as in Goldberg (2019, arXiv:1901.05287).

A line of a file has five fields with tabs between them: the group of the sentence (in Goldberg's file of the sentences
of Linzen et al. 2016, the number of attractors), the sentence, the sentence with ``***mask***`` in place of the verb,
the right form of the verb and the wrong one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.cloze.cloze_scores import mean, preference, wins
from bert_jax.analysis.cloze.item_files import item_name, read_tab_separated
from bert_jax.analysis.cloze.predictions import (
    MASK,
    encode_masked,
    lone_mask_log_probabilities,
    mask_log_probabilities,
    token_of_word,
)
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import TextRow
from bert_jax.storage.paths import StoredPath

FILE_MASK = "***mask***"
CHUNK = 512
"""Sentences whose predictions are in memory at once."""


class Item(NamedTuple):
    """A sentence with a masked verb."""

    group: str
    masked: str
    """With [MASK] in place of the verb."""
    right: str
    wrong: str
    name: str
    """Its file and line."""


def read_items(files: Sequence[StoredPath]) -> list[Item]:
    """The items of all files.

    Raises:
      UserError: a file is empty, or a line has other fields than those of the module.
    """
    items = []
    for path in files:
        for where, fields in read_tab_separated(path):
            expected = f"group, sentence, sentence with {FILE_MASK}, right form, wrong form"
            require(len(fields) == 5, f"{where}: {len(fields)} fields with tabs between them, expected 5: {expected}")
            group, _, masked, right, wrong = (field.strip() for field in fields)
            require(masked.count(FILE_MASK) == 1, f"{where}: the third field must have {FILE_MASK} once")
            require(bool(right and wrong and group), f"{where}: an empty field: expected {expected}")
            items.append(Item(group, masked.replace(FILE_MASK, MASK), right, wrong, item_name(where)))
    return items


def tokens_of_forms(
    items: Sequence[Item], model: LoadedModel
) -> tuple[list[Item], list[TextRow], np.ndarray, dict[str, int]]:
    """The items that can be scored.

    Returns:
      the items whose forms are different single tokens and whose sentence fits,
      their rows,
      the tokens of the right and of the wrong form, int64 [items, 2], and
      how many items were skipped, by reason.
    """
    kept, rows, tokens, skipped = [], [], [], Counter(not_one_token=0, same_token=0, too_long=0)
    for item, row in zip(items, encode_masked([item.masked for item in items], model), strict=True):
        begins = item.masked.startswith(MASK)
        pair = [token_of_word(form, model.tokenizer, begins_text=begins) for form in (item.right, item.wrong)]
        if row is None:
            skipped["too_long"] += 1
        elif None in pair:
            skipped["not_one_token"] += 1
        elif pair[0] == pair[1]:
            skipped["same_token"] += 1
        else:
            kept.append(item)
            rows.append(row)
            tokens.append(pair)
    return kept, rows, np.array(tokens, np.int64).reshape(-1, 2), dict(skipped)


def scores_of_tokens(model: LoadedModel, rows: Sequence[TextRow], tokens: np.ndarray, progress: bool) -> np.ndarray:
    """Log-probabilities of some tokens at the mask of each row, float32 [rows, tokens of a row].

    Args:
      model: with an MLM head.
      rows: with one mask each.
      tokens: int64 [rows, k].
      progress: show a progress bar on stderr.
    """
    found = np.zeros(tokens.shape, np.float32)
    with progress_bar("masked sentences", len(rows), "sentence", shown=progress) as bar:
        for start in range(0, len(rows), CHUNK):
            chunk = slice(start, start + CHUNK)
            predictions = mask_log_probabilities(model, rows[chunk])
            found[chunk] = np.take_along_axis(predictions, tokens[chunk], axis=1)
            bar.update(len(predictions))
    return found


def run(
    files: Sequence[StoredPath], models: Mapping[str, LoadedModel], progress: bool
) -> tuple[dict[str, Any], ItemScores]:
    """Accuracy of the model and of the baselines, over all sentences and by group; which right forms are preferred.

    Args:
      files: of the module's form.
      models: ``model`` and ``random_weights``, with one tokenizer.
      progress: show progress bars.

    Raises:
      UserError: as `read_items`, or no item can be scored.
    """
    model, items = models["model"], read_items(files)
    kept, rows, tokens, skipped = tokens_of_forms(items, model)
    reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items())
    require(bool(kept), f"agreement: none of {len(items)} sentences can be scored ({reasons}): give other sentences")
    scores = {name: scores_of_tokens(one, rows, tokens, progress) for name, one in models.items()}
    scores["lone_mask"] = lone_mask_log_probabilities(model)[tokens]
    groups = np.array([item.group for item in kept])
    by_group = {
        group: {name: preference(*values[groups == group].T) for name, values in scores.items()}
        for group in sorted(set(groups.tolist()))
    }
    found = {
        "sentences": len(kept),
        "sentences_in_files": len(items),
        "skipped": skipped,
        "scores": list(scores),
        "all_sentences": {name: preference(*values.T) for name, values in scores.items()},
        "by_group": by_group,
        "mean_of_groups": {name: mean([one[name]["accuracy"] for one in by_group.values()]) for name in scores},
    }
    preferred = {name: wins(*values.T) for name, values in scores.items()}
    return found, ItemScores(tuple(item.name for item in kept), None, preferred)
