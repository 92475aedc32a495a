"""Variances of scores by source: simulated known components, and the analysis of variance in plain loops."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("scipy")
from bert_jax import statistics
from bert_jax.experiments import variances
from bert_jax.experiments.budget import make_cells
from tests.experiments.test_results import AB, record
from tests.experiments.test_study import make_study


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3, 3), (2, 5, 1, 4)])
def test_nested_variances_of_known_components(sizes):
    """Means of estimates over simulations: 0.5 between groups, 2 within them. Some estimates are negative."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(4_000):
        groups = [rng.normal() * np.sqrt(0.5) + rng.normal(size=size) * np.sqrt(2.0) for size in sizes]
        found.append(statistics.nested_variances(groups))
    errors = 4 * np.std(found, axis=0) / np.sqrt(len(found))
    assert np.all(np.abs(np.mean(found, axis=0) - (0.5, 2.0)) < errors) and min(one for one, _ in found) < 0


def test_nested_variances_in_loops():
    groups = [[1.0, 2.0, 4.0], [3.0, 5.0, 4.0]]
    within = sum((x - sum(one) / 3) ** 2 for one in groups for x in one) / 4
    means = [sum(one) / 3 for one in groups]
    between = sum((mean - sum(means) / 2) ** 2 for mean in means)  # of means, which also vary by within / 3
    assert statistics.nested_variances(groups) == pytest.approx((between - within / 3, within))
    assert statistics.nested_variances([[1.0], [2.0], [4.0]]) == (pytest.approx(np.var([1, 2, 4], ddof=1)), None)
    assert statistics.nested_variances([[1.0, 2.0]]) == (None, pytest.approx(0.5))
    assert statistics.nested_variances([]) == statistics.nested_variances([[1.0]]) == (None, None)


def test_crossed_variances_of_known_components():
    rng = np.random.default_rng(0)
    tables = (
        rng.normal(size=(6, 1)) * 0.5 + rng.normal(size=(1, 9)) * 1.5 + rng.normal(size=(6, 9)) for _ in range(4_000)
    )
    found = np.array([statistics.crossed_variances(table) for table in tables])
    assert np.all(np.abs(found.mean(0) - (0.25, 2.25, 1.0)) < 4 * found.std(0) / np.sqrt(len(found)))


def test_the_standard_error_is_that_of_repeated_studies():
    """With new seeds and new examples each."""
    study = make_study(factors={"x": AB}, tasks={"sst2": {"seeds": 2}}, margins={"sst2": 0.1}, seeds=4)
    cells, rng = make_cells(study, 99), np.random.default_rng(0)
    means, errors = [], []
    for _ in range(400):
        difficulty, of_cell = rng.normal(scale=0.5, size=50), []
        for _ in range(4):
            quality = rng.normal(scale=0.1) + rng.normal(scale=0.05, size=2)
            values = quality[:, None] + difficulty + rng.normal(scale=0.2, size=(2, 50))
            tuned = {"scores": values.mean(1).tolist(), "failed": 0, "learning_rates": []}
            tuned["examples"] = values.mean(0).tolist()
            of_cell.append(record(sst2=float(values.mean())) | {"finetuned": {"sst2": tuned}})
        (row,) = variances.split_variances(study, cells[:1], {"baseline": of_cell})
        means.append(np.mean([one["metrics"]["sst2"] for one in of_cell]))
        errors.append(row["standard_error"] ** 2)
    assert (row["models"], row["finetuning_runs"]) == (4, 8)
    assert np.mean(errors) == pytest.approx(np.var(means, ddof=1), rel=0.15)


def test_what_was_not_sampled():
    study = make_study(factors={"x": AB}, tasks={"rte": {}}, margins={"rte": 0.1}, seeds=3)
    cells = make_cells(study, 99)
    tuned = {"failed": 0, "learning_rates": [], "examples": []}
    scores = [[0.5], [0.7], [0.6]]
    records = {"baseline": [record(rte=one[0]) | {"finetuned": {"rte": tuned | {"scores": one}}} for one in scores]}
    (row,) = variances.split_variances(study, cells[:1], records)
    assert row["pretraining"] == pytest.approx(0.01) and row["finetuning"] is row["test_set"] is None
    (row,) = variances.split_variances(study, [dataclasses.replace(cells[0], models=("a",))], records)
    assert row["finetuning"] == pytest.approx(0.01) and row["pretraining"] is None and row["models"] == 1
    assert row["standard_error"] == pytest.approx(np.sqrt(0.01 / 3))
