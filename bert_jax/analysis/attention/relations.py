"""Whether a head follows a dependency relation: its most attended word as a prediction of the syntactic head (Clark et
al. 2019, section 4.2), against the best fixed offset.

Shapes: s sentences, L layers, N heads, n tokens, W words, R relations (the last one is "all"), O offsets.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.attention.maps import TextAttention
from bert_jax.analysis.bootstrap import BootstrapMean, percentiles, resampled_means
from bert_jax.analysis.item_scores import MODEL, ItemScores
from bert_jax.analysis.treebank import Sentence
from bert_jax.array_types import Bool, Float, Int
from bert_jax.interventions.rows import TextRow, word_attention

OFFSETS = tuple(offset for offset in range(-5, 6) if offset)
"""Positions relative to a word, of which the best is the baseline."""
DIRECTIONS = ("dependent to head", "head to dependent")
"""From which word to which the attention goes that predicts."""
ALL = "all"
OFFSET = "best_offset"
BEST_HEAD = "best head, "


def predicted_heads(attention: Float[np.ndarray, "*heads W W"]) -> Int[np.ndarray, "2 *heads W"]:
    """For each word the other word that it attends to most, and the other word that attends to it most (DIRECTIONS).

    Of equal ones the first; a sentence of one word has the word itself.

    Args:
      attention: between words.
    """
    others = np.where(np.eye(attention.shape[-1], dtype=bool), -1, attention)
    return np.stack([others.argmax(-1), others.argmax(-2)])


def offset_heads(words: int) -> Int[np.ndarray, "O W"]:
    """The word at each of OFFSETS, at most the last and at least the first one (as in Clark's code)."""
    return np.clip(np.arange(words) + np.array(OFFSETS)[:, None], 0, words - 1)


def scored_words(sentence: Sentence) -> Bool[np.ndarray, " W"]:
    """Words that count: with a head, so not the root, and no punctuation (UPOS). All words can be predicted."""
    return np.array([head > 0 and tag != "PUNCT" for head, tag in zip(sentence.heads, sentence.upos, strict=True)])


class Counts(NamedTuple):
    """Correct predictions by sentence and relation."""

    correct: Int[np.ndarray, "s R 2 L N"]
    """Of heads, by DIRECTIONS."""
    by_offset: Int[np.ndarray, "s R O"]
    total: Int[np.ndarray, "s R"]
    """Words that count."""


def count_correct(
    maps: Iterable[TextAttention], rows: Sequence[TextRow], sentences: Sequence[Sentence], relations: Sequence[str]
) -> Counts:
    """Compare the predictions of all heads and offsets with the trees.

    Args:
      maps: attention in the rows.
      rows: of the sentences.
      sentences: with their trees.
      relations: that are counted; words of others count under "all", which is added at the end.
    """
    index = {relation: i for i, relation in enumerate(relations)}
    found: list[Counts | None] = [None] * len(rows)
    for one in maps:
        sentence = sentences[one.index]
        attention = word_attention(rows[one.index], one.probabilities)
        gold = np.array(sentence.heads) - 1
        of_relation = np.zeros((len(gold), len(relations) + 1), np.int64)
        for word in np.flatnonzero(scored_words(sentence)):
            of_relation[word, -1] = 1
            if sentence.deprels[word] in index:
                of_relation[word, index[sentence.deprels[word]]] = 1
        found[one.index] = Counts(
            np.moveaxis((predicted_heads(attention) == gold) @ of_relation, -1, 0).astype(np.int32),
            ((offset_heads(len(gold)) == gold) @ of_relation).T,
            of_relation.sum(0),
        )
    return Counts(*map(np.stack, zip(*found, strict=True)))


def frequent_relations(parts: Sequence[Sequence[Sentence]], least: int) -> tuple[list[str], int]:
    """Relations, with their subtypes, that at least so many words that count have in each part; and the number of
    other relations.

    Args:
      parts: sentences of the selection and of the scoring.
      least: number of words.
    """
    numbers: list[dict[str, int]] = []
    for sentences in parts:
        of_part: dict[str, int] = {}
        for sentence in sentences:
            for word in np.flatnonzero(scored_words(sentence)):
                of_part[sentence.deprels[word]] = of_part.get(sentence.deprels[word], 0) + 1
        numbers.append(of_part)
    present = sorted(set().union(*numbers))
    kept = [relation for relation in present if min(of_part.get(relation, 0) for of_part in numbers) >= least]
    return kept, len(present) - len(kept)


class BestHead(NamedTuple):
    """The head, direction and offset of a relation that are best on the selection."""

    about: dict[str, Any]
    """Which they are, with their accuracy on the scoring, as plain values."""
    correct: Int[np.ndarray, " s"]
    """Of the head, in each sentence of the scoring."""
    by_offset: Int[np.ndarray, " s"]


def best_heads(selection: Counts, scoring: Counts, relations: Sequence[str]) -> list[BestHead]:
    """The best head, direction and offset of each relation on the selection, and their accuracy on the scoring.

    Args:
      selection: where the best is chosen, of equal ones the first.
      scoring: other sentences.
      relations: of both, without "all".
    """
    correct, by_offset, totals = (one.sum(0) for one in selection)
    found = []
    for r, relation in enumerate([*relations, ALL]):
        direction, layer, head = np.unravel_index(correct[r].argmax(), correct[r].shape)
        offset = int(by_offset[r].argmax())
        of_head, of_offset = scoring.correct[:, r, direction, layer, head], scoring.by_offset[:, r, offset]
        words = int(scoring.total[:, r].sum())
        about = {
            "relation": relation,
            "words": words,
            "words_of_selection": int(totals[r]),
            "layer": int(layer),
            "head": int(head),
            "direction": DIRECTIONS[direction],
            "accuracy": int(of_head.sum()) / words,
            "accuracy_on_selection": int(correct[r].max()) / int(totals[r]),
            "offset": OFFSETS[offset],
            "offset_accuracy": int(of_offset.sum()) / words,
        }
        found.append(BestHead(about, of_head, of_offset))
    return found


def item_scores(
    model: Sequence[BestHead],
    random: Sequence[np.ndarray],
    words: Int[np.ndarray, "s R"],
    names: Sequence[str],
) -> dict[str, ItemScores]:
    """A test of each relation: right words of each sentence, of the best heads, the best offsets and random weights.

    Args:
      model: from `best_heads`.
      random: of each relation, right words of each sentence by the best head of random weights, means over their seeds.
      words: that count, `Counts.total` of the scoring.
      names: of the sentences.
    """
    tests = {}
    for i, (best, of_random) in enumerate(zip(model, random, strict=True)):
        there = np.flatnonzero(words[:, i])
        columns = {MODEL: best.correct, OFFSET: best.by_offset, "random_weights": of_random}
        scores = {name: values[there].astype(float) for name, values in columns.items()}
        weights = dict.fromkeys(columns, words[there, i].astype(float))
        tests[test_of(best.about["relation"])] = ItemScores(tuple(names[j] for j in there), None, scores, weights)
    return tests


def test_of(relation: str) -> str:
    """The name of the test of a relation's best head."""
    return f"{BEST_HEAD}{'all words (UAS)' if relation == ALL else relation}"


def mean_gain(model: Sequence[BestHead], words: Int[np.ndarray, "s R"]) -> dict[str, float] | None:
    """Mean over relations, without "all", of the best head's accuracy less that of the best offset, with its interval.

    Args:
      model: from `best_heads`.
      words: `Counts.total` of the scoring. A relation counts with 0 in a bootstrap sample without a word of it.
    """
    if len(model) == 1:
        return None
    gains = np.stack([best.correct - best.by_offset for best in model[:-1]]).astype(float)
    value, resampled = resampled_means(gains, words.T[:-1].astype(float))
    low, high = percentiles(resampled.mean(1))
    return BootstrapMean(float(value.mean()), float(low), float(high))._asdict()
