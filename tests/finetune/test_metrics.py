"""Metrics equal to those of scikit-learn, scipy and seqeval, on random and degenerate inputs."""

import warnings

import numpy as np
import pytest
from scipy import stats

from bert_jax.finetune import metrics

sklearn_metrics = pytest.importorskip("sklearn.metrics")
seqeval_metrics = pytest.importorskip("seqeval.metrics")


def cases():
    """(labels, predictions): random ones of several sizes, and constant, equal and opposite ones."""
    rng = np.random.default_rng(0)
    for size, classes in [(1, 2), (2, 2), (50, 2), (51, 3), (400, 5)]:
        yield rng.integers(classes, size=size), rng.integers(classes, size=size)
    zeros, mixed = np.zeros(6, int), np.array([0, 1, 0, 1, 1, 0])
    yield from [(zeros, zeros), (zeros, mixed), (mixed, zeros), (mixed, mixed), (mixed, 1 - mixed), (zeros + 1, zeros)]


@pytest.mark.parametrize(("labels", "predictions"), [*cases()])
def test_classification(labels, predictions):
    with warnings.catch_warnings(action="ignore"):
        expected = {
            "accuracy": sklearn_metrics.accuracy_score(labels, predictions),
            "f1": sklearn_metrics.f1_score(labels == 1, predictions == 1, zero_division=0.0),
            "macro_f1": sklearn_metrics.f1_score(labels, predictions, average="macro", zero_division=0.0),
            "matthews_correlation": sklearn_metrics.matthews_corrcoef(labels, predictions),
        }
    for name, value in expected.items():
        assert metrics.METRICS[name](labels, predictions) == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize(("size", "share"), [(1, 0.5), (40, 0.0), (40, 0.3), (300, 0.05)])
def test_sets_of_labels(size, share):
    """Also of classes that nothing has, which count as 0."""
    rng = np.random.default_rng(size)
    labels, predictions = rng.random((2, size, 4)) < [share, share, 0.5, 0.0]
    found = metrics.label_set_f1(labels, predictions)
    for average in ("micro", "macro"):
        expected = sklearn_metrics.f1_score(labels, predictions, average=average, zero_division=0.0)
        assert found[f"{average}_f1"] == pytest.approx(expected, abs=1e-12)
    each = sklearn_metrics.f1_score(labels, predictions, average=None, zero_division=0.0)
    np.testing.assert_allclose(metrics.class_f1(labels, predictions), each, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [2, 3, 100])
def test_correlations(size, ties):
    rng = np.random.default_rng(size)
    labels, predictions = rng.normal(size=(2, size)).astype(np.float32)
    if ties:
        labels, predictions = np.round(labels), np.round(predictions + labels)
    if np.ptp(labels) and np.ptp(predictions):
        assert metrics.pearson(labels, predictions) == pytest.approx(stats.pearsonr(labels, predictions)[0], abs=1e-6)
        assert metrics.spearman(labels, predictions) == pytest.approx(stats.spearmanr(labels, predictions)[0])
    assert metrics.pearson(labels, np.ones(size)) == metrics.spearman(np.ones(size), labels) == 0.0


SCHEMES = [["O", "B-A", "I-A", "B-B", "I-B"], ["O", "I-A", "I-B"], ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "E-B"]]
SCHEMES += [["O", "B", "I"], ["O", "I"], ["O", "B", "I", "E", "S"], ["B", "I", "E", "S"]]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_spans(scheme):
    rng = np.random.default_rng(1)
    labels, predictions = ([list(rng.choice(scheme, size=n)) for n in range(1, 60)] for _ in range(2))
    found = metrics.span_f1(labels, predictions)
    expected = {
        "precision": seqeval_metrics.precision_score(labels, predictions),
        "recall": seqeval_metrics.recall_score(labels, predictions),
        "f1": seqeval_metrics.f1_score(labels, predictions),
    }
    assert found == pytest.approx(expected)
    assert 0 < found["f1"] < 1 and metrics.are_span_tags(scheme)
    for letters in ("BMES", "BMEW", "BILU"):
        other = str.maketrans("BIES", letters)
        named = (
            [[tag[0].translate(other) + tag[1:] for tag in tags] for tags in side] for side in (labels, predictions)
        )
        assert metrics.span_f1(*named) == found
    assert metrics.are_span_tags("BMES") and metrics.are_span_tags(["O", *"BMEW"]) and metrics.are_span_tags("OBILU")
    assert metrics.span_f1([["O", "O"]], [["O", "O"]]) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


@pytest.mark.parametrize(
    ("answers", "prediction", "exact", "f1"),
    [
        (["The Broncos"], "broncos.", 100, 100),
        (["24–10", "24-10"], "2410", 100, 100),
        (["Santa Clara, California"], "Santa Clara", 0, 80),
        (["a b c d", "c d"], "c", 0, 100 * 2 / 3),
        (["x x y"], "x z", 0, 40),
        ([], "", 100, 100),
        ([], "something", 0, 0),
        (["the", "answer"], "the", 0, 0),  # an answer of articles only is no answer
        (["something"], "", 0, 0),
    ],
)
def test_squad(answers, prediction, exact, f1):
    assert metrics.squad_scores([answers], [prediction]) == pytest.approx({"exact_match": exact, "f1": f1})
    assert metrics.squad_scores([answers, ["q"]], [prediction, "r"])["f1"] == pytest.approx(f1 / 2)


@pytest.mark.parametrize("tags", [("NOUN", "VERB"), ("O", "S"), ("B-PER", "I", "O"), ("O", "PER"), ("B", "I", "N")])
def test_tags_without_spans(tags):
    assert not metrics.are_span_tags(tags)
