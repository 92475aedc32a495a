"""The training stream of 1 and 4 real processes: one set of global batches and masks, divided among them.

This is a part of guarantee 1. Processes differ in prefetch, and in whether threads or reader processes read. The same
processes also broadcast, gather, save and verify checkpoints, and refuse together.
"""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.multi_process.configs import STEPS, STREAMS

pytestmark = pytest.mark.slow

NAMES = {
    *("input_ids", "token_type_ids", "segment_ids", "position_ids", "example_id", "pair_labels", "cls_positions"),
    *("row", "mask_epoch"),
    *(f"masked/{name}" for name in ("input_ids", "target_positions", "target_labels", "target_weights")),
}
StepRows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def outcome(groups):
    """Arrays of each process, by number of processes."""
    return {n: groups("stream", n) for n in (1, 4)}


def shares(outcome, processes: int, case: str) -> list[list[StepRows]]:
    """Rows of each process and step."""
    found = []
    for written in outcome[processes]:
        steps: list[StepRows] = [{} for _ in range(STEPS)]
        for key, array in written.items():
            name, _, rest = key.partition("/")
            step, _, rest = rest.partition("/")
            if name == case and rest in NAMES:
                steps[int(step)][rest] = array
        found.append(steps)
    assert all(step.keys() == NAMES for steps in found for step in steps)
    return found


def joined(shared: list[list[StepRows]], outcome, case: str) -> list[StepRows]:
    """The global batches; asserts that each row belongs to exactly one process, and that no example repeats."""
    found, sizes = [], [int(outcome[1][0][f"{case}/{step}/size"]) for step in range(STEPS)]
    for parts, size in zip(zip(*shared, strict=True), sizes, strict=True):
        rows = [row for part in parts for row in part["row"].tolist()]
        assert len({len(part["row"]) for part in parts}) == 1, "unequal shares"
        assert len(rows) == len(set(rows)), "two processes read the same row"
        assert sorted(rows) == list(range(size)), "a row that no process reads"
        assert all(len(array) == len(part["row"]) for part in parts for array in part.values())
        batch = {name: np.concatenate([part[name] for part in parts]) for name in NAMES}
        found.append({name: array[np.argsort(batch["row"])] for name, array in batch.items()})
    seen = set()
    for steps in shared:
        mine = {identity for step in steps for identity in identities(step)}
        assert not mine & seen, "two processes read the same example of one epoch"
        seen |= mine
    assert sum(len(identities(step)) for steps in shared for step in steps) == len(seen), "an example twice"
    return found


def identities(step: StepRows) -> list[tuple[int, int]]:
    """(epoch, example) of all examples; phases have epochs of their own."""
    return [
        (epoch, example)
        for epoch, examples in zip(step["mask_epoch"].tolist(), step["example_id"].tolist(), strict=True)
        for example in examples
        if example >= 0
    ]


def assert_same_batches(left: list[StepRows], right: list[StepRows]) -> None:
    for number, (one, two) in enumerate(zip(left, right, strict=True)):
        for name in NAMES:
            assert one[name].dtype == two[name].dtype
            np.testing.assert_array_equal(one[name], two[name], err_msg=f"{name} of step {number}")


@pytest.fixture(scope="module")
def batches(outcome):
    """Global batches of every case, as one process reads them."""
    return {case: joined(shares(outcome, 1, case), outcome, case) for case in STREAMS}


@pytest.mark.parametrize("case", STREAMS)
def test_streams_cover_the_cases(outcome, batches, case):
    """Several windows and epochs, a ramp, two phases, packed rows, changing masks."""
    sizes = [len(step["row"]) for step in batches[case]]
    assert sizes == [8] * 5 + [16] * 25 + [8] * 21
    assert [step["input_ids"].shape[1] for step in batches[case]] == [48] * 30 + [64] * 21
    assert outcome[1][0][f"{case}/windows"].min() >= 2 and outcome[1][0][f"{case}/windows"].max() >= 3
    assert max(step["mask_epoch"].max() for step in batches[case]) >= 2
    assert max(len(set(step["mask_epoch"].tolist())) for step in batches[case]) >= 2  # straddles two epochs
    assert max(step["segment_ids"].max() for step in batches[case]) >= 2
    labels = {label for step in batches[case] for label in step["pair_labels"][step["example_id"] >= 0].tolist()}
    assert labels == ({0, 1} if case == "mixture" else {-1})
    masked = [
        (step["masked/input_ids"] != step["input_ids"]).sum() / (step["segment_ids"] > 0).sum()
        for step in batches[case]
    ]
    assert 0.1 < np.mean(masked) < 0.17
    assert all(step["masked/target_weights"].any(1).all() for step in batches[case])


@pytest.mark.parametrize("case", STREAMS)
def test_any_number_of_processes_reads_the_same_batches(outcome, batches, case):
    shared = shares(outcome, 4, case)
    assert len(shared) == 4
    assert_same_batches(joined(shared, outcome, case), batches[case])
    for step in range(STEPS):
        assert len({str(written[f"{case}/{step}/following"]) for p in outcome for written in outcome[p]}) == 1


