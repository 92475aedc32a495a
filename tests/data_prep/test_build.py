"""Whole builds: every filter, documents longer than a block, and settings that must not change a byte."""

import base64
import gzip
import itertools
import json
import os
import pathlib
import pickle
import shutil
import string
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from bert_jax.data.corpus import Corpus
from bert_jax.errors import UserError
from data_prep import sources
from data_prep.build_options import BuildOptions, NearDuplicateOptions
from data_prep.builder import prepare, resume, writer
from data_prep.builder.engines.local import LocalEngine
from data_prep.builder.pipeline import BuildRequest, build
from data_prep.clean import CleaningOptions
from data_prep.duplicates import near_duplicates
from data_prep.sources.files import file_entry
from data_prep.verify import verify_corpus
from tests.building import WORDS, files, interrupted, make_documents, make_tokenizer, normal, parse, run, texts

BY_DOCUMENT = BuildOptions(
    validation_fraction=0.1, min_characters=30, drop_duplicate_paragraphs=20, near_duplicates=NearDuplicateOptions()
)
"""All filters except the one that works on parts of documents."""


@pytest.fixture
def books(tmp_path, monkeypatch):
    """Documents of several paragraphs, one per file."""
    monkeypatch.chdir(tmp_path)
    documents = make_documents(1, 40, paragraphs=30)
    pathlib.Path("books").mkdir()
    for index, document in enumerate(documents):
        pathlib.Path(f"books/{index:03d}.txt").write_text(document)
    return documents


def test_every_document_is_in_the_corpus_once(text):
    manifest = run("c", ["text:text.txt"])
    assert texts("c") == sorted(normal(document) for document in set(text))
    assert manifest["dropped"]["duplicate_documents"]["documents"] == 2 == len(text) - len(set(text))
    assert manifest["dropped"]["empty_documents"] == {"documents": 0, "text_bytes": 0}
    assert manifest["sources"][0]["documents"] == len(text)
    assert manifest["sources"][0]["files"] == 1
    with gzip.open("c/source_files.jsonl.gz", "rt") as lines:
        (file,) = map(json.loads, lines)
    assert file == {"source": 0, "path": "text.txt"} | file_entry("text.txt")
    assert manifest["skipped"] == {} and manifest == json.loads(pathlib.Path("c/corpus.json").read_text())
    assert not pathlib.Path("c/corpus.incomplete").exists()
    verify_corpus("c")


def test_the_corpus_does_not_depend_on_block_size(books):
    """Long documents are read in parts; the corpus does not depend on it, except for the statistics of blank lines."""
    for size in (300, 1 << 20):
        run(f"c{size}", ["text-files:books/*.txt"], BY_DOCUMENT, block_bytes=size)
        verify_corpus(f"c{size}")
    assert max(len(document) for document in books) > 3000
    small, whole = files("c300"), files(f"c{1 << 20}")
    for statistics in ("corpus.json", "README.md"):
        assert small.pop(statistics) and whole.pop(statistics)
    assert small == whole


def test_several_shards(books):
    run("whole", ["text-files:books/*.txt"], BuildOptions(validation_fraction=0.3))
    manifest = run("split", ["text-files:books/*.txt"], BuildOptions(validation_fraction=0.3, max_shard_bytes=3000))
    verify_corpus("split")
    counts = [len(manifest["splits"][split]["shards"]) for split in ("train", "validation")]
    assert counts[0] > 3 and counts[1] > 1
    assert texts("split") == texts("whole")
    for split in ("train", "validation"):
        for name in ("sentence_lengths", "document_offsets", "record_offsets", "token_counts", "word_starts"):
            np.testing.assert_array_equal(
                getattr(Corpus.open("split", split), name), getattr(Corpus.open("whole", split), name)
            )


def test_adding_text_moves_no_document(text):
    pathlib.Path("more.txt").write_text("\n\n".join(make_documents(9, 200)))
    run("before", ["text:text.txt"])
    run("after", ["text:text.txt", "text:more.txt"])
    for split in ("train", "validation"):
        before, after = Corpus.open("before", split), Corpus.open("after", split)
        assert before.num_documents < after.num_documents
        np.testing.assert_array_equal(after.sentence_lengths[: before.num_sentences], before.sentence_lengths)
        tokens = before.read_sentences(0, before.num_sentences)
        np.testing.assert_array_equal(after.read_sentences(0, before.num_sentences), tokens)


def test_duplicates_up_to_space_and_empty_documents(text):
    pathlib.Path("more.txt").write_text("\n\n".join([text[0], text[1].replace(" ", "  "), "\u200b\u00ad"]))
    dropped = run("c", ["text:text.txt", "text:more.txt"])["dropped"]
    assert dropped["duplicate_documents"]["documents"] == 2 + len(text) - len(set(text))
    assert dropped["empty_documents"] == {"documents": 1, "text_bytes": 0}
    kept = run("d", ["text:text.txt"], BuildOptions(validation_fraction=0.1, drop_duplicate_documents=False))
    assert sum(split["documents"] for split in kept["splits"].values()) == len(text)
    assert "duplicate_documents" not in kept["dropped"]


