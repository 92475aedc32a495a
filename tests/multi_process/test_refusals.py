"""An error in one process ends all of them; none is left waiting."""

import shutil

import pytest

from tests.multi_process.launch import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory, corpora):
    """Error messages of two processes; the second shard of the first corpus is damaged."""
    directory = tmp_path_factory.mktemp("refusals")
    shutil.copytree(corpora[0], directory / "damaged")
    _, second = sorted((directory / "damaged").glob("*array_record*"), key=lambda path: "train" not in path.name)
    raw = bytearray(second.read_bytes())
    raw[100] ^= 1
    second.write_bytes(raw)
    return launch("refusals", 2, directory, [directory / "damaged", corpora[1]])


def test_a_bad_shard_is_named_by_its_process_and_stops_the_other(written):
    messages = [str(each["shard"]) for each in written]
    (named,) = (i for i, message in enumerate(messages) if "SHA-256 is not the recorded one" in message)
    assert f"process {named} refused to start" in messages[1 - named]


def test_a_mesh_must_give_every_process_rows(written):
    for each in written:
        assert "but there are 2 processes" in str(each["mesh"]) and "multiple of 2" in str(each["mesh"])


def test_nothing_was_written(written):
    assert not any(each["workdir"] for each in written)
