import numpy as np
import pytest

from bert_jax.data.mixture import smoothed_shares
from data_prep.vocabularies.sampling_rates import largest_sample, sampling_rates


def test_shares_of_multilingual_bert():
    np.testing.assert_allclose(
        smoothed_shares([0.5, 0.3, 0.15, 0.05], 0.7), [0.4293, 0.3002, 0.1848, 0.0857], atol=5e-5
    )


def test_shares_depend_on_ratios_only():
    np.testing.assert_allclose(
        smoothed_shares([50, 30, 15, 5], 0.7), smoothed_shares(np.array([5e9, 3e9, 1.5e9, 5e8]), 0.7)
    )
    np.testing.assert_allclose(smoothed_shares([3, 1], 1), [0.75, 0.25])
    np.testing.assert_allclose(smoothed_shares([3, 1], 0), [0.5, 0.5])
    assert smoothed_shares([7], 0.7).tolist() == [1.0]
    with pytest.raises(ValueError, match="must be positive"):
        smoothed_shares([1, 0], 0.7)


def test_rates_reach_limit_and_shares():
    sizes = [900.0, 100.0]
    wanted = smoothed_shares(sizes, 0.0)
    assert largest_sample(sizes, wanted) == 200
    np.testing.assert_allclose(sampling_rates(sizes, wanted, 200), [100 / 900, 1])
    np.testing.assert_allclose(sampling_rates(sizes, wanted, 100), [50 / 900, 0.5])
    np.testing.assert_allclose(sampling_rates(sizes, wanted, 1000), [500 / 900, 1])
