"""Reading of CoNLL-U files, and what of them is refused."""

import sys

import pytest

from bert_jax.analysis import treebank
from bert_jax.errors import UserError


def line(index, word, head, deprel="dep", upos="X"):
    return "\t".join([str(index), word, "_", upos, "_", "_", str(head), deprel, "_", "_"])


GOOD = "\n".join(
    [
        "# sent_id = 1",
        line("1-2", "cannot", "_"),
        line(1, "can", 3, "aux", "AUX"),
        line(2, "not", 3, "advmod", "PART"),
        line(3, "sing", 0, "root", "VERB"),
        line("3.1", "sing", "_"),
        "",
        "",
        line(1, "quick light", 0, "root", "_"),
    ]
)


def write(tmp_path, text, name="en-dev.conllu"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_ranges_and_empty_nodes_are_dropped(tmp_path):
    first, second = treebank.read_conllu(write(tmp_path, GOOD))
    assert first == (("can", "not", "sing"), ("AUX", "PART", "VERB"), (3, 3, 0), ("aux", "advmod", "root"))
    assert second == (("quick light",), ("_",), (0,), ("root",))


def test_lines_may_end_as_in_windows(tmp_path):
    path = tmp_path / "dev.conllu"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert [len(one.words) for one in treebank.read_conllu(path)] == [3, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no sentence"),
        ("# only a comment\n\n", "the file has no sentence"),
        ("words of a text", "line 1: not CoNLL-U: Invalid line format"),
        (GOOD + "\n" + line("x", "a", 1), "line 10: not CoNLL-U: Failed parsing field 'id'"),
        (GOOD + "\n" + line(2, "a", "x"), "line 10: not CoNLL-U: Failed parsing field 'head'"),
        ("1\ta\t_\tX", "line 1: 4 columns, CoNLL-U has 10"),
        (line(1, "a", "_"), "line 1: the word has no head"),
        (line(1, "a", 0) + "\n" + line(3, "b", 1), "line 2: the id is 3, expected 2"),
        ("\n\n" + line(1, "a", 0) + "\n" + line(2, "b", 3), "line 4: the head is 3, the sentence has 2 words"),
        (line(1, "a", 0) + "\n" + line(2, "b", 0), "lines 1 to 2: the sentence has 2 roots"),
        (line(1, "a", 1), "lines 1 to 1: the sentence has 0 roots"),
        ("\n".join(line(i, "a", head) for i, head in enumerate((0, 3, 4, 2), 1)), "lines 1 to 4: the heads form a cyc"),
        (line("1-2", "ab", "_"), "line 1: the sentence has no words"),
    ],
)
def test_malformed_files(tmp_path, text, message):
    with pytest.raises(UserError, match=f"en-dev.conllu.*{message}"):
        treebank.read_conllu(write(tmp_path, text))


def test_other_bytes(tmp_path):
    (tmp_path / "dev.conllu").write_bytes(b"1\t\xff")
    with pytest.raises(UserError, match=r"dev.conllu: not UTF-8 at byte 2"):
        treebank.read_conllu(tmp_path / "dev.conllu")


def test_splits_are_told_by_names(tmp_path):
    names = ("a-train-1.conllu", "a-train-2.conllu", "a-dev.conllu")
    splits = treebank.read_splits([write(tmp_path, GOOD, name) for name in names])
    assert {split: len(sentences) for split, sentences in splits.items()} == {"train": 4, "dev": 2}
    for name in ("a.conllu", "dev-test.conllu"):
        with pytest.raises(UserError, match="must contain one of train, dev and test"):
            treebank.read_splits([write(tmp_path, GOOD, name)])


def test_the_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "conllu", None)
    with pytest.raises(UserError, match="treebanks need the package conllu"):
        treebank.read_conllu(write(tmp_path, GOOD))
