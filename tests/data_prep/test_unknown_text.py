"""How much of a text the vocabulary does not know, in bytes: one unknown id can stand for a long word."""

import json
import pathlib

import numpy as np
import pytest

from bert_jax.tokenizers.kinds import SPECIAL_TOKENS
from bert_jax.tokenizers.tokenizer import char_bpe, sentencepiece, wordpiece
from data_prep.cli.main import main
from data_prep.vocabularies.sentencepiece_training import train_sentencepiece

THAI = "มนุษย์ทั้งหลาย"
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]


@pytest.fixture
def tokenizers_by_kind():
    model = train_sentencepiece(["the quick brown fox jumps over the lazy dog"] * 9, "unigram", 40, lowercase=True)
    return {
        "WordPiece": wordpiece([*SPECIAL_TOKENS, *LETTERS], True, "test"),
        "BPE": char_bpe([*SPECIAL_TOKENS, "▁", *LETTERS[:26]], [], True, "test", strip_accents=False),
        "SentencePiece unigram": sentencepiece(model.sentencepiece_model, "test"),
    }


def test_bytes_of_unknown_ids(tokenizers_by_kind):
    texts = ["a fox", f"a {THAI} fox 力", "", "x" * 101, "é", "[MASK] a"]
    lost = {"WordPiece": [0, len(THAI.encode()) + 3, 0, 101, 0, 2], "BPE": [0, len(THAI.encode()) + 3, 0, 0, 2, 2]}
    for kind, tokenizer in tokenizers_by_kind.items():
        ids, lengths = tokenizer.encode_corpus(texts)
        found = tokenizer.unknown_bytes(texts, ids, lengths).tolist()
        assert found[:3] == lost.get(kind, lost["BPE"])[:3], kind
        assert kind not in lost or found == lost[kind], kind
        assert not tokenizer.unknown_bytes(texts[:1], *tokenizer.encode_corpus(texts[:1])).any()
    assert tokenizer.unknown_bytes([], np.zeros(0, np.uint32), np.zeros(0, np.int64)).shape == (0,)


def test_a_corpus_counts_them_by_language_and_warns(tmp_path, monkeypatch, capsys, tokenizers_by_kind):
    monkeypatch.chdir(tmp_path)
    tokenizers_by_kind["WordPiece"].save("t.json")
    repeated = f"a {THAI} dog is here"
    records = [{"text": f"the fox {'a' * n} and\n\n{repeated}", "l": "en"} for n in range(1, 9)]
    records += [{"text": f"{THAI} {'b' * n}", "l": "th"} for n in range(1, 9)]
    pathlib.Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["build", "--source", "jsonl:a.jsonl@text", "--language", "@l", "--tokenizer", "t.json"]
    arguments += ["--workers", "1", "--validation-fraction", "0.4", "--out"]
    assert main([*arguments, "all"]) == 0
    assert "of the bytes of the text are unknown to t.json; train one on this text with" in capsys.readouterr().err
    assert main([*arguments, "unique", "--drop-duplicate-paragraphs", "10"]) == 0
    size = len(THAI.encode())
    for name, english in (("all", 8), ("unique", 1)):
        splits = json.loads(pathlib.Path(f"{name}/corpus.json").read_text())["splits"].values()
        for language, count in (("en", english), ("th", 8)):
            of_splits = [split["languages"].get(language, {"unknown_bytes": 0}) for split in splits]
            assert sum(counts["unknown_bytes"] for counts in of_splits) == count * size
        assert sum(split["unknown_bytes"] for split in splits) == (english + 8) * size
    capsys.readouterr()
    assert main(["inspect", "all"]) == 0
    assert "text that is unknown" in capsys.readouterr().out
