"""Broadcast and all-gather without devices, and the error for a late process."""

import pytest

from tests.multi_process.launch import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory, corpora):
    return launch("lateness", 4, tmp_path_factory.mktemp("lateness"), corpora)


def test_broadcast_from_first(written):
    assert {str(each["broadcast"]) for each in written} == {"from 0"}


def test_all_gather(written):
    assert [each["gathered"].tolist() for each in written] == [[0, 1, 2, 3]] * 4


def test_a_late_process_is_named_by_all(written):
    messages = {str(each["error"]) for each in written}
    assert messages == {"process(es) 2 of 4 did not reach 'a barrier' within 5 s"}
