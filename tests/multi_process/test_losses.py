"""Losses of 1, 2 and 4 real processes that share one mesh agree as promise 1 says: fp32, dropout, packed rows."""

import numpy as np
import pytest

from tests.multi_process.launch import launch

pytestmark = pytest.mark.slow

OTHERS = [2, 4]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, corpora):
    """What each process wrote, by number of processes."""
    return {n: launch("losses", n, tmp_path_factory.mktemp(f"losses{n}"), corpora) for n in (1, 2, 4)}


def part(written, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in written.items() if key.startswith(prefix)}


def relative_distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """|a - b| / |a| over all arrays together."""
    assert a.keys() == b.keys() and a
    difference = sum(float(np.square(a[name] - b[name], dtype=np.float64).sum()) for name in a)
    return (difference / sum(float(np.square(x, dtype=np.float64).sum()) for x in a.values())) ** 0.5


@pytest.mark.parametrize("processes", OTHERS)
def test_processes_really_hold_different_rows(outcome, processes):
    """Of the first update, as they were read and as they lie on the devices; together they are the batch."""
    (whole,) = outcome[1]
    assert whole["1/shard"].shape == (16, 48) and whole["1/first/segment_ids"].max() >= 2
    rows = [written["1/shard_rows"].tolist() for written in outcome[processes]]
    assert sum(rows, []) == list(range(16)) and {len(mine) for mine in rows} == {16 // processes}
    shards = [written["1/shard"] for written in outcome[processes]]
    np.testing.assert_array_equal(np.concatenate(shards), whole["1/shard"])
    assert len({shard.tobytes() for shard in shards}) == processes
    for written in outcome[processes]:
        np.testing.assert_array_equal(written["1/first/row"], written["1/shard_rows"])
        np.testing.assert_array_equal(written["1/first/input_ids"], written["1/shard"])


def test_there_is_something_to_agree_on(outcome):
    """The loss falls, and another share of it would show: the losses of two updates differ by far more than 1e-4."""
    losses = outcome[1][0]["1/losses"]
    assert len(losses) == 20 and losses[0] - losses[-1] > 0.3
    assert np.abs(np.diff(losses)).min() > 1e-3


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("processes", OTHERS)
def test_training_agrees_with_one_process(outcome, processes, accumulation):
    reference = outcome[1][0]["1/losses"]
    for written in outcome[processes]:
        losses = written[f"{accumulation}/losses"]
        np.testing.assert_array_equal(losses, outcome[processes][0][f"{accumulation}/losses"])
        assert abs(losses[0] - reference[0]) <= 1e-6 * abs(reference[0])
        np.testing.assert_allclose(losses, reference, rtol=1e-4)
        moments = part(outcome[1][0], "1/moment/"), part(written, f"{accumulation}/moment/")
        assert relative_distance(*moments) <= 1e-5


@pytest.mark.parametrize("processes", OTHERS)
def test_held_out_rows_are_shared(outcome, processes):
    """Of every batch a process has its own rows, some of them empty in the last batch; together they are all."""
    whole = part(outcome[1][0], "held_out/")
    shares = [part(written, "held_out/") for written in outcome[processes]]
    assert len({share["0/input_ids"].tobytes() for share in shares}) == processes
    real = [(whole[f"{i}/example_id"] >= 0).sum() for i in range(len(whole) // len(part(whole, "0/")))]
    assert len(real) >= 3 and real[:-1] == [8] * (len(real) - 1) and 0 < real[-1] < 8
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), array, err_msg=name)


@pytest.mark.parametrize("processes", OTHERS)
def test_held_out_metrics_agree(outcome, processes):
    """Before training, where parameters are the same bits, and after it, where they are not."""
    for when, rtol in (("1/before/", 1e-5), ("1/after/", 1e-4)):
        reference = part(outcome[1][0], when)
        assert {"mlm_loss", "nsp_loss"} <= reference.keys()
        for written in outcome[processes]:
            found = part(written, when)
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=f"{when}{name}")
    before, after = (float(outcome[1][0][f"1/{when}/mlm_loss"]) for when in ("before", "after"))
    assert before - after > 0.3
