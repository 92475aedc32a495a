"""Losses of 1 and 4 real processes that share one mesh agree as promise 1 says: fp32, dropout, packed rows.

Four of them have two devices each.
"""

import numpy as np
import pytest

from tests.multi_process.configs import ACCUMULATION

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(groups):
    """Arrays of each process, by number of processes."""
    return {n: groups("losses", n) for n in (1, 4)}


def part(written, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in written.items() if key.startswith(prefix)}


def relative_distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """|a - b| / |a| over all arrays together."""
    assert a.keys() == b.keys() and a
    difference = sum(float(np.square(a[name] - b[name], dtype=np.float64).sum()) for name in a)
    return (difference / sum(float(np.square(x, dtype=np.float64).sum()) for x in a.values())) ** 0.5


def test_processes_hold_different_rows(outcome):
    """Rows of the first step, as read and as sharded over the devices; together they are the batch."""
    (whole,) = outcome[1]
    assert whole["shard"].shape == (16, 48) and whole["first/segment_ids"].max() >= 2
    rows = [written["shard_rows"].tolist() for written in outcome[4]]
    assert np.concatenate(rows).tolist() == list(range(16)) and {*map(len, rows)} == {16 // 4}
    shards = [written["shard"] for written in outcome[4]]
    np.testing.assert_array_equal(np.concatenate(shards), whole["shard"])
    assert len({shard.tobytes() for shard in shards}) == 4
    for written in outcome[4]:
        np.testing.assert_array_equal(written["first/row"], written["shard_rows"])
        np.testing.assert_array_equal(written["first/input_ids"], written["shard"])


def test_losses_change_enough_to_compare(outcome):
    """The loss falls, and changes between two steps by far more than a relative 1e-4."""
    losses = outcome[1][0]["losses"]
    assert len(losses) == 20 and losses[0] - losses[-1] > 0.3
    assert np.median(np.abs(np.diff(losses))) > 0.03


def test_training_agrees_with_one_process(outcome):
    """Four processes have two devices each, and two micro-batches."""
    assert ACCUMULATION == {1: 1, 4: 2} and [w["devices"] for w in outcome[4]] == [2] * 4
    reference = outcome[1][0]["losses"]
    for written in outcome[4]:
        losses = written["losses"]
        np.testing.assert_array_equal(losses, outcome[4][0]["losses"])
        assert abs(losses[0] - reference[0]) <= 1e-6 * abs(reference[0])
        np.testing.assert_allclose(losses, reference, rtol=1e-4)
        moments = part(outcome[1][0], "moment/"), part(written, "moment/")
        assert relative_distance(*moments) <= 1e-5


def test_held_out_rows_are_divided(outcome):
    """Each process reads its own rows of every batch, some of them empty in the last; together they are the batch."""
    whole = part(outcome[1][0], "held_out/")
    shares = [part(written, "held_out/") for written in outcome[4]]
    assert len({share["0/input_ids"].tobytes() for share in shares}) == 4
    real = [(whole[f"{i}/example_id"] >= 0).sum() for i in range(len(whole) // len(part(whole, "0/")))]
    assert len(real) >= 3 and real[:-1] == [8] * (len(real) - 1) and 0 < real[-1] < 8
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), array, err_msg=name)


def test_held_out_metrics_agree(outcome):
    """Before training, when parameters are bitwise equal, and after it, when they are not."""
    for when, rtol in (("before", 1e-5), ("after", 1e-4)):
        reference = part(outcome[1][0], f"{when}/")
        assert {"mlm_loss", "pair_loss"} <= reference.keys()
        for written in outcome[4]:
            actual = part(written, f"{when}/")
            assert actual.keys() == reference.keys()
            for name, value in reference.items():
                np.testing.assert_allclose(actual[name], value, rtol=rtol, err_msg=f"{when} {name}")
    before, after = (float(outcome[1][0][f"{when}/mlm_loss"]) for when in ("before", "after"))
    assert before - after > 0.3