def test_short_documents(text):
    dropped = run("c", ["text:text.txt"], BuildOptions(validation_fraction=0.1, min_characters=60))["dropped"]
    short = [document for document in text if len(document) < 60]
    assert dropped["short_documents"] == {"documents": len(short), "text_bytes": sum(map(len, short))}
    assert texts("c") == sorted(normal(document) for document in {*text} - {*short})


def test_repeated_lines(text):
    lines = ["The river sings.", "The stone falls.", "The river sings.", "A slow light.", "The river sings."]
    pathlib.Path("lines.txt").write_text("\n".join(lines))
    manifest = run(
        "c", ["lines:lines.txt", "text:text.txt"], BuildOptions(validation_fraction=0.1, drop_repeated_lines=True)
    )
    assert manifest["dropped"]["repeated_lines"] == {"lines": 2, "text_bytes": 2 * len("The river sings.\n")}
    assert "the river sings. the stone falls. a slow light." in texts("c")


def test_duplicate_paragraphs(books):
    shared = "The dark mountain falls over the quick slow river. A stone sings."
    for index in (3, 7, 8):
        pathlib.Path(f"books/{index:03d}.txt").write_text(f"{books[index]}\n\n{shared}")
    pathlib.Path("books/900.txt").write_text(shared)
    before = {normal(text) for text in books}
    options = BuildOptions(validation_fraction=0.1, drop_duplicate_paragraphs=len(shared))
    manifest = run("c", ["text-files:books/*.txt"], options)
    repeats = manifest["dropped"]["duplicate_paragraphs"]
    found = texts("c")
    assert sum(normal(shared) in text for text in found) == 1
    assert normal(f"{books[3]} {shared}") in found and normal(books[7]) in found and normal(books[8]) in found
    assert repeats["documents"] == 1  # the file without other text
    assert repeats["paragraphs"] >= 3 and repeats["text_bytes"] >= 3 * len(shared)
    assert manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"] == len(before)
    verify_corpus("c")
    kept = BuildOptions(validation_fraction=0.1, drop_duplicate_paragraphs=10_000)
    assert run("d", ["text-files:books/*.txt"], kept)["dropped"]["duplicate_paragraphs"]["paragraphs"] == 0


def test_near_duplicates(books):
    """A paragraph is removed only if the other is kept: the first is in a near-duplicate, which is removed whole."""
    shared = "The dark mountain falls over the quick slow river. A stone sings."
    near = books[5].replace(" sings", " sang", 3)
    assert near != books[5]
    pathlib.Path("books/900.txt").write_text(f"{near}\n\n{shared}")
    pathlib.Path("books/901.txt").write_text(shared + "\n\n" + make_documents(77, 1, paragraphs=9)[0])
    options = BuildOptions(
        validation_fraction=0.1,
        near_duplicates=NearDuplicateOptions(threshold=0.6, shingle_words=5),
        drop_duplicate_paragraphs=len(shared),
    )
    dropped, found = run("c", ["text-files:books/*.txt"], options)["dropped"], texts("c")
    assert dropped["near_duplicates"]["documents"] == 1 and len(found) == len(books) + 1
    assert normal(books[5]) in found and not any(normal(near) in text for text in found)
    assert sum(normal(shared) in text for text in found) == 1


def test_equal_signatures_are_removed_before_bands_are_compared(text, monkeypatch):
    """Documents that differ in punctuation only, which do not fill a bucket."""
    pathlib.Path("text.txt").write_text("\n\n".join([text[0], text[1], text[0] + "!", text[0] + "?"]))
    find, considered = near_duplicates.near_duplicate_mask, []

    def spy(reader, *arguments):
        considered.extend(reader.read(0)[0].tolist())
        return find(reader, *arguments)

    monkeypatch.setattr(near_duplicates, "near_duplicate_mask", spy)
    options = BuildOptions(validation_fraction=0.7, near_duplicates=NearDuplicateOptions(threshold=1.0))
    assert run("c", ["text:text.txt"], options)["dropped"]["near_duplicates"]["documents"] == 2
    assert considered == [True, True, False, False]


