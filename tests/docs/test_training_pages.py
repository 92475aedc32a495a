"""The commands of the pages that train and evaluate."""

import itertools
import json

import pytest

from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.building import make_documents
from tests.pages import SHARING, TRAINING, run_page
from tests.stores import use_s3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


def test_commands_that_share_a_directory(folder, monkeypatch):
    done = []
    for page in SHARING:
        done = run_page(page, folder, monkeypatch, done=done)


@pytest.mark.parametrize("page", TRAINING)
def test_commands(page, folder, monkeypatch):
    run_page(page, folder, monkeypatch)


def test_commands_on_an_object_store(folder, s3_server, monkeypatch):
    use_s3(monkeypatch, s3_server[0], "my-bucket")
    monkeypatch.setenv("BERT_JAX_CACHE", str(folder / "cache"))
    run_page("docs/object_stores.md", folder, monkeypatch)


def test_commands_on_a_domain(folder, monkeypatch, capsys):
    """A second body of text, and words that the tokenizer of the model splits."""
    (folder / "general_texts").mkdir()
    for index, document in enumerate(make_documents(8, 30)):
        (folder / "general_texts" / f"{index}.txt").write_text(document)
    (folder / "words.txt").write_text("riverstone\nwinds\n##wind\n")
    run_page("docs/continued_pretraining.md", folder, monkeypatch)
    assert capsys.readouterr().out.count("held out ") == 2
    results = [json.loads((folder / "runs" / run / "results.json").read_text()) for run in ("domain", "domain_words")]
    assert [found["embeddings"] for found in results] == ["keep", "transfer"]
    config = json.loads((folder / "runs/domain_words/config.json").read_text())["config"]
    assert config["model"]["vocab_size"] == Tokenizer.load(folder / "with_words/tokenizer.json").vocab_size


def test_commands_on_several_languages(folder, monkeypatch):
    """Languages are the same words with other letters."""
    for package in ("orjson", "pycld2"):
        pytest.importorskip(package)
    (folder / "languages").mkdir()
    texts = {"en": make_documents(5, 60), "de": make_documents(6, 40), "is": make_documents(7, 30)}
    for code, letters in (("de", {"o": "ö"}), ("is", {"d": "ð"})):
        texts[code] = [text.translate(str.maketrans(letters)) for text in texts[code]]
    for code, documents in texts.items():
        (folder / "languages" / f"{code}.txt").write_text("\n\n".join(documents))
    records = [{"text": text, "lang": code} for code, documents in texts.items() for text in documents]
    for index, record in enumerate(records):
        record |= {"site": ("forum", "news")[index % 2], "quality": (0.3, 0.6, 0.95)[index % 3]}
    (folder / "collection.jsonl").write_text("\n".join(map(json.dumps, records)))
    run_page("docs/multilingual.md", folder, monkeypatch)
    splits = json.loads((folder / "corpora/by_field/corpus.json").read_text())["splits"].values()
    assert {code for split in splits for code in split["languages"]} == set(texts)
    groups = json.loads((folder / "corpora/weighted/corpus.json").read_text())["splits"]["train"]["groups"]
    assert {(group["source"], group["score"]) for group in groups} == {
        *itertools.product(("forum", "news"), (None, 0.5, 0.9))
    }
