"""`bert-data` on the command line: whole builds, and every user error as one line with exit code 2."""

import errno
import gzip
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.registered import DatasetNotFoundError

from bert_jax.data.corpus import Corpus
from data_prep.builder import prepare, scratch
from data_prep.builder.engines import sorted_runs
from data_prep.cli.main import main
from tests.building import files, make_documents, normal, texts

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with a text of 300 documents and a tokenizer."""
    directory = tmp_path_factory.mktemp("prepared")
    (directory / "text.txt").write_text("\n\n".join(make_documents(0, 300)))
    source, out = f"text:{directory / 'text.txt'}", str(directory / "t" / "tokenizer.json")
    assert main(["tokenizer", "--source", source, "--vocab-size", "90", "--out", out]) == 0
    return directory


@pytest.fixture
def workspace(prepared, tmp_path, monkeypatch):
    """A copy as the current directory; its documents."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return make_documents(0, 300)


def build_arguments(out="c", source="text:text.txt", *more):
    defaults = {"--tokenizer": "t", "--workers": "1"}
    defaults |= {} if any(word.startswith("--validation") for word in more) else {"--validation-fraction": "0.1"}
    fixed = [word for flag, value in defaults.items() if flag not in more for word in (flag, value)]
    return ["build", "--source", source, "--out", out, *fixed, *more]


def build(out="c", source="text:text.txt", *more):
    return main(build_arguments(out, source, *more))


def expect_error(capsys, arguments, message):
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and message in errors[0], captured.err
    assert "Traceback" not in captured.err and not captured.out


def test_a_corpus_with_a_version_is_found_by_tfds(workspace, capsys):
    """By name and version below a data_dir; `tfds.load` cannot read ArrayRecord, with TensorFlow either (4.9.10)."""
    assert build("d/books/1.2.0") == 0 and build("c") == 0
    assert json.loads(pathlib.Path("d/books/1.2.0/corpus.json").read_text())["name"] == "books"
    with pytest.raises(DatasetNotFoundError):
        tfds.builder("c", data_dir="d")
    expected = Corpus.open("c")
    for name in ("books", "books:1.2.0", "books:1.*.*"):
        source = tfds.data_source(name, data_dir="d", split="train")
        assert len(source) == len(expected.record_offsets) - 1
        np.testing.assert_array_equal(source[0]["tokens"], expected.records([0])[0].tokens)
    assert str(tfds.builder("books", data_dir="d").info.full_name) == "books/1.2.0"
    assert Corpus.open("d/books/1.2.0").identity == expected.identity, "neither its name nor its place counts"
    assert main(["verify", "d/books/1.2.0"]) == 0
    capsys.readouterr()
    assert main(["inspect", "d/books"]) == 2
    assert "d/books: not a corpus, but it contains some: d/books/1.2.0; name one" in capsys.readouterr().err
    # An existing corpus is moved into such a place.
    pathlib.Path("d/c").mkdir()
    pathlib.Path("c").rename("d/c/1.0.0")
    assert len(tfds.data_source("c", data_dir="d", split="train")) == len(source)
    assert "tensorflow" not in sys.modules


def test_a_whole_build(workspace, capsys):
    capsys.readouterr()
    assert build() == 0
    summary, notes = capsys.readouterr()
    short = r"^note: the \d+ documents of train have \d+ tokens on average .* use text-files:GLOB"
    assert re.search(short, notes, re.M)
    assert "documents" in summary and "bert-data inspect c" in summary
    assert texts("c") == sorted(normal(text) for text in set(workspace))
    assert 10 < Corpus.open("c", "validation").num_documents < 60
    assert Corpus.open("c").name == "c"
    assert main(["inspect", "c"]) == 0
    description = capsys.readouterr().out
    assert re.search(short[1:], " ".join(description.replace("Note:", "note:").split()))
    assert "tokens in a sentence, train" in description and "text:text.txt" in description
    assert main(["verify", "c"]) == 0
    assert "c: intact; 16 files" in capsys.readouterr().out