def test_memory_changes_nothing(books, monkeypatch):
    """Documents in parts, in ranges of a few documents; blocks contain parts of documents."""
    pathlib.Path("copies").mkdir()
    for index in range(0, 40, 4):
        words = books[index].split(" ")
        words[len(words) // 2] = "unheard"
        pathlib.Path(f"copies/{index}.txt").write_text(" ".join(words))
        pathlib.Path(f"copies/{index + 1}.txt").write_text(books[index].replace(" ", "  "))
    specs = ["text-files:books/*.txt", "text-files:copies/*.txt"]
    monkeypatch.setattr(prepare, "PART_CHARACTERS", 700)
    manifest = run("c", specs, BY_DOCUMENT, block_bytes=1500)
    assert manifest["dropped"]["near_duplicates"]["documents"] >= 10
    assert manifest["dropped"]["duplicate_documents"]["documents"] >= 10
    run("small", specs, BY_DOCUMENT, LocalEngine(1, 10_000), block_bytes=1500)
    assert files("small") == files("c")


def test_decontamination(books):
    """The job is sent to workers, with a job graph of a cluster; the n-grams of evaluation texts are in a file."""

    class Spy(LocalEngine):
        def prepare(self, job, inputs):
            assert len(pickle.dumps(job)) < 20_000
            assert (pathlib.Path(job.scratch) / job.evaluation_ngrams).stat().st_size > 50_000
            super().prepare(job, inputs)

    overlap = " ".join([*books[4].split()[2:15], "unheard", "of", "here"])
    many = " ".join(f"q{index}" for index in range(5000))
    pathlib.Path("questions.txt").write_text(f"{overlap}\n\ntoo short to check\n\n{many}")
    request = {"evaluation_texts": [sources.parse("text:questions.txt")]}
    run("all", ["text-files:books/*.txt"], BuildOptions(validation_fraction=0.1, decontamination_words=14), **request)
    assert len(texts("all")) == len(books)
    manifest = run("c", ["text-files:books/*.txt"], engine=Spy(1), **request)
    assert manifest["dropped"]["leaked_documents"]["documents"] == 1
    assert normal(books[4]) not in texts("c") and len(texts("c")) == len(books) - 1
    assert manifest["leak_check"]["texts_too_short"] == 1 and manifest["leak_check"]["ngrams"] == 4 + 5000 - 12


def test_cleaning_is_an_option_and_counted(text):
    pathlib.Path("odd.txt").write_text("The river\u00ad  sings \u00e9 e\u0301.\n\nA  dark stone.")
    counts = run("c", ["text:text.txt", "text:odd.txt"])["cleaned"]
    assert counts == {"control_characters": 1, "normalized_documents": 1, "whitespace_characters": 2}
    off = BuildOptions(
        validation_fraction=0.1, cleaning=CleaningOptions("none", control_characters=False, whitespace=False)
    )
    assert set(run("d", ["text:text.txt", "text:odd.txt"], off)["cleaned"].values()) == {0}


def test_what_is_left_out_is_counted_with_its_places(text):
    lines = [json.dumps({"text": document}) for document in text[:50]]
    lines[7], lines[20], lines[30] = "{broken", json.dumps({"title": "x"}), json.dumps({"text": None})
    pathlib.Path("data.jsonl").write_text("\n".join(lines))
    pathlib.Path("odd.txt").write_bytes("\n\n".join(text[50:]).encode() + b"\n\ncaf\xe9 in Latin-1")
    skipped = run("c", ["jsonl:data.jsonl@text", "text:odd.txt"])["skipped"]
    assert sum(about["count"] for about in skipped.values()) == 4
    places = [place for about in skipped.values() for place in about["first"]]
    for line in (8, 21, 31):
        assert any(place.startswith(f"data.jsonl:{line}:") for place in places), places
    assert any(place.startswith("odd.txt:") for place in places)


def test_sentences_longer_than_a_record(text):
    """9,000 words without an end of a sentence are split into records, in order and without loss."""
    tokenizer = make_tokenizer(string.digits + "+/=-,")
    rng = np.random.default_rng(0)
    long = [
        "river " * 9000,
        base64.encodebytes(rng.bytes(30_000)).decode(),
        "\n".join(f"- stone, {index}" for index in range(9000)),
        " ".join(rng.choice(WORDS, 50_000)),
    ]
    pathlib.Path("long.txt").write_text("\n\n".join([*long[:2], "A river sings.", *long[2:]]))
    read = [parse("text:text.txt"), parse("text:long.txt", 1 << 20)]
    build(BuildRequest(read, tokenizer, "c", "tiny", BuildOptions(validation_fraction=0.1)), LocalEngine(1))
    verify_corpus("c")
    found = []
    for split in ("train", "validation"):
        corpus = Corpus.open("c", split)
        lengths = [len(record.tokens) for record in corpus.records(range(len(corpus.record_offsets) - 1))]
        assert max(lengths) <= 8192 and corpus.sentence_lengths.max() <= 8192
        found += [corpus.read_sentences(a, b).tolist() for a, b in itertools.pairwise(corpus.document_offsets.tolist())]
    for one in long:
        expected = tokenizer.encode_flat([one])[0].tolist()
        assert len(expected) >= 9000 and expected in found


def test_a_failure_to_write_names_its_document(text, monkeypatch):
    monkeypatch.setattr("data_prep.builder.shards.serialize_example", lambda document, *_: {}[document])
    with pytest.raises(KeyError) as error:
        run("c", ["text:text.txt"])
    assert error.value.__notes__ == ["while writing the document at text.txt:1"]


def test_shard_markers_without_shards_are_ignored(text):
    """Markers in --scratch record that shards are written, but --out was removed."""
    options = BuildOptions(validation_fraction=0.1, max_shard_bytes=3000)
    with interrupted("writer.finish_corpus"):
        run("c", ["text:text.txt"], options, scratch="elsewhere")
    shutil.rmtree("c")
    run("c", ["text:text.txt"], options, scratch="elsewhere")
    verify_corpus("c")
    run("fresh", ["text:text.txt"], options)
    assert files("c") == files("fresh")
    assert list(pathlib.Path("elsewhere").iterdir()) == []


@pytest.mark.parametrize("scratch", [None, "elsewhere"])
def test_a_build_killed_while_it_removes_its_work_is_finished(text, monkeypatch, scratch):
    """The same command ends well and removes the rest; when nothing is left of the build, it is refused."""
    remove = type(epath.Path("c")).rmtree

    def kill_at_last(path, **options):
        if (path / "build.json").exists():
            raise KeyboardInterrupt
        remove(path, **options)

    specs = ["text:text.txt"]
    with monkeypatch.context() as patch:
        patch.setattr(type(epath.Path("c")), "rmtree", kill_at_last)
        with pytest.raises(KeyboardInterrupt):
            run("c", specs, scratch=scratch)
    assert list(pathlib.Path(scratch or "c").glob("*.incomplete/build.json"))
    manifest = run("c", specs, scratch=scratch)
    assert not list(pathlib.Path().glob("*/*.incomplete"))
    run("fresh", specs)
    assert files("c") == files("fresh") and manifest == json.loads(pathlib.Path("c/corpus.json").read_text())
    with pytest.raises(UserError, match="already holds a corpus"):
        run("c", specs, scratch=scratch)


@pytest.mark.parametrize("step", [(resume, "exclusive_build"), (writer, "finish_corpus")])
def test_a_corpus_that_appears_during_a_build_stays(text, monkeypatch, step):
    """From a build on another machine, or one that ends just before this one acquires the lock."""
    function = getattr(*step)

    def appear(*arguments):
        pathlib.Path("c/corpus.json").write_text("finished")
        return function(*arguments)

    monkeypatch.setattr(*step, appear)
    with pytest.raises(UserError, match="c: already holds a corpus; choose another --out or remove it first"):
        run("c", ["text:text.txt"])
    assert pathlib.Path("c/corpus.json").read_text() == "finished" and not list(pathlib.Path("c").glob("*.npy"))


def test_evaluation_texts_are_cleaned_and_must_be_usable(books):
    pathlib.Path("books/900.txt").write_text("Caf\u00e9 " + books[4])
    overlap = " ".join(["Cafe\u0301", *books[4].split()[:12]])
    pathlib.Path("questions.jsonl").write_text(json.dumps({"question": overlap}) + "\n{broken\n")
    request = {"evaluation_texts": [sources.parse("jsonl:questions.jsonl@question")]}
    manifest = run("c", ["text-files:books/*.txt"], **request)
    assert manifest["dropped"]["leaked_documents"]["documents"] == 1
    assert manifest["leak_check"]["skipped"] == {"malformed_json": 1}
    with pytest.raises(UserError, match="did you mean 'question'"):
        run("d", ["text-files:books/*.txt"], evaluation_texts=[sources.parse("jsonl:questions.jsonl@questoin")])
    with pytest.raises(UserError, match="none of the 1 evaluation texts has 99 words"):
        run("d", ["text-files:books/*.txt"], BuildOptions(validation_fraction=0.1, decontamination_words=99), **request)


CHECKSUMS = """
from data_prep import sources
from data_prep.builder.prepare import block_checksum

source = sources.parse("mediawiki:dump.xml")
print([block_checksum(block) for part in source.inputs() for block in source.read_blocks(part, sources.InputRecord())])
"""


@pytest.mark.slow
def test_checksums_of_blocks_do_not_depend_on_the_hash_seed(tmp_path):
    spaces = "".join(f'<namespace key="6">{name}</namespace>' for name in ("Datei", "Kategorie", "Bild", "Medium"))
    (tmp_path / "dump.xml").write_text(f"<mediawiki>{spaces}<page><title>A</title><ns>0</ns></page></mediawiki>")
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", CHECKSUMS]
    found = {
        subprocess.check_output(command, env=environment | {"PYTHONHASHSEED": str(seed)}, cwd=tmp_path)
        for seed in range(4)
    }
    assert len(found) == 1
