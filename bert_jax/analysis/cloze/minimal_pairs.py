"""Minimal pairs in the form of BLiMP (Warstadt et al. 2020): the better sentence should have the higher score.

Scores are pseudo-log-likelihoods. Baselines: random weights, the sentence with fewer tokens, and the sum of what the
model predicts for each token at a mask without context.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.cloze.files import read_json_lines, text_of
from bert_jax.analysis.cloze.measures import mean, preference
from bert_jax.analysis.cloze.pll import VARIANTS, pseudo_log_likelihoods
from bert_jax.analysis.cloze.predictions import lone_mask_log_probabilities
from bert_jax.analysis.rows import Row, encode_sentences
from bert_jax.errors import require
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.storage import StoredPath

Scores = dict[str, np.ndarray]
"""By name of the score, float64 [pairs, 2]: of the better sentence and of the worse one."""


class Pair(NamedTuple):
    """A line of a file."""

    good: str
    bad: str
    uid: str
    """Paradigm; the file's name without its ending where the line has no UID."""
    phenomenon: str
    """`linguistics_term`; "" where the line has none."""
    field: str
    """E.g. syntax; "" where the line has none."""


def read_pairs(files: Sequence[StoredPath]) -> list[Pair]:
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
            pairs.append(Pair(good, bad, uid, *groups))
    return pairs


def draw_pairs(pairs: Sequence[Pair], per_uid: int, seed: int) -> list[Pair]:
    """At most `per_uid` pairs of each UID, in the order of the files; all with `per_uid` 0."""
    if per_uid == 0:
        return list(pairs)
    by_uid: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        by_uid.setdefault(pair.uid, []).append(index)
    chosen = [
        index
        for number, indices in enumerate(by_uid.values())
        for index in np.random.default_rng([seed, number]).permutation(indices)[:per_uid]
    ]
    return [pairs[index] for index in sorted(chosen)]


def run(
    files: Sequence[StoredPath], models: Mapping[str, LoadedModel], per_uid: int, seed: int, progress: bool
) -> dict[str, Any]:
    """Accuracy of each score, over UIDs, phenomena and fields.

    Args:
      files: in BLiMP's form.
      models: ``model`` and ``random_weights``, with one tokenizer.
      per_uid: pairs to draw of each UID; 0: all.
      seed: of the draw.
      progress: show progress bars.

    Raises:
      UserError: as `read_pairs`, or no pair fits the model.
    """
    model, pairs = models["model"], read_pairs(files)
    drawn = draw_pairs(pairs, per_uid, seed)
    sentences = list(dict.fromkeys(sentence for pair in drawn for sentence in (pair.good, pair.bad)))
    encoded = encode_sentences(sentences, model.tokenizer, model.config.max_positions)
    row_of = {sentence: row for sentence, row in zip(sentences, encoded, strict=True) if row is not None}
    kept = [pair for pair in drawn if pair.good in row_of and pair.bad in row_of]
    most = model.config.max_positions - 2
    require(bool(kept), f"minimal_pairs: no pair has 1 to {most} tokens in both sentences: give other pairs")
    scores: Scores = {}
    for name, one in models.items():
        found = pseudo_log_likelihoods(one, list(row_of.values()), progress=progress)
        for variant in VARIANTS:
            scores[variant if name == "model" else f"{name}_{variant}"] = _of_pairs(kept, row_of, found[variant])
    scores |= baselines(model, kept, row_of)
    return {
        "pairs": len(kept),
        "pairs_in_files": len(pairs),
        "not_drawn": len(pairs) - len(drawn),
        "skipped_too_long": len(drawn) - len(kept),
        "scores": list(scores),
        "all_pairs": _accuracies(scores, np.arange(len(kept))),
        "by_uid": (by_uid := _by_group(scores, [pair.uid for pair in kept])),
        "mean_of_uids": {name: mean([one[name]["accuracy"] for one in by_uid.values()]) for name in scores},
        "by_phenomenon": _by_group(scores, [pair.phenomenon for pair in kept]),
        "by_field": _by_group(scores, [pair.field for pair in kept]),
    }


def baselines(model: LoadedModel, pairs: Sequence[Pair], row_of: Mapping[str, Row]) -> Scores:
    """Scores that need no context: minus the number of tokens, and the tokens' log-probabilities at a lone mask."""
    rows, lone = list(row_of.values()), lone_mask_log_probabilities(model).astype(float)
    tokens = np.array([2 - len(row.input_ids) for row in rows], float)
    # fsum, so that sentences with the same words in another order have the same sum.
    sums = np.array([math.fsum(lone[row.input_ids[1:-1]]) for row in rows])
    found = {"fewer_tokens": tokens, "lone_mask": sums}
    return {name: _of_pairs(pairs, row_of, values) for name, values in found.items()}


def _of_pairs(pairs: Sequence[Pair], row_of: Mapping[str, Row], values: np.ndarray) -> np.ndarray:
    index = {sentence: i for i, sentence in enumerate(row_of)}
    return np.array([[values[index[pair.good]], values[index[pair.bad]]] for pair in pairs])


def _accuracies(scores: Scores, chosen: np.ndarray) -> dict[str, Any]:
    return {name: preference(*values[chosen].T) for name, values in scores.items()}


def _by_group(scores: Scores, groups: Sequence[str]) -> dict[str, Any]:
    """Accuracies by group; pairs without one are left out."""
    names = np.array(groups)
    return {name: _accuracies(scores, np.flatnonzero(names == name)) for name in dict.fromkeys(groups) if name}
