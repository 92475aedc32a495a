"""Workers read sources for vocabularies and evaluation texts: the results are those of one process."""

import dataclasses
import functools
import gzip
import hashlib
import os
import pathlib

import numpy as np
import pytest

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions
from data_prep.builder.engines.local import LocalEngine
from data_prep.clean import CleaningOptions, clean
from data_prep.duplicates.decontamination import build_evaluation_index
from data_prep.duplicates.ngram_index import NgramIndex
from data_prep.for_each_input import for_each_input
from data_prep.parallel import SharedProgress
from data_prep.vocabularies.counting import BertWordCounter, BoundedWordCounter, BoundedWordCounts, MarkCounts
from data_prep.vocabularies.train import VocabularySettings, train
from tests.building import files, make_documents, parse, run
from tests.data_prep.test_file_ranges import FORMS

SPECS = ["text:a.txt", "text:b.txt.bz2", "text-files:books/*.txt"]
RANGES = {"range_bytes": 8000, "block_bytes": 3000}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files that are read by ranges, and small ones; the documents of all."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("books").mkdir()
    a, b, books = make_documents(0, 150), make_documents(1, 400), make_documents(2, 20, paragraphs=8)
    a[3] = "cafe\u0301 x² river"
    pathlib.Path("a.txt").write_text("\n\n".join(a))
    pathlib.Path("b.txt.bz2").write_bytes(FORMS[".multistream.bz2"]("\n\n".join(b).encode()))
    for number, book in enumerate(books):
        pathlib.Path(f"books/{number:02d}.txt").write_text(book)
    return [*a, *b, *books]


def sources_in_ranges():
    sources = [parse(spec, **RANGES) for spec in SPECS]
    assert all(len(source.inputs()) > 2 for source in sources), "the sides would not differ"
    return sources


def read(blocks):
    return os.getpid(), list(blocks)


def _append(results, *result):
    results.append(result)


def test_workers_read_and_results_are_in_the_order_of_the_text(texts, monkeypatch):
    sources, found, shown = sources_in_ranges(), {}, []
    add = SharedProgress.add
    monkeypatch.setattr(SharedProgress, "add", lambda self, size: shown.append(size) or add(self, size))
    for workers in (1, 2):
        results: list = []
        add_result = functools.partial(_append, results)
        totals = for_each_input(sources, read, add_result, workers, "reading")
        processes = {process for _, (process, _) in results}
        assert processes == {os.getpid()} if workers == 1 else os.getpid() not in processes
        found[workers] = [(index, blocks) for index, (_, blocks) in results], totals
    assert found[1] == found[2]
    results, totals = found[1]
    assert [text for _, blocks in results for block in blocks for text in block] == [clean(text) for text in texts]
    assert [total.documents for total in totals] == [150, 400, 20]
    sizes = [part.size for source in sources for part in source.inputs() if not part.hash_only]
    assert len(results) == len(sizes), "no file is read only to hash it"
    assert len(shown) > len(sizes) and sum(shown) == sum(sizes), "progress within an input"


@pytest.mark.parametrize("kind", ["wordpiece", "sentencepiece-bpe"])
def test_no_vocabulary_depends_on_ranges(texts, kind):
    """Nor on workers: test_tokenizer_command.py."""
    recipe = VocabularySettings(kind, 70, kind == "wordpiece", sampling_exponent=0.7, sample_bytes=40_000)
    whole, in_ranges = (train(recipe, sources, 1) for sources in ([parse(spec) for spec in SPECS], sources_in_ranges()))
    assert whole.to_json() == in_ranges.to_json()


def test_words_of_an_input_are_counted_within_bounds():
    """The slow twin counts the words of all blocks together."""
    blocks = [["a b c a", "b a"], [], ["c d", "Über-a"]]
    words = BertWordCounter(True)
    all_marks = MarkCounts()
    together = words((text for block in blocks for text in block), all_marks)
    counted, marks = BoundedWordCounter(words, 100)(iter(blocks))
    assert marks == all_marks == MarkCounts(1, 14)
    assert counted == together and list(counted) == list(together), "in the order of their first occurrence"
    table = BoundedWordCounts(3)
    for block in blocks:
        table.add(words(block, MarkCounts()))
    assert BoundedWordCounter(words, 3)(iter(blocks))[0] == table.counts != together


def test_no_ngram_depends_on_ranges(texts):
    options = BuildOptions(decontamination_words=9, cleaning=CleaningOptions("nfkc"))
    cleaned = [clean(text, options.cleaning) for text in texts]
    assert cleaned != [clean(text) for text in texts], "the sides would not differ"
    slow = NgramIndex.build(cleaned, 9)
    digest = hashlib.sha256("".join(text + "\0" for text in cleaned).encode()).hexdigest()
    index, report = build_evaluation_index(sources_in_ranges(), options, 1)
    assert np.array_equal(index.slots(), slow.slots())
    assert report == {
        "sources": SPECS,
        "sha256": digest,
        "texts": len(texts),
        "texts_too_short": sum(len(text.split()) < 9 for text in cleaned),
        "skipped": {},
        "ngrams": len(slow.ngrams),
    }


@pytest.mark.slow
def test_no_byte_of_a_decontaminated_corpus_depends_on_workers(texts):
    pathlib.Path("text.txt").write_text("\n\n".join(make_documents(7, 60) + texts[200:220]))
    for workers in (1, 2):
        manifest = run(
            f"c{workers}", ["text:text.txt"], engine=LocalEngine(workers), evaluation_texts=sources_in_ranges()
        )
        assert manifest["dropped"]["leaked_documents"]["documents"] >= 5
    assert files("c1") == files("c2")


def test_damage_is_an_error_of_one_line_or_left_out(texts, capsys):
    pathlib.Path("books/10.txt").write_bytes(b"\0")
    pathlib.Path("b.txt.gz").write_bytes(gzip.compress("\n\n".join(texts).encode())[:-200])
    sources = [parse("text:a.txt", **RANGES), parse("text:b.txt.gz", **RANGES), parse("text-files:books/*.txt")]
    recipe = VocabularySettings("wordpiece", 70, True)
    with pytest.raises(UserError, match=r"b\.txt\.gz: truncated"):
        train(recipe, sources, 1)
    capsys.readouterr()
    train(recipe, [dataclasses.replace(source, skip_damaged=True) for source in sources], 1)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: source text:b.txt.gz: left out b.txt.gz: truncated, its .gz data has no end; download it again",
        next(note for note in notes if "text-files:books/*.txt: left out books/10.txt: is binary, not text" in note),
    ]


def test_a_file_that_changes_while_it_is_read(texts, monkeypatch):
    def change(*arguments):
        pathlib.Path("a.txt").write_text("other")
        return clean(*arguments)

    monkeypatch.setattr("data_prep.for_each_input.clean", change)
    with pytest.raises(UserError, match=r"a\.txt: was changed or removed while it was read"):
        train(VocabularySettings("wordpiece", 70, True), [parse("text:a.txt")], 1)
