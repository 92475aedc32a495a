"""Model cards: usage examples, and the corpora of a run."""

import pytest
import yaml

from bert_jax.convert import model_card, tokenizer_check
from bert_jax.convert.parity.parity_report import ParityReport
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import to_path
from bert_jax.tokenizers.tokenizer import wordpiece
from data_prep.vocabularies.sentencepiece_training import train_sentencepiece
from tests.model.toy import BERT


@pytest.mark.parametrize(("family", "to"), [("albert", "onnx"), ("bert", "openvino")])
def test_the_example_reads_the_tokenizer_that_was_written(family, to, tmp_path, monkeypatch):
    """A SentencePiece model has no tokenizer.json for the tokenizers library."""
    pytest.importorskip("transformers")
    lines = ["a text over the river", "the text of a stone"] * 9
    words = sorted({word for line in lines for word in line.split()})
    if family == "albert":
        tokenizer = train_sentencepiece(lines, "unigram", 40, lowercase=True)
    else:
        tokenizer = wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words], True, "test")
    tokenizer.save(to_path(tmp_path / "tokenizer.json"))
    source = SourceModel("run", "run", NativeModel(family, BERT, Heads(), {}), to_path(tmp_path / "tokenizer.json"))
    (tmp_path / "served").mkdir()
    tokenizer_check.write_hf_tokenizer(source, tmp_path / "served")
    report = ParityReport("numpy", 0, 0, (), None)
    card = model_card.format_model_card("served", source, to, report, ["graph"])
    example = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    found = {}
    exec("\n".join(line for line in example.split("\n") if "okenizer" in line), found)
    assert found["ids"] == [[tokenizer.cls_id, *tokenizer.encode("A text."), tokenizer.sep_id]]


def test_training_data_and_its_language():
    books = {
        "name": "books",
        "documents": 1200,
        "tokens": 3000,
        "languages": {"en": 2900, "la": 20, "und": 80},
        "licenses": ["CC0-1.0", None],
        "filters": ["c4", "a|b.py:keep"],
        "masks": ["email"],
        "removed": {"duplicate_documents": 1234},
    }
    web = books | {"name": "<b>", "languages": {"pt-BR": 400, "no": 600}, "filters": [], "masks": [], "removed": {}}
    old = books | {"name": "old", "languages": {}, "licenses": []}
    report, model = ParityReport("numpy", 0, 0, (), None), NativeModel("bert", BERT, Heads(), {})
    source = SourceModel("run", "run", model, corpora=((0.5, books), (0.25, web), (0.25, old)))
    _, front, body = model_card.format_model_card("m", source, "bert-jax", report).split("---\n", 2)
    assert yaml.safe_load(front)["language"] == ["en", "no", "pt"] and "license" not in yaml.safe_load(front)
    rows = [line for line in body.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| books | 50.0% | 1,200 | 3,000 | en 96.7%, und 2.7%, la 0.7% | CC0-1.0, not stated | c4, a\\|b.py:keep |"
        " email | duplicate documents 1,234 |",
        "| \\<b\\> | 25.0% | 1,200 | 3,000 | no 60.0%, pt-BR 40.0% | CC0-1.0, not stated | none | none | none |",
        "| old | 25.0% | 1,200 | 3,000 | not stated | not stated | c4, a\\|b.py:keep | email |"
        " duplicate documents 1,234 |",
    ]
    without = model_card.format_model_card("m", SourceModel("run", "run", model), "bert-jax", report)
    assert "Training data" not in without and "language" not in without