def assert_caught(shared, outcome, batches, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_batches(joined(shared, outcome, "doc_sentences"), batches["doc_sentences"])


def test_a_stream_that_is_not_divided_is_detected(outcome, batches):
    """Positive control: among them two processes that both act as process 0."""
    first, second, *rest = shares(outcome, 4, "doc_sentences")
    assert_caught([first, first, *rest], outcome, batches, "two processes read the same row")
    assert_caught([first, *rest], outcome, batches, "a row that no process reads")
    # Even if the second one claims other row numbers.
    renamed = [
        {**step, "row": other["row"], "masked/input_ids": step["masked/input_ids"]}
        for step, other in zip(first, second, strict=True)
    ]
    assert_caught([first, renamed, *rest], outcome, batches, "two processes read the same example")
    one_bit = [*second[:-1], second[-1] | {"masked/target_labels": second[-1]["masked/target_labels"] ^ 1}]
    assert_caught([first, one_bit, *rest], outcome, batches, "masked/target_labels of step 50")


def test_broadcast_gather_and_a_late_process(groups):
    written = groups("lateness", 4)
    assert {str(each["broadcast"]) for each in written} == {"from 0"}
    assert [each["gathered"].tolist() for each in written] == [[0, 1, 2, 3]] * 4
    messages = {str(each["error"]) for each in written}
    assert messages == {"process(es) 2 of 4 did not reach 'a barrier' within 5 s"}


def test_calls_to_the_store_do_not_grow_with_processes(groups):
    """Each process makes three; process 0 also deletes what the call before has stored."""
    written = groups("calls", 4)
    for process, each in enumerate(written):
        for name, read, value in (
            ("all_gather", "key_value_dir_get", [0, 1, 2, 3]),
            ("broadcast", "blocking_key_value_get", "from 0"),
            ("gather_to_first", "key_value_dir_get" if process == 0 else None, [] if process else [0, 1, 2, 3]),
        ):
            expected = dict.fromkeys(["key_value_set", "wait_at_barrier", *filter(None, [read])], 1)
            if process == 0:
                expected["key_value_delete"] = 1
            assert json.loads(str(each[f"{name}/calls"])) == expected
            assert each[f"{name}/value"].tolist() == value
        assert sorted(each["kept"].tolist()) == [f"bert_jax/numbers/3/{process}" for process in range(4)]


def test_equal_arrays_are_not_gathered(groups):
    """jax's own function gathers each array from all; ours compares one checksum, and names who has others."""
    for process, each in enumerate(groups("calls", 4)):
        for name, sizes in (("device_put", [16, 1]), ("put_equal", [])):
            assert each[f"{name}/shards"].tolist() == [*range(4 * process, 4 * process + 4)]
            assert each[f"{name}/gathered"].tolist() == sizes
        assert str(each["error"]).startswith("process(es) 3 read other parameters from a file than process 0")


def test_each_process_hashes_its_own_files(groups):
    written = groups("checkpoints", 4)
    directory = Path(str(written[0]["directory"]))
    sums = json.loads((directory / "00000002" / "COMMIT.json").read_text())["sha256"]
    assert sorted(sums) == list(sums)
    for job in ("written", "verified"):
        hashed = [name for each in written for name in each[job].tolist() if name.startswith("00000002/")]
        assert sorted(hashed) == [f"00000002/{name}" for name in sums], "each file once, by one process"
        for process, each in enumerate(written):
            of = [re.search(r"process_(\d+)", name) for name in each[job].tolist()]
            assert len(of) >= 3 and {int(match[1]) if match else 0 for match in of} == {process}
    (damaged,) = {str(each["damaged"]) for each in written}
    for name, sha256 in sums.items():
        path = directory / "00000002" / name
        assert (hashlib.sha256(path.read_bytes()).hexdigest() == sha256) == (str(path) != damaged)


def test_damage_that_one_process_finds_makes_all_restore_the_same_checkpoint(groups):
    written = groups("checkpoints", 4)
    directory, (damaged,) = str(written[0]["directory"]), {str(each["damaged"]) for each in written}
    name = damaged.removeprefix(f"{directory}/00000002/")
    assert name.startswith("state/ocdbt.process_2/")
    what = f"warning: checkpoint {directory}/00000002 is damaged ({name} has changed); trying the one before\n"
    assert [str(each["log"]) for each in written] == [what, "", "", ""]
    assert [each["step"].item() for each in written] == [1] * 4
    np.testing.assert_array_equal(np.concatenate([each["restored"] for each in written]), np.arange(4096.0))


def test_an_error_in_one_process_stops_all(groups):
    """A bad shard is named by the process that reads it; a mesh must give every process rows. Nothing is written."""
    written = groups("refusals", 4)
    messages = [str(each["shard"]) for each in written]
    (named,) = (i for i, message in enumerate(messages) if "SHA-256 is not the recorded one" in message)
    assert all(f"process {named} refused to start" in messages[i] for i in range(4) if i != named)
    for each in written:
        assert "but there are 4 processes" in str(each["mesh"]) and "multiple of 4" in str(each["mesh"])
        assert not each["workdir"]
