"""Metrics of fine-tuned tasks, from predictions and labels on the host.

Each equals the official one of its benchmark: GLUE (Wang et al. 2019, table 1; their arithmetic is scikit-learn's and
scipy's), CoNLL span F1 (as seqeval computes it), and SQuAD's exact match and F1 (Rajpurkar et al. 2016, 2018).
"""

import collections
import re
import string
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from bert_jax.array_types import Int

Labels = np.ndarray
"""Class indices, int [E]; or targets of a regression, float [E]."""


def accuracy(labels: Labels, predictions: Labels) -> float:
    """Share of equal entries."""
    return float(np.mean(labels == predictions))


def f1(labels: Labels, predictions: Labels) -> float:
    """F1 of class 1; 0 if neither labels nor predictions have it."""
    both = np.sum((labels == 1) & (predictions == 1))
    total = np.sum(labels == 1) + np.sum(predictions == 1)
    return float(2 * both / total) if total else 0.0


def class_f1(labels: Labels, predictions: Labels) -> np.ndarray:
    """F1 of each class, float [C]; 0 for a class that neither labels nor predictions have.

    Args:
      labels, predictions: bool [E, C]: whether each example has each class.
    """
    both, total = (labels & predictions).sum(0), labels.sum(0) + predictions.sum(0)
    return 2 * both / np.maximum(total, 1)


def macro_f1(labels: Labels, predictions: Labels) -> float:
    """Mean F1 of the classes that labels or predictions have."""
    classes = np.unique(np.concatenate([labels, predictions]))
    return float(class_f1(labels[:, None] == classes, predictions[:, None] == classes).mean())


def label_set_f1(labels: Labels, predictions: Labels) -> dict[str, float]:
    """F1 over all pairs of an example and a class (micro), and mean F1 of all classes (macro); arguments as `class_f1`.

    As `f1_score(zero_division=0)` of scikit-learn: F1 is 0 where neither labels nor predictions have a class.
    """
    micro = class_f1(labels.reshape(-1, 1), predictions.reshape(-1, 1))
    return {"micro_f1": float(micro[0]), "macro_f1": float(class_f1(labels, predictions).mean())}


def matthews_correlation(labels: Labels, predictions: Labels) -> float:
    """Correlation of classes (Matthews 1975; for more than two classes Gorodkin 2004).

    It is 0 if all labels or all predictions are equal.
    """
    classes = np.unique(np.concatenate([labels, predictions]))
    label_counts = np.array([np.sum(labels == c) for c in classes], np.float64)
    prediction_counts = np.array([np.sum(predictions == c) for c in classes], np.float64)
    count, correct = float(len(labels)), float(np.sum(labels == predictions))
    covariance = correct * count - label_counts @ prediction_counts
    variances = (count**2 - label_counts @ label_counts) * (count**2 - prediction_counts @ prediction_counts)
    return float(covariance / np.sqrt(variances)) if variances else 0.0


def pearson(labels: Labels, predictions: Labels) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    x, y = (np.asarray(values, np.float64) - np.mean(values, dtype=np.float64) for values in (labels, predictions))
    norm = np.sqrt((x @ x) * (y @ y))
    return float(np.clip(x @ y / norm, -1.0, 1.0)) if norm else 0.0


def spearman(labels: Labels, predictions: Labels) -> float:
    """Spearman's correlation: Pearson's of the ranks, in which equal values share their mean rank."""
    return pearson(_mean_ranks(labels), _mean_ranks(predictions))


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


_SPAN_PREFIXES = {"L": "E", "U": "S", "M": "I", "W": "S"}
"""The letters of BILOU, BMES and BMEWO by those of IOBES, to which B, I, E and S belong."""
_TYPED_TAG = re.compile("O|[BIESLUMW]-.+")
_UNTYPED = frozenset("BIES").union(_SPAN_PREFIXES)


def are_span_tags(tags: Collection[str]) -> bool:
    """Whether tags are those of spans: all with a type (B-PER), or B and I without one."""
    return all(map(_TYPED_TAG.fullmatch, tags)) or (
        _UNTYPED.issuperset(set(tags) - {"O"}) and not {"B", "I"}.isdisjoint(tags)
    )


