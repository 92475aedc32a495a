"""Loss by tokens: two numbers of a curve against dense sampling, and comparisons of runs that never reach a loss."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("scipy")
from bert_jax import statistics
from bert_jax.config import CheckpointConfig
from bert_jax.errors import UserError
from bert_jax.experiments import curves, results
from bert_jax.experiments.budget import make_cells, positions_before
from bert_jax.experiments.study import AREA, TOKENS_TO_LOSS
from tests.experiments.test_results import AB, record
from tests.experiments.test_study import BASE, make_study

TOKENS = [10, 20, 40, 80]


def points(losses, tokens=TOKENS):
    return [{"step": t // 10, "tokens": t, "mlm_loss": y} for t, y in zip(tokens, losses, strict=True)]


def curve_study(**changes):
    margins = {"mlm_loss": 0.1, AREA: 0.1, TOKENS_TO_LOSS: 5.0}
    base = dataclasses.replace(BASE, checkpoint=CheckpointConfig(every=10, keep=10))
    return make_study(base=base, factors={"x": AB}, margins=margins, **changes)


def compare(study, losses):
    """Comparisons by metric, of the losses of each run."""
    records = {
        name: [record(mlm_loss=one[-1]) | {"curve": points(one)} for one in of_cell] for name, of_cell in losses.items()
    }
    found = results.make_results(study, make_cells(study, 99), records)
    return found, {row["metric"]: row for row in found["comparisons"]}


@pytest.mark.parametrize("seed", range(3))
def test_numbers_of_a_curve_against_a_dense_one(seed):
    rng = np.random.default_rng(seed)
    curve = points(rng.normal(5.0, 1.0, size=4).tolist())
    dense = np.linspace(15, 70, 200_001)
    losses = np.interp(dense, TOKENS, [point["mlm_loss"] for point in curve])
    assert curves.mean_loss(curve, 15, 70) == pytest.approx(losses.mean(), abs=1e-4)
    everywhere = np.linspace(10, 80, 700_001)
    losses = np.interp(everywhere, TOKENS, [point["mlm_loss"] for point in curve])
    for target in (losses.min() + 0.1, losses.mean()):
        assert curves.tokens_to_loss(curve, target) == pytest.approx(everywhere[np.argmax(losses <= target)], abs=1e-3)
    assert curves.tokens_to_loss(curve, losses.min() - 0.1) is None
    assert curves.tokens_to_loss(curve, 99.0) == 10


def test_curves_are_compared_as_any_metric():
    baseline = [[6.0, 5.0, 4.0, 3.0], [6.1, 5.0, 4.1, 3.2], [5.9, 5.1, 4.0, 3.1]]
    level = [[y - 0.5 - 0.01 * i for y in one] for i, one in enumerate(baseline)]
    found, rows = compare(curve_study(), {"baseline": baseline, "x=b": level})
    scale = found["curves"]
    assert scale == {"target_loss": 3.2, "first_tokens": 10, "last_tokens": 80}  # all of the baseline reach it
    areas = [[np.interp(np.linspace(10, 80, 70_001), TOKENS, one).mean() for one in of] for of in (level, baseline)]
    expected = statistics.t_estimate(*areas, paired=True)
    assert (rows[AREA]["difference"], rows[AREA]["p_value"]) == pytest.approx((expected[0], expected[3]), abs=1e-4)
    assert rows[AREA]["verdict"] == rows[TOKENS_TO_LOSS]["verdict"] == "lower"
    assert rows[TOKENS_TO_LOSS]["censored"] == rows[TOKENS_TO_LOSS]["censored_baseline"] == 0
    reached = [run["metrics"][TOKENS_TO_LOSS] for run in found["runs"] if run["cell"] == "baseline"]
    assert reached == pytest.approx([72.0, 80.0, 40 + 40 * 0.8 / 0.9])


def test_a_run_that_never_reaches_the_loss_counts_with_its_last_tokens():
    baseline = [[6.0, 5.0, 4.0, 3.0], [6.0, 5.1, 4.0, 3.1], [6.0, 5.2, 4.0, 3.2]]
    slow = [[6.0, 5.5, 5.0, 4.5], [6.0, 5.5, 5.0, 4.5], [6.0, 5.5, 5.1, 4.6]]
    _, rows = compare(curve_study(target_loss=4.5), {"baseline": baseline, "x=b": slow})
    row = rows[TOKENS_TO_LOSS]
    assert (row["censored"], row["censored_baseline"], row["seeds"], row["unscored"]) == (1, 0, 3, 0)
    reached = [30.0, 20 + 20 * 0.6 / 1.1, 20 + 20 * 0.7 / 1.2]
    assert row["difference"] == pytest.approx(80.0 - np.mean(reached)) and row["verdict"] == "higher"
    # Nobody reaches it: equal numbers of tokens show nothing.
    _, rows = compare(curve_study(target_loss=1.0), {"baseline": baseline, "x=b": slow})
    row = rows[TOKENS_TO_LOSS]
    assert (row["censored"], row["censored_baseline"], row["difference"]) == (3, 3, 0.0)
    assert row["verdict"] == "undecided"


def test_a_curve_needs_two_checkpoints():
    study = make_study(margins={AREA: 0.1})  # checkpoint.every is above the number of steps
    with pytest.raises(UserError, match=r"s, baseline: a run keeps one checkpoint.*raise checkpoint.keep"):
        make_cells(study, 98)


def test_a_curve_needs_two_checkpoints_of_the_steps_of_its_level():
    """Of an equal budget, and of masked steps."""
    base, often = (dataclasses.replace(BASE, checkpoint=CheckpointConfig(every=n, keep=10)) for n in (50, 7))
    first = dataclasses.replace(BASE.phases[0], direction="causal")
    causal = {"phases": (first, BASE.phases[1]), "objective": {"pair": "none"}}
    for level in ({"phases": {"batch_size": 16}}, causal):
        study = make_study(base=base, factors={"x": {"a": {}, "b": level}}, margins={AREA: 0.1}, tolerance=0.05)
        with pytest.raises(UserError, match=r"s, x=b: a run keeps one checkpoint of masked steps"):
            make_cells(study, 98)
        assert len(make_cells(dataclasses.replace(study, base=often), 98)) == 2


def test_positions_of_rows_before_a_step():
    assert [positions_before(BASE, step) for step in (0, 1, 90, 91, 100)] == [
        *(0, 128, 90 * 128, 90 * 128 + 128),
        90 * 128 + 10 * 128,
    ]
