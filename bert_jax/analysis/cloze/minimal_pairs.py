"""Minimal pairs in the form of BLiMP (Warstadt et al. 2020): the better sentence should have the higher score.

Scores are pseudo-log-likelihoods. Baselines: random weights, the sentence with fewer tokens, and the sum of what the
model predicts for each token at a mask without context.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.cloze.cloze_scores import preference, wins
from bert_jax.analysis.cloze.item_files import item_name, read_json_lines, text_of
from bert_jax.analysis.cloze.pll import VARIANTS, pseudo_log_likelihoods
from bert_jax.analysis.cloze.predictions import lone_mask_log_probabilities
from bert_jax.analysis.item_scores import ItemScores
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.rows import TextRow, encode_sentences
from bert_jax.storage.paths import StoredPath

SentenceScores = dict[str, np.ndarray]
"""By name of the score, float64 [rows], or [pairs, 2]: of the better sentence and of the worse one."""


HEADLINE = "within_word_l2r"
"""The variant of the score that intervals and comparisons use."""
WITHOUT_CONTEXT = ("fewer_tokens", "lone_mask")


class SentencePair(NamedTuple):
    """A line of a file."""

    good: str
    bad: str
    uid: str
    """Paradigm; the file's name without its ending where the line has no UID."""
    phenomenon: str
    """`linguistics_term`; "" where the line has none."""
    field: str
    """E.g. syntax; "" where the line has none."""
    item: str
    """Its file and line."""


def read_pairs(files: Sequence[StoredPath]) -> list[SentencePair]:
    """The pairs of all files.

    Raises:
      UserError: a file is empty, or a line is not a JSON object with `sentence_good` and `sentence_bad`.
    """
    pairs = []
    for path in files:
        for where, values in read_json_lines(path):
            good, bad = (text_of(values, key, where) for key in ("sentence_good", "sentence_bad"))
            uid = text_of(values, "UID", where, path.stem)
            groups = (text_of(values, key, where, "") for key in ("linguistics_term", "field"))
            pairs.append(SentencePair(good, bad, uid, *groups, item_name(where)))
    return pairs


def draw_pairs(pairs: Sequence[SentencePair], count: int, seed: int) -> list[SentencePair]:
    """At most count / UIDs pairs of each UID, at least one, in the order of the files; all with `count` 0."""
    if count == 0:
        return list(pairs)
    by_uid: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        by_uid.setdefault(pair.uid, []).append(index)
    per_uid = max(1, count // max(1, len(by_uid)))
    chosen = [
        index
        for number, indices in enumerate(by_uid.values())
        for index in np.random.default_rng([seed, number]).permutation(indices)[:per_uid]
    ]
    return [pairs[index] for index in sorted(chosen)]


def run(
    files: Sequence[StoredPath], models: Mapping[str, LoadedModel], count: int, seed: int, progress: bool
) -> tuple[dict[str, Any], ItemScores]:
    """Accuracy of each score, over UIDs, phenomena and fields; which better sentences are preferred, by `HEADLINE`.

    Args:
      files: in BLiMP's form.
      models: ``model`` and ``random_weights``, with one tokenizer.
      count: pairs to draw, the same number of each UID; 0: all.
      seed: of the draw.
      progress: show progress bars.

    Raises:
      UserError: as `read_pairs`, or no pair fits the model.
    """
    model, pairs = models["model"], read_pairs(files)
    drawn = draw_pairs(pairs, count, seed)
    kept, rows, index = encode_pairs(drawn, model)
    most = model.config.max_positions - 2
    require(bool(kept), f"minimal_pairs: no pair has 1 to {most} tokens in both sentences: give other pairs")
    scores: SentenceScores = {}
    for name, one in models.items():
        found = pseudo_log_likelihoods(one, rows, progress=progress)
        prefix = "" if name == "model" else f"{name}_"
        scores |= {f"{prefix}{variant}": found[variant][index] for variant in VARIANTS}
    scores |= {name: values[index] for name, values in baselines(model, rows).items()}
    uids = [pair.uid for pair in kept]
    by_uid = _by_group(scores, uids)
    columns = {
        "model": HEADLINE,
        "random_weights": f"random_weights_{HEADLINE}",
        **{one: one for one in WITHOUT_CONTEXT},
    }
    preferred = {column: wins(*scores[name].T) for column, name in columns.items()}
    found = {
        "pairs": len(kept),
        "pairs_in_files": len(pairs),
        "not_drawn": len(pairs) - len(drawn),
        "skipped_too_long": len(drawn) - len(kept),
        "scores": list(scores),
        "all_pairs": _accuracies(scores, np.arange(len(kept))),
        "by_uid": by_uid,
        "mean_of_uids": _means_of_groups(scores, uids),
        "by_phenomenon": _by_group(scores, [pair.phenomenon for pair in kept]),
        "by_field": _by_group(scores, [pair.field for pair in kept]),
    }
    return found, ItemScores(tuple(pair.item for pair in kept), tuple(uids), preferred)


def encode_pairs(
    pairs: Sequence[SentencePair], model: LoadedModel
) -> tuple[list[SentencePair], list[TextRow], np.ndarray]:
    """Rows of the sentences of pairs; sentences with the same tokens share a row, so that they tie exactly.

    Returns:
      the pairs whose sentences both fit the model,
      the distinct rows, and
      the rows of the better and of the worse sentence of each kept pair, int64 [pairs, 2].
    """
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    encoded = encode_sentences(sentences, model.tokenizer, model.config.max_positions)
    kept, numbers, rows, index = [], {}, [], []
    for pair, good, bad in zip(pairs, encoded[::2], encoded[1::2], strict=True):
        if good is None or bad is None:
            continue
        for row in (good, bad):
            key = row.input_ids.tobytes()
            if key not in numbers:
                numbers[key] = len(rows)
                rows.append(row)
            index.append(numbers[key])
        kept.append(pair)
    return kept, rows, np.array(index, np.int64).reshape(-1, 2)


def baselines(model: LoadedModel, rows: Sequence[TextRow]) -> SentenceScores:
    """Scores of rows without context: minus the number of tokens, and the tokens' log-probabilities at a lone mask."""
    lone = lone_mask_log_probabilities(model).astype(float)
    tokens = np.array([2 - len(row.input_ids) for row in rows], float)
    # fsum, so that sentences with the same words in another order have the same sum.
    sums = np.array([math.fsum(lone[row.input_ids[1:-1]]) for row in rows])
    return dict(zip(WITHOUT_CONTEXT, (tokens, sums), strict=True))


def _accuracies(scores: SentenceScores, chosen: np.ndarray) -> dict[str, Any]:
    return {name: preference(*values[chosen].T) for name, values in scores.items()}


def _means_of_groups(scores: SentenceScores, groups: Sequence[str]) -> dict[str, Any]:
    """Mean accuracy of the groups by score, and its interval of the bootstrap over pairs within groups."""
    means = bootstrap_mean(np.stack([wins(*values.T) for values in scores.values()]), groups)
    ends = np.stack([means.low, means.high], axis=1).tolist()
    intervals = {f"{name}_interval": of for name, of in zip(scores, ends, strict=True)}
    return dict(zip(scores, means.value.tolist(), strict=True)) | intervals


def _by_group(scores: SentenceScores, groups: Sequence[str]) -> dict[str, Any]:
    """Accuracies by group; pairs without one are left out."""
    names = np.array(groups)
    return {name: _accuracies(scores, np.flatnonzero(names == name)) for name in dict.fromkeys(groups) if name}