def tagged_spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Spans (first token, last token, type) of one sentence's tags.

    The schemes are IO, IOB1, IOB2, IOE, IOBES, BILOU, BMES and BMEWO.
    The rules are those of the CoNLL 2000 script: a span begins at B or S, after O, after E or S, or where the type
    changes; it ends before such a token, at E or S, or at the end. Spans of tags without a type (B, I) have the type
    "_", as in seqeval. Tags without a prefix, such as parts of speech, have one span per token, of that type.
    """
    spans, first, before = set(), 0, ("O", "")
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if not kind and tag != "O":
            prefix, kind = (tag, "_") if tag in _UNTYPED else ("S", tag)
        prefix = _SPAN_PREFIXES.get(prefix, prefix)
        is_inside = before[0] != "O"
        begins = prefix != "O" and (not is_inside or prefix in "BS" or before[0] in "ES" or kind != before[1])
        if is_inside and (begins or prefix == "O"):
            spans.add((first, i - 1, before[1]))
        if begins:
            first = i
        before = prefix, kind
    return spans


def span_counts(labels: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> Int[np.ndarray, "S 3"]:
    """Numbers of right, gold and predicted spans of each sentence.

    Args:
      labels, predictions: the tags of each sentence, as `tagged_spans` reads them.
    """
    sides = ((tagged_spans(gold), tagged_spans(found)) for gold, found in zip(labels, predictions, strict=True))
    return np.array([(len(gold & found), len(gold), len(found)) for gold, found in sides], np.int64).reshape(-1, 3)


def span_f1(labels: Iterable[Sequence[str]], predictions: Iterable[Sequence[str]]) -> dict[str, float]:
    """Micro-averaged precision, recall and F1 of exactly matching spans; 0 where a denominator is 0."""
    correct, num_labels, num_predictions = span_counts(labels, predictions).sum(0).tolist()
    precision = correct / num_predictions if num_predictions else 0.0
    recall = correct / num_labels if num_labels else 0.0
    total = num_labels + num_predictions
    return {"precision": precision, "recall": recall, "f1": 2 * correct / total if total else 0.0}


_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """An answer as SQuAD compares it: lower case, no ASCII punctuation, no articles, single spaces."""
    without_articles = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION))
    return " ".join(without_articles.split())


def exact_match(answer: str, prediction: str) -> float:
    """1.0 if the normalised texts are equal."""
    return float(normalize_answer(answer) == normalize_answer(prediction))


def answer_f1(answer: str, prediction: str) -> float:
    """F1 of the bags of normalised words; with an empty side 1.0 if both are empty, else 0.0."""
    expected, found = normalize_answer(answer).split(), normalize_answer(prediction).split()
    if not expected or not found:
        return float(expected == found)
    common = sum((collections.Counter(expected) & collections.Counter(found)).values())
    return 2 * common / (len(expected) + len(found))


def squad_scores(answers: Sequence[Sequence[str]], predictions: Sequence[str]) -> dict[str, float]:
    """Mean exact match and F1 in percent over questions; the best of each question's answers counts.

    Args:
      answers: of each question; none or only empty ones: the question has no answer, which the prediction "" states.
      predictions: one text per question.
    """
    best: dict[str, list[float]] = {"exact_match": [], "f1": []}
    for texts, prediction in zip(answers, predictions, strict=True):
        # As in SQuAD 2.0's script, an answer without words besides articles counts only if there is no other.
        texts = [text for text in texts if normalize_answer(text)] or [""]
        best["exact_match"].append(max(exact_match(text, prediction) for text in texts))
        best["f1"].append(max(answer_f1(text, prediction) for text in texts))
    return {name: 100.0 * float(np.mean(scores)) for name, scores in best.items()}


METRICS: dict[str, Callable[[Labels, Labels], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "matthews_correlation": matthews_correlation,
    "pearson": pearson,
    "spearman": spearman,
}
"""Metrics of classification and regression."""