def test_every_flag_of_build_reaches_the_corpus(workspace):
    """All filters and steps together; each has tests of its own."""
    flags = (
        "--language de --encoding windows-1252 --normalization nfkc --keep-control-characters --keep-whitespace"
        " --min-characters 30"
        " --drop-repeated-lines --keep-duplicates --drop-duplicate-paragraphs 40 --drop-near-duplicates 0.9"
        " --shingle-words 2 --permutations 64 --decontaminate text:text.txt --decontamination-words 40 --max-shard-mb 3"
        " --validation-fraction 0.2 --scratch elsewhere --name other --skip-damaged --memory-mb 64 --license mit"
        " --source-name mine --score none"
        " --filter thresholds.json --filter-function keep.py:keep --mask phone --mask email --mask email"
    )
    pathlib.Path("thresholds.json").write_text('{"fineweb": {"short_line": 2, "max_repeated_line_characters": null}}')
    pathlib.Path("keep.py").write_text("def keep(text, language):\n    return language == 'de'\n")
    assert build("c", "text:text.txt", *flags.split()) == 0
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    assert manifest["name"] == "other" and manifest["leak_check"]["sources"] == ["text:text.txt"]
    assert manifest["sources"][0]["encoding"] == "cp1252" and manifest["sources"][0]["license"] == "mit"
    assert manifest["sources"][0]["language"] == "de" and [*manifest["splits"]["train"]["languages"]] == ["de"]
    assert manifest["sources"][0]["source_name"] == "mine" and manifest["splits"]["train"]["groups"][0]["score"] is None
    assert manifest["settings"] == {
        "cleaning": {"normalization": "nfkc", "control_characters": False, "whitespace": False},
        "drop_repeated_lines": True,
        "filters": {
            "fineweb": {
                "min_lines_with_end_mark": 0.12,
                "max_short_lines": 0.67,
                "short_line": 2,
                "max_repeated_line_characters": None,
                "max_line_ends": 0.3,
            }
        },
        "filter_functions": {"keep.py:keep": hashlib.sha256(pathlib.Path("keep.py").read_bytes()).hexdigest()},
        "masks": ["email", "phone"],
        "min_characters": 30,
        "drop_duplicate_documents": False,
        "drop_duplicate_paragraphs": 40,
        "near_duplicates": {"shingle_words": 2, "threshold": 0.9, "permutations": 64},
        "leak_words": 40,
        "score_bounds": [],
        "skip_damaged": True,
        "validation_fraction": 0.2,
        "validation_documents": None,
        "validation_sources": 0,
        "max_shard_bytes": 3 << 20,
    }
    assert list(pathlib.Path("elsewhere").iterdir()) == []


def test_lines_keep_their_sentences(workspace):
    lines = ["The river. The stone.", "a wind", "", "water falls", "over", "", "dark"]
    pathlib.Path("lines.txt").write_text("\n".join(lines))
    assert build("c", "lines:lines.txt", "--validation-fraction", "0.5") == 0
    assert sum(Corpus.open("c", split).num_sentences for split in ("train", "validation")) == 5


