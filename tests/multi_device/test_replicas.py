"""Replicas that differ by a bit are named, on all meshes; a run rolls back and ends as an undisturbed one."""

import numpy as np
import pytest

from bert_jax.training.divergence import DivergedError, DivergenceError
from bert_jax.training.replicas import ReplicaCheck, find_corrupted
from tests.multi_device.conftest import run_worker

DATA, ALL = ("data",), ("data", "fsdp")


@pytest.mark.parametrize(
    ("shape", "changed", "axes", "named", "by_majority"),
    [
        ((4, 1, 1), {}, [DATA], [], True),
        ((4, 1, 1), {(2, 0, 0, 0): 1}, [DATA], [2], True),
        ((4, 1, 1), {(2, 0, 0, 0): 1, (3, 0, 0, 0): 2}, [DATA], [0, 1, 2, 3], False),  # 2 of 4
        ((5, 1, 1), {(2, 0, 0, 0): 1, (3, 0, 0, 0): 1}, [DATA], [2, 3], True),
        ((3, 1, 1), {(0, 0, 0, 0): 1, (1, 0, 0, 0): 2}, [DATA], [0, 1, 2], False),
        ((2, 1, 1), {(1, 0, 0, 0): 1}, [DATA], [0, 1], False),
        # Two replicas of a shard do not say who is right; of what all four have, there is a majority.
        ((2, 2, 1), {(1, 1, 0, 0): 1}, [DATA, ALL], [1, 3], False),
        ((2, 2, 1), {(1, 1, 0, 0): 1, (1, 1, 0, 1): 1}, [DATA, ALL], [3], True),
        ((2, 2, 1), {(0, 0, 0, 0): 1, (1, 1, 0, 1): 1}, [DATA, ALL], [0, 2, 3], False),
        ((2, 1, 3), {(1, 0, 2, 0): 1}, [("tensor",)], [5], True),
    ],
)
def test_who_is_named(shape, changed, axes, named, by_majority):
    sums = np.zeros((*shape, len(axes)), np.uint32)
    if DATA in axes:  # shards are not equal along the other axes
        sums[..., axes.index(DATA)] += np.arange(shape[1], dtype=np.uint32)[:, None] * 7
    for place, value in changed.items():
        sums[place] += np.uint32(value)
    places, majority = find_corrupted(sums, axes)
    assert [int(np.ravel_multi_index(place, shape)) for place in places] == named and majority is by_majority


@pytest.fixture(scope="module")
def found():
    return run_worker("replicas_worker")


@pytest.mark.parametrize(
    ("error", "compared"),
    [(DivergenceError(1, 3, "spike"), True), (DivergedError("too many skipped steps"), True), (ValueError(), False)],
)
def test_the_newest_state_is_compared_before_a_divergence_counts(monkeypatch, error, compared):
    check, calls = ReplicaCheck.__new__(ReplicaCheck), []
    check._newest_state = lambda: (3, "state")
    monkeypatch.setattr(ReplicaCheck, "check", lambda self, *state: calls.append(state))
    with pytest.raises(type(error)), check:
        raise error
    assert calls == [(3, "state")] * compared


@pytest.mark.slow
def test_every_bit_counts(found):
    """Of arrays of all types, split over any axes; a device is named by a majority, and two replicas are both named."""
    assert len(found["flips"]) == 5
    for mesh, of_mesh in found["flips"].items():
        cases = of_mesh["cases"]
        assert {*of_mesh["compared"]} == {case["array"] for case in cases if case["replicas"] > 1}
        assert {case["replicas"] > 1 for case in cases} == ({True} if mesh != "(1, 8, 1)" else {True, False})
        for case in cases:
            replicas, places = case["replicas"], case["named"]
            assert case["place"] in places if replicas > 1 else not places, (mesh, case)
            assert len(places) == {1: 0, 2: 2}.get(replicas, 1) and case["majority"] == (replicas != 2), (mesh, case)


@pytest.mark.slow
def test_changes_of_two_elements_count(found):
    assert found["subtle"] == {"signs": True, "swapped": True}


@pytest.mark.slow
def test_replicas_of_a_run_stay_equal(found):
    """Also where each row of the mesh has collectives of its own."""
    assert len(found["equal"]) == 3 and all(all(equal) for equal in found["equal"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"), [("flip", 6), ("before a save", 8), ("before a local copy", 6), ("divergence", 6)]
)
def test_a_run_rolls_back_and_skips_no_rows(found, name, step):
    """At a comparison, at those before a save and a local copy, and at a divergence, whose rows are not to blame."""
    run, undisturbed = found["runs"][name], found["runs"]["undisturbed"]
    (entry,) = run["rollbacks"]
    assert (entry["step"], entry["to"], entry["skipped_rows"]) == (step, 4, None)
    assert f"at step {step}, parameters or moments of device 2 of process 0 (" in entry["reason"]
    assert [event[:2] for event in run["events"]] == [["start", 0], ["replicas", step], ["rollback", 4], ["start", 4]]
    assert "Rolling back to step 4, no rows are skipped; rollback 1 of at most 3" in run["warnings"][-1]
    assert run["metrics"] == undisturbed["metrics"] and run["state"] == undisturbed["state"] != ""
    assert undisturbed["rollbacks"] == [] and undisturbed["checkpoints"] == run["checkpoints"] == [12, 8, 4]


@pytest.mark.slow
def test_without_comparisons_the_result_is_another_one(found):
    run = found["runs"]["without"]
    assert not run["rollbacks"] and run["state"] != found["runs"]["undisturbed"]["state"]


@pytest.mark.slow
def test_a_defective_device_ends_the_run(found):
    run = found["runs"]["again and again"]
    assert len(run["rollbacks"]) == 2 and run["checkpoints"] == [4]
    what = "replicas of the parameters differ: at step 6, parameters or moments of device 2 of process 0 ("
    assert run["error"].startswith(what)
    assert "The run was rolled back 2 time(s)" in run["error"] and "--recovery.replica-check-every 0" in run["error"]
