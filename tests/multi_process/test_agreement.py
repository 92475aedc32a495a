"""Processes that agree without devices: one tells, all gather, and who is late is named by all."""

import pytest

from tests.multi_process.launch import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory, corpora):
    return launch("lateness", 4, tmp_path_factory.mktemp("lateness"), corpora)


def test_the_first_tells_all(written):
    assert {str(each["told"]) for each in written} == {"from 0"}


def test_all_hear_all(written):
    assert [each["gathered"].tolist() for each in written] == [[0, 1, 2, 3]] * 4


def test_who_is_late_is_named_by_all(written):
    said = {str(each["said"]) for each in written}
    assert said == {"process(es) 2 of 4 did not come to 'the corner' within 2 s"}
