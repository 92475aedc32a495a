"""Learning rates against values worked out by hand and published schedules."""

import numpy as np
import pytest

from bert_jax.config import Config, Phase
from bert_jax.training.optimizers.schedules import learning_rate, learning_rate_at


def rates(phase, steps):
    return [learning_rate(phase, step) for step in steps]


def test_default_is_googles():
    """google-research/bert optimization.py: the decay runs from step 0 and the warmup covers its beginning."""
    phase = Phase(steps=100, learning_rate=2.0, warmup_steps=10, end_learning_rate=0.5)
    expected = {0: 0.0, 1: 0.2, 9: 1.8, 10: 0.5 + 1.5 * 0.9, 50: 1.25, 99: 0.515, 100: 0.5, 1000: 0.5}
    np.testing.assert_allclose(rates(phase, expected), list(expected.values()), rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "at_quarters"),
    [
        ({"decay": "polynomial"}, [1.0, 0.775, 0.55, 0.325, 0.1]),
        ({"decay": "polynomial", "decay_power": 2.0}, [1.0, 0.60625, 0.325, 0.15625, 0.1]),
        ({"decay": "polynomial", "decay_power": 0.5}, [1.0, 0.8794228634059948, 0.7363961030678927, 0.55, 0.1]),
        ({"decay": "cosine"}, [1.0, 0.8681980515339464, 0.55, 0.2318019484660536, 0.1]),
        ({"decay": "sqrt"}, [1.0, 0.55, 0.3636038969321073, 0.22057713659400528, 0.1]),
        ({"decay": "constant"}, [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_decay(kind, at_quarters):
    """At t = 0, 1/4, 1/2, 3/4, 1 from 1 to 0.1; from the phase's start, and from step 60."""
    whole = Phase(steps=40, learning_rate=1.0, warmup_steps=0, end_learning_rate=0.1, **kind)
    np.testing.assert_allclose(rates(whole, (0, 10, 20, 30, 40)), at_quarters, rtol=1e-12)
    late = Phase(steps=100, learning_rate=1.0, warmup_steps=10, end_learning_rate=0.1, decay_start=60, **kind)
    np.testing.assert_allclose(rates(late, (60, 70, 80, 90, 100)), at_quarters, rtol=1e-12)
    assert rates(late, (5, 10, 59)) == [0.5, 1.0, 1.0]
    assert learning_rate(late, 1e6) == learning_rate(late, 100)


@pytest.mark.parametrize("decay", ["polynomial", "cosine", "sqrt", "constant"])
def test_steps_need_not_be_whole(decay):
    """Between two steps the rate is between their rates; in a linear part, the middle is their mean."""
    phase = Phase(steps=50, learning_rate=1.0, warmup_steps=10, decay_start=20, decay=decay, end_learning_rate=0.2)
    for step in range(50):
        low, middle, high = rates(phase, (step, step + 0.5, step + 1))
        assert min(low, high) <= middle <= max(low, high)
    np.testing.assert_allclose(learning_rate(phase, 4.5), 0.45, rtol=1e-12)
    if decay == "polynomial":
        np.testing.assert_allclose(learning_rate(phase, 35.5), 0.2 + 0.8 * (1 - 15.5 / 30), rtol=1e-12)


def test_a_phase_starts_its_own_schedule():
    phases = (
        Phase(steps=10, learning_rate=1.0, warmup_steps=0, end_learning_rate=0.1),
        Phase(steps=20, learning_rate=0.1, warmup_steps=4),
    )
    config = Config(name="x", phases=phases)
    places = {0: (0, 0), 9: (0, 9), 10: (1, 0), 29: (1, 19), 30: (1, 20)}
    assert {step: config.locate_step(step) for step in places} == places
    found = [learning_rate_at(config, step) for step in (9, 10, 11, 14, 20, 29, 30)]
    np.testing.assert_allclose(found, [0.19, 0.0, 0.025, 0.1 * 0.8, 0.05, 0.1 / 20, 0.0], rtol=1e-12)
