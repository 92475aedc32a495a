"""The usage examples of model cards."""

import pytest

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
