"""Broadcast and all-gather without devices, and errors in one process, which all raise."""

import pytest

pytestmark = pytest.mark.slow


def test_broadcast_gather_and_a_late_process(groups):
    written = groups("lateness", 4)
    assert {str(each["broadcast"]) for each in written} == {"from 0"}
    assert [each["gathered"].tolist() for each in written] == [[0, 1, 2, 3]] * 4
    messages = {str(each["error"]) for each in written}
    assert messages == {"process(es) 2 of 4 did not reach 'a barrier' within 5 s"}


def test_an_error_in_one_process_stops_all(groups):
    """A bad shard is named by the process that reads it; a mesh must give every process rows. Nothing is written."""
    written = groups("refusals", 4)
    messages = [str(each["shard"]) for each in written]
    (named,) = (i for i, message in enumerate(messages) if "SHA-256 is not the recorded one" in message)
    assert all(f"process {named} refused to start" in messages[i] for i in range(4) if i != named)
    for each in written:
        assert "but there are 4 processes" in str(each["mesh"]) and "multiple of 4" in str(each["mesh"])
        assert not each["workdir"]
