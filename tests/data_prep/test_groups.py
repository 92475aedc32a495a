"""The source, language and score of each document: from flags and fields to corpus.json and the array of groups."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.build_options import BuildOptions
from data_prep.builder import groups
from data_prep.cli.main import main
from data_prep.sources import parse
from data_prep.sources.base import Document
from data_prep.sources.files import file_entry
from data_prep.verify import verify_corpus
from tests.building import make_documents, make_tokenizer, normal, run

LANGUAGES, SITES, SCORES = ["de", "en"], ["web", "books", None], [0.2, 3, 3.9, 7.5, "4", None, "high", True]


@pytest.fixture
def records(tmp_path, monkeypatch):
    """120 documents with fields, in all.jsonl; 40 without, in text.txt."""
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save("tokenizer.json")
    found = []
    for index, document in enumerate(make_documents(0, 120)):
        fields = {"lang": LANGUAGES[index % 2], "site": SITES[index % 3], "edu": {"score": SCORES[index % 8]}}
        found.append({"text": document, **fields})
    pathlib.Path("all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    pathlib.Path("text.txt").write_text("\n\n".join(make_documents(1, 40)))
    return found


def build(out, *words, workers=1) -> int:
    fixed = ["--tokenizer", "tokenizer.json", "--out", out, "--name", "c", "--workers", str(workers)]
    return main(["build", *fixed, *words])


FIELDS = ("--language", "@lang", "--source-name", "@site", "--score", "@edu.score")


def expected_group(record, bounds=None):
    value = record["edu"]["score"]
    number = float(value) if (isinstance(value, int | float) and value is not True) or value == "4" else None
    score = None if number is None else max((b for b in bounds or [number // 1] if b <= number), default=None)
    return record["site"] or "unnamed", record["lang"], score


def group_of_text(out):
    """The group of each document, by its text."""
    found, tokenizer = {}, Tokenizer.load(f"{out}/tokenizer.json")
    for split in ("train", "validation"):
        corpus = Corpus.open(out, split)
        groups_of_split = corpus.document_groups if len(corpus.groups) > 1 else [0] * corpus.num_documents
        for document, group in enumerate(groups_of_split):
            tokens = corpus.read_sentences(*corpus.document_offsets[document : document + 2])
            one = corpus.groups[group]
            found[tokenizer.decode(tokens.tolist())] = one["source"], one["language"], one["score"]
    return found


@pytest.mark.parametrize(("bounds", "workers"), [((), 2), (("--score-bounds", "1", "3.5"), 1)])
def test_groups_of_fields(records, bounds, workers):
    pytest.importorskip("orjson")
    assert build("c", "--source", "jsonl:all.jsonl@text", *FIELDS, *bounds, workers=workers) == 0
    verify_corpus("c")
    numbers = [float(one) for one in bounds[1:]]
    command = " ".join([*bounds[:1], *map(str, numbers)])
    assert command in pathlib.Path("c/README.md").read_text(), "it can be run again"
    assert group_of_text("c") == {normal(record["text"]): expected_group(record, numbers) for record in records}
    for split in ("train", "validation"):
        corpus = Corpus.open("c", split)
        order = corpus.document_groups[np.sort(np.unique(corpus.document_groups, return_index=True)[1])]
        assert order.tolist() == [*range(len(corpus.groups))], "in the order of their first documents"
        tokens = np.diff(np.concatenate([[0], np.cumsum(corpus.sentence_lengths)])[corpus.document_offsets])
        counted = np.bincount(corpus.document_groups, tokens)
        assert counted.tolist() == [group["tokens"] for group in corpus.groups]


def test_names_of_sources_and_no_score(records, capsys):
    pytest.importorskip("orjson")
    sources = ["--source", "jsonl:all.jsonl@text", "--source", "text:text.txt"]
    names = ["--source-name", "@site", "--source-name", "plain", "--score", "@edu.score", "--score", "none"]
    assert build("c", *sources, *names) == 0
    groups_of_train = Corpus.open("c").groups
    assert {group["source"] for group in groups_of_train} == {"web", "books", "unnamed", "plain"}
    assert {group["score"] for group in groups_of_train if group["source"] == "plain"} == {None}
    assert "45 of 120 texts of source jsonl:all.jsonl@text do not have a number in the field" in capsys.readouterr().err
    assert main(["inspect", "c"]) == 0
    shown = capsys.readouterr().out
    assert "Sources, languages and scores" in shown and "plain" in shown
    assert build("one", "--source", "text:text.txt") == 0
    assert not pathlib.Path("one/train.document_groups.npy").exists()
    (group,) = Corpus.open("one").groups
    assert (group["source"], group["language"], group["score"]) == ("text:text.txt", "en", None)


def test_names_can_be_typed_and_printed():
    source = dataclasses.replace(parse("jsonl:*.jsonl@text"), source_name="@site")
    labels = groups.GroupFinder(source, ())
    for value, name in (
        ("\x1b[1m a\0b\u202e\tc ", "[1m a b c"),
        ("e\u0301" * 300, "é" * 200),
        ("\u200b", "unnamed"),
        ("名前", "名前"),
    ):
        assert labels(Document("a:1", "text", fields={"site": value}), "text").source == name


def test_parquet_has_scores_of_all_types(records):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [record["text"] for record in records]
    for kind in (pyarrow.int64(), pyarrow.float32(), pyarrow.string()):
        scores = pyarrow.array([index % 4 for index in range(120)]).cast(kind)
        parquet.write_table(pyarrow.table({"text": texts, "score": scores}), "a.parquet")
        assert build(f"c{kind}", "--source", "parquet:a.parquet@text", "--score", "@score") == 0
        assert {group["score"] for group in Corpus.open(f"c{kind}").groups} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--source-name", "@url"], "--source-name @url: source text:text.txt has no fields; write a name"),
        (["--source-name", "a\nb"], "write 1 to 200 characters without control characters"),
        (["--score", "0.5"], "--score 0.5: write @FIELD, a field of each record with a number, or none"),
        (["--score", "@score"], "--score @score: source text:text.txt has no fields; write none"),
        (["--score-bounds", "1"], "--score-bounds has no effect by itself; add --score @FIELD"),
        (["--score", "none", "--score-bounds", "2", "1"], "write finite numbers, each larger than the one before"),
        (["--score", "none", "--score-bounds", "nan"], "write finite numbers"),
    ],
)
def test_mistakes(records, capsys, words, message):
    assert build("c", "--source", "text:text.txt", *words) == 2
    assert message in capsys.readouterr().err and not pathlib.Path("c").exists()


def test_fields_of_too_many_values_or_none(records, capsys, monkeypatch):
    pytest.importorskip("orjson")
    monkeypatch.setattr(groups, "MAX_VALUES", 30)
    source = ["--source", "jsonl:all.jsonl@text"]
    for words, message in (
        (["--source-name", "@text"], "--source-name @text: more than 30 values in one block of source"),
        (
            ["--score", "@lang"],
            "no document of source jsonl:all.jsonl@text has a number in the field 'lang'; it has 'de'",
        ),
        (["--score", "@edu.score", "--score-bounds", "9"], "has a number of the bounds in the field 'edu.score'"),
    ):
        assert build("c", *source, *words) == 2
        assert message in capsys.readouterr().err and not pathlib.Path("c/corpus.json").exists()


def test_verify_finds_changed_groups(records, capsys):
    pytest.importorskip("orjson")
    assert build("c", "--source", "text:text.txt", "--source", "jsonl:all.jsonl@text") == 0
    path, manifest = pathlib.Path("c/train.document_groups.npy"), json.loads(pathlib.Path("c/corpus.json").read_text())
    array = np.load(path)
    assert 0 < array.mean() < 1
    array[0] ^= 1
    np.save(path, array)
    manifest["files"][path.name] = file_entry(path)
    pathlib.Path("c/corpus.json").write_text(json.dumps(manifest))
    assert main(["verify", "c"]) == 2 and f"{path}: contradicts the records" in capsys.readouterr().err


def test_groups_of_several_shards(records):
    pathlib.Path("other.txt").write_text("\n\n".join(make_documents(2, 40)))
    options = BuildOptions(max_shard_bytes=300, validation_fraction=0.1)
    manifest = run("c", ["text:text.txt", "text:other.txt"], options)
    assert len(manifest["splits"]["train"]["shards"]) > 3
    expected = {
        normal(text): f"text:{name}.txt"
        for seed, name in ((1, "text"), (2, "other"))
        for text in make_documents(seed, 40)
    }
    assert {text: group[0] for text, group in group_of_text("c").items()} == expected
