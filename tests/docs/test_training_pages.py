"""The commands of the pages that train and evaluate."""

import pytest

from tests.pages import TRAINING, run_page
from tests.stores import use_s3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.parametrize("page", TRAINING)
def test_commands(page, folder, monkeypatch):
    run_page(page, folder, monkeypatch)


def test_commands_on_an_object_store(folder, s3_server, monkeypatch):
    use_s3(monkeypatch, s3_server[0], "my-bucket")
    monkeypatch.setenv("BERT_JAX_CACHE", str(folder / "cache"))
    run_page("docs/object_stores.md", folder, monkeypatch)