@pytest.mark.slow
def test_the_module_is_runnable(workspace):
    command = [sys.executable, "-m", "data_prep", *build_arguments()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert b"ready in" in finished.stdout
    with pathlib.Path("/dev/full").open("w") as full:
        described = subprocess.run(
            [*command[:3], "inspect", "c"], env=environment, stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert described.returncode == 2 and b"No space left on device" in described.stderr
    assert b"Traceback" not in described.stderr


TOKENIZER = ["tokenizer", "--vocab-size", "90", "--out", "new.json", "--source"]
BAD_FILES = {
    "empty.txt": b" \n",
    "one.txt": b"Only one document.",
    "binary.txt": b"\0\0",
    "array.json": b"[\n  {\n",
    "maskless.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nriver\n",
}
USER_ERRORS = [
    ([*TOKENIZER, "txt:text.txt"], "unknown kind 'txt', did you mean 'text'?"),
    ([*TOKENIZER, "text:absent/*.txt"], "no file matches absent/*.txt"),
    ([*TOKENIZER, "text:t"], "t is a directory; write `text:t/*`, or name its files"),
    ([*TOKENIZER, "jsonl:t@text"], "t is a directory; write `jsonl:t/*@text`, or name its files"),
    (["inspect", "absent"], "no such corpus"),
    (["verify", "t"], "not a finished corpus"),
    (["verify", "zz://t"], "zz://t: zz:// is not supported: write gs://BUCKET/... or s3://BUCKET/..."),
    (["inspect", "zz://t"], "zz://t: zz:// is not supported"),
    ([*TOKENIZER, "text:zz://t/*.txt"], "zz://t/*.txt: zz:// is not supported"),
    (build_arguments("c", "text:text.txt", "--tokenizer", "zz://t/vocab.txt"), "zz:// is not supported"),
    (build_arguments("zz://c"), "zz:// is not supported"),
    ([*TOKENIZER, "text:text***"], "source text:text***: not a glob: "),
    ([*TOKENIZER, "text:~no-such-user/x"], "no file matches ~no-such-user/x"),
    ([*TOKENIZER, "text:pipe"], "source text:pipe: pipe is not a file, but a device, a pipe, or a link to no file"),
    ([*TOKENIZER, "text:binary.txt", "--skip-damaged"], "skipped (1 x damaged_file); the first: binary.txt"),
    (["tokenizer", "--source", "text:text.txt", "--out", "text.txt/new.json"], "text.txt: is a file, not a directory"),
    (build_arguments("c", "text:text.txt", "--scratch", "text.txt"), "text.txt"),
    (build_arguments("c", "text:text.txt", "--scratch", "zz://c"), "zz:// is not supported"),
    (build_arguments("c\udcff"), "'c\\udcff': the name is not UTF-8; choose another path"),
    (build_arguments("c", "text:text.txt", "--scratch", "c\udcff"), "the name is not UTF-8"),
    (
        build_arguments("c", "text:text.txt", "--decontaminate", "jsonl:text.txt"),
        "source jsonl:text.txt: say which field",
    ),
    (build_arguments("c", "jsonl:array.json@text"), "each line must be a JSON object"),
    (build_arguments("c", "text:empty.txt"), "empty.txt"),
    (build_arguments("c", "text:cut.txt.gz"), "data has no end; download it again; or add --skip-damaged"),
    ([*TOKENIZER, "text:cut.txt.gz"], "data has no end; download it again; or add --skip-damaged"),
    (build_arguments("c", "text:text.txt", "--decontaminate", "text:cut.txt.gz"), "error: --decontaminate: cut.txt.gz"),
    (build_arguments("c", "tfds:absent_set:train@text"), "absent_set"),
    (
        build_arguments("c", "text:one.txt"),
        "one document with text is left after the filters; a corpus needs two different ones",
    ),
    (build_arguments("c/1"), "give one with --name"),
    (build_arguments("c", "text:text.txt", "--name", "Not-a-name"), "must be lower-case letters"),
    (build_arguments("text.txt"), "text.txt: is a file"),
    (build_arguments("t"), "t: is not empty"),
    (build_arguments("/proc/nowhere/c"), "/proc/nowhere"),
    (build_arguments("text.txt/c"), "text.txt"),
    (build_arguments("c", "text:text.txt", "--runner", "DirectRunner"), "add --engine beam"),
    (build_arguments("c", "text:text.txt", "--", "--direct_num_workers=2"), "add --engine beam"),
    (build_arguments("c", "text:text.txt", "--tokenizer", "no"), "no such tokenizer"),
    (build_arguments("c", "text:text.txt", "--tokenizer", "maskless.txt"), "maskless.txt: the vocabulary has no"),
]


def test_user_errors(workspace, capsys):
    content = pathlib.Path("text.txt").read_bytes()
    for name, text in BAD_FILES.items():
        pathlib.Path(name).write_bytes(text)
    os.mkfifo("pipe")
    pathlib.Path("cut.txt.gz").write_bytes(gzip.compress(content)[:-100])
    for arguments, message in USER_ERRORS:
        expect_error(capsys, arguments, message)
        assert not pathlib.Path("new.json").exists() and not pathlib.Path("c/corpus.json").exists(), arguments
        shutil.rmtree("c", ignore_errors=True)


@pytest.mark.parametrize(
    ("documents", "fraction", "held_out"),
    [
        (2, "1e-9", 1),
        (3, "0.999999999", 1),
        (4, "1e-9", 2),
        (5, "0.999999999", 3),
        (18, "0.13", 2),  # one, by their hashes
    ],
)
def test_each_split_has_two_documents_where_possible(workspace, documents, fraction, held_out, capsys):
    """A share of few documents may be none, one or all of them, and sentence pairs need two in each split."""
    pathlib.Path("few.txt").write_text("\n\n".join(make_documents(2, documents)))
    assert build("c", "text:few.txt", "--validation-fraction", fraction) == 0
    counts = [Corpus.open("c", split).num_documents for split in ("train", "validation")]
    assert counts == [documents - held_out, held_out]
    begin = {2: "note: train and validation have 1 document each: ", 3: "note: validation has 1 document: "}
    notes = [line for line in capsys.readouterr().err.splitlines() if "sentence pairs need 2" in line]
    assert [note[: len(begin[documents])] for note in notes] == [begin[n] for n in [documents] if n in begin]


def test_what_is_held_out(workspace, capsys):
    pathlib.Path("few.txt").write_text("\n\n".join(make_documents(2, 4)))
    pathlib.Path("held.txt").write_text("\n\n".join(make_documents(2, 2) + make_documents(3, 1)))
    assert build("c", "text:few.txt", "--validation-documents", "1") == 0
    assert "note: validation has 1 document: sentence pairs need 2 in each split" in capsys.readouterr().err
    assert Corpus.open("c", "validation").num_documents == 1
    # A document that is held out is removed from the text to train on.
    assert build("d", "text:few.txt", "--validation-source", "text:held.txt") == 0
    both = [Corpus.open("d", split).num_documents for split in ("train", "validation")]
    assert both == [4 - len({*make_documents(2, 4)} & {*make_documents(2, 2)}), 3]
    for words, message in (
        (["--validation-documents", "4"], "--validation-documents 4 leaves none of the 4 documents to train on"),
        (["--validation-documents", "1", "--validation-fraction", "0.1"], "all say what is held out: give one of them"),
        (["--validation-source", "text:few.txt"], "text:few.txt is given twice, as a --source or --validation-source"),
        (["--validation-source", "text:./few.txt"], "no document of --source with text is left"),
    ):
        expect_error(capsys, build_arguments("e", "text:few.txt", *words), message)


def test_a_failure_names_its_document(workspace, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(prepare, "split_sentences", fail)
    with pytest.raises(ZeroDivisionError) as error:
        build()
    assert error.value.__notes__ == ["while preparing the document at text.txt:1"]


def test_a_full_disk_is_one_line_and_the_build_can_continue(workspace, capsys, monkeypatch):
    assert build("expected", "text:text.txt", "--name", "c") == 0
    write, written = scratch.write_atomic, []

    def fill(path, content):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(scratch, "write_atomic", fill)
        expect_error(capsys, build_arguments(), "No space left on device; free some space and run the same")
    assert not pathlib.Path("c/corpus.json").exists()
    assert build() == 0
    assert files("c") == files("expected")


def test_a_full_disk_while_duplicates_are_found(workspace, capsys, monkeypatch):
    assert build("expected", "text:text.txt", "--name", "c", "--drop-near-duplicates", "--workers", "1") == 0
    arguments = build_arguments("c", "text:text.txt", "--drop-near-duplicates", "--workers", "1")

    def fail(writer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(sorted_runs._RunWriter, "flush", fail)
        expect_error(capsys, arguments, "No space left on device; free some space and run the same command again")
    left = {path.name.split("-")[0] for path in pathlib.Path("c/corpus.incomplete").iterdir()}
    assert left == {"build.json", "input", "units"}
    assert main(arguments) == 0
    assert files("c") == files("expected")


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [20, 100, 260])
def test_a_really_full_disk(workspace, capsys, kilobytes):
    """Whenever a small disk is full, the error is one line, and no file looks complete."""
    disk = pathlib.Path("disk")
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        capsys.readouterr()
        code = build("disk/c", "text:text.txt", "--name", "c")
        error = capsys.readouterr().err
        assert code == 2 and "No space left on device" in error and "Traceback" not in error, error
        assert not (disk / "c/corpus.json").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert build("disk/c", "text:text.txt", "--name", "c") == 0
        assert main(["verify", "disk/c"]) == 0
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        expect_error(capsys, build_arguments("disk/d"), "Read-only file system; choose another path")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize(
    ("place", "codes"),
    [("inspection.corpus_statistics.measure_lengths", [0, 2]), ("builder.resume.remove_scratch", [130, 0])],
)
def test_stopped_after_the_last_write(workspace, monkeypatch, capsys, place, codes):
    """Not as a build that the same command continues, unless it does."""

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"data_prep.{place}", stop)
        found = [main(build_arguments())]
    assert ("c: ready; look at it" in capsys.readouterr().err) == (codes[0] == 0)
    assert [*found, main(build_arguments())] == codes
    assert main(["verify", "c"]) == 0 and not pathlib.Path("c/corpus.incomplete").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_stopped_within_a_large_file(workspace, number, code):
    text = ("\n\n".join(make_documents(1, 10_000)) + "\n\n").encode()
    for name in ("a.txt.gz", "b.txt.gz"):
        pathlib.Path(name).write_bytes(gzip.compress(text * 24, 1))
    words = ["build", "--source", "text:*.txt.gz", "--tokenizer", "t/tokenizer.json", "--out", "c", "--workers", "2"]
    command = [sys.executable, "-m", "data_prep", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not [*pathlib.Path("c").glob("**/unit-*")]:
            time.sleep(0.02)
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, errors.splitlines()[-1]) == (code, "stopped; the same command continues the build")
    assert not [*pathlib.Path("c").glob("**/input-*")], "no file was read to its end"
    assert main(words) == 0
