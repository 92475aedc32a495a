"""Sources that are plain files: kinds, globs, compression, and everything that can be wrong with a file."""

import bz2
import codecs
import dataclasses
import gzip
import hashlib
import importlib
import pathlib

import pytest

from bert_jax.errors import UserError
from data_prep import sources
from data_prep.builder.sentences import split_lines
from data_prep.clean import clean
from data_prep.sources import InputRecord, files, parse
from data_prep.sources.file_inputs import divide_files
from tests.data_prep.test_sources_reading import read


def test_kinds(tmp_path, monkeypatch):
    (tmp_path / "b.txt").write_bytes(b"\n\none\ntwo\n \n\nthree")
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"zero\r\n")
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    reading = read(f"text:{tmp_path}/*.txt")
    found = [(document.origin, document.text) for document in reading.documents]
    assert found == [(f"{a}:1", "zero\r\n"), (f"{b}:3", "one\ntwo\n"), (f"{b}:7", "three")]
    digest = hashlib.sha256(a.read_bytes()).hexdigest()
    assert reading.file_entries[0] == {"path": str(a), "sha256": digest, "bytes": 9}
    assert [(file["path"], file["bytes"]) for file in reading.file_entries] == [(str(a), 9), (str(b), 18)]
    lines = read(f"lines:{tmp_path}/b.txt").documents
    assert [(document.origin, document.text) for document in lines] == found[1:]
    assert all(document.sentence_per_line for document in lines)
    assert not any(document.sentence_per_line for document in reading.documents)
    whole = read(f"text-files:{tmp_path}/**/*.txt").documents
    assert read(f"text-files:{tmp_path}/**").documents == whole
    assert [(d.origin, d.text) for d in whole] == [(str(a), "zero\r\n"), (str(b), "\n\none\ntwo\n \n\nthree")]
    monkeypatch.chdir(tmp_path.parent)
    for name in (f"{tmp_path.name}/a.txt", f"{tmp_path.name}/a.*"):
        assert [d.origin for d in read(f"text:{name}").documents] == [f"{tmp_path.name}/a.txt:1"]


def test_a_name_with_characters_of_globs(tmp_path):
    for name in ("my[1].txt", "my1.txt"):
        (tmp_path / name).write_text(name)
    assert read(f"text-files:{tmp_path}/my[1].txt").texts == ["my[1].txt"]
    assert read(f"text-files:{tmp_path}/my[[]1].txt").texts == ["my[1].txt"]
    (tmp_path / "my[1].txt").unlink()
    assert read(f"text-files:{tmp_path}/my[1].txt").texts == ["my1.txt"]
    (tmp_path / "a**b.txt").write_text("no glob")
    assert read(f"text-files:{tmp_path}/a**b.txt").texts == ["no glob"]


@pytest.mark.parametrize("name", ["*.txt", "?.txt"])
def test_a_file_that_its_own_name_matches_hides_no_other(tmp_path, name):
    names = [name, "a.txt"]
    for each in names:
        (tmp_path / each).write_text(each)
    assert sorted(read(f"text-files:{tmp_path}/{name}").texts) == sorted(names)


def test_only_line_feeds_end_the_sentences_of_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes("a\u2028b\x0cc\x85d\u2029e\rf\x0bg\r\nh\n\ni\n".encode())
    assert read(f"lines:{tmp_path}/a.txt").texts == ["a b c d e f g\r\nh\n", "i\n"]
    assert [split_lines(clean(text)) for text in read(f"lines:{tmp_path}/a.txt").texts] == [
        ["a b c d e f g", "h"],
        ["i"],
    ]
    assert len(clean(read(f"text:{tmp_path}/a.txt").texts[0]).split("\n")) == 8


def test_small_files_share_an_input_and_big_ones_do_not(tmp_path):
    for name, size in [("a", 30), ("b", 60), ("c", 20), ("d", 500), ("e", 90), ("f", 10)]:
        (tmp_path / name).write_text(name * size)
    source = parse(f"text-files:{tmp_path}/*")
    inputs = divide_files(files.find_files(source.spec, source.pattern), 100, None)
    names = [[path[-1] for path in part.paths] for part in inputs]
    assert names == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert [part.size for part in inputs] == [90, 20, 500, 100]
    reading = read(f"text-files:{tmp_path}/*", block_bytes=100)
    assert reading.texts == ["a" * 30, "b" * 60, "c" * 20, "d" * 500, "e" * 90, "f" * 10]
    assert reading.blocks == 1 + 1 + 5 + 1


def test_progress_over_small_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(("word " * 9 + "\n\n").encode() * 30))
    size = (tmp_path / "a.gz").stat().st_size
    source = dataclasses.replace(parse(f"text:{tmp_path}/*"), block_bytes=2 * size)
    (part,) = source.inputs()
    sizes = [block.size for block in source.read_blocks(part, InputRecord())]
    assert len(sizes) > 10
    half = next(i for i in range(len(sizes)) if sum(sizes[: i + 1]) > size)
    assert abs(half - len(sizes) / 2) <= 1, "each file is half of the work"


TEXT = "".join(f"Document {i}, which says né.\nIts second line.\n\n" for i in range(300))


def compressed(kind, data):
    if kind == ".zst":
        return pytest.importorskip("backports.zstd").compress(data)
    return {".gz": gzip.compress, ".bz2": bz2.compress}[kind](data)


@pytest.mark.parametrize("kind", [".gz", ".bz2", ".zst"])
def test_compressed(tmp_path, kind, monkeypatch):
    plain = tmp_path / "a.txt"
    plain.write_text(TEXT)
    data = TEXT.encode()
    for name, content in {
        "one": compressed(kind, data),
        "several": b"".join(compressed(kind, data[i : i + 1000]) for i in range(0, len(data), 1000)),
        "empty_first": compressed(kind, b"") + compressed(kind, data),
        "filled_up": compressed(kind, data) + b"\0" * 700,
    }.items():
        path = tmp_path / f"{name}.txt{kind}"
        path.write_bytes(content)
        for raw_bytes in (1 << 20, 13):
            monkeypatch.setattr(files, "_RAW_BYTES", raw_bytes)
            for block_bytes in (4 << 20, 500):
                reading = read(f"text:{path}", block_bytes=block_bytes)
                assert reading.texts == read(f"text:{plain}").texts
                assert len(reading.texts) == 300
                assert [d.origin.partition(":")[2] for d in reading.documents[:2]] == ["1", "4"]
        assert reading.file_entries == [
            {"path": str(path), "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        ]


@pytest.mark.parametrize("kind", [".gz", ".bz2", ".zst"])
def test_damaged_compressed_files(tmp_path, kind):
    one, path = compressed(kind, TEXT.encode()), tmp_path / f"a.txt{kind}"
    for content, message in {
        b"": "truncated, its .* data has no end; download it again",
        one[:-1]: "truncated",
        one[: len(one) // 2]: "truncated",
        one + one[:20]: "truncated",
        one + b"garbage behind the end": "damaged",
        b"no compressed data": "damaged",
    }.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"a\.txt\{kind}: {message}"):
            read(f"text:{path}")


def test_a_strongly_compressed_file_is_read_in_small_pieces(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * (30 << 20)))
    with files.DecompressingReader(str(path)) as file:
        pieces = list(iter(lambda: file._next(1 << 20), b""))
    assert max(map(len, pieces)) <= 1 << 20
    assert 8192 <= (30 << 20) - sum(map(len, pieces)) <= 1 << 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc\0def", r"is binary, not text; leave it out of the source \(compressed files must end in \.gz"),
        (gzip.compress(b"x", mtime=0), "is binary, not text"),
        (codecs.BOM_UTF8 + b"a\0b", "is binary, not text"),
        (b"%PDF-1.7\n", "is a PDF file; extract its text, or leave it out of the source"),
        ("The river sings.".encode("utf-16-le"), "is utf-16-le, not utf-8; add --encoding utf-16-le, or auto"),
        (codecs.BOM_UTF32_BE + "text".encode("utf-32-be"), "is utf-32, not utf-8; add --encoding utf-32, or auto"),
    ],
)
def test_binary_files(tmp_path, content, message):
    (tmp_path / "a.dat").write_bytes(content)
    for kind in ("text", "text-files", "markdown", "wikiextractor", "mediawiki"):
        with pytest.raises(UserError, match=rf"a\.dat: {message}"):
            read(f"{kind}:{tmp_path}/a.dat")


def test_unreadable_files(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x")
    source = parse(f"text:{path}")
    (part,) = source.inputs()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(Is a directory\); leave it out"):
        list(source.read_blocks(part, InputRecord()))
    path.rmdir()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read \(No such file or directory\)"):
        list(source.read_blocks(part, InputRecord()))


def test_empty_files_are_counted(tmp_path):
    for name, content in [("a", "one\n"), ("b", ""), ("c", " \n\n \t"), ("d", "two")]:
        (tmp_path / name).write_text(content)
    (tmp_path / "e").write_bytes(codecs.BOM_UTF8)
    for kind in ("text", "lines", "text-files"):
        for block_bytes in (8, 100):
            reading = read(f"{kind}:{tmp_path}/*", block_bytes=block_bytes)
            assert reading.texts == ["one\n", "two"]
            assert reading.places == [("empty_file", f"{tmp_path}/{name}") for name in "bce"]


def test_bytes_of_another_encoding_cost_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\nt\xe9o\nmore\n\nthr\xc3\xa9e\n")
    reading = read(f"text:{tmp_path}/a.txt")
    assert reading.texts == ["one\n", "thrée\n"]
    assert reading.places == [("undecodable", f"{tmp_path}/a.txt:3")]
    assert reading.skipped[0].detail.startswith("1 of 9 bytes are not UTF-8, the first at byte 6; set --encoding to ")
    (tmp_path / "b.txt").write_bytes(b"fine")
    reading = read(f"text-files:{tmp_path}/*.txt")
    assert (reading.texts, reading.places) == (["fine"], [("undecodable", f"{tmp_path}/a.txt")])


def test_bytes_of_another_encoding_in_a_part_of_a_long_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first line\nsecond \xff\nthird line\n")
    for kind in ("text", "text-files"):
        reading = read(f"{kind}:{path}", block_bytes=12)
        assert reading.texts == ["first line\nthird line\n"]
        assert reading.places == [("undecodable", f"{path}:2")]
        assert [(part.begins, part.ends) for part in reading.parts] == [(True, False), (False, False), (False, True)]
    path.write_bytes(b"\xff\xff\n\n\xff\n")
    with pytest.raises(
        UserError, match=r"everything was skipped \(2 x undecodable\).*a\.txt:1: 2 of 3 bytes are not UTF-8"
    ):
        read(f"text:{path}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("txt:a", "unknown kind 'txt', did you mean 'text'?"),
        ("text-file:a", "did you mean 'text-files'?"),
        ("zebra:a", "unknown kind 'zebra'. Kinds: text, "),
        ("books/*.txt", "say how to read it, e.g. `text-files:books/*.txt`"),
        ("gs://bucket/*.txt", "say how to read it, e.g. `text-files:gs://bucket/*.txt`"),
        ("text", "say which files, e.g. `text:texts"),
        ("jsonl:a.jsonl", "say which field holds the text, e.g. `jsonl:a.jsonl@text`"),
        ("parquet:@text", "say which field"),
        ("markdown:*.md@7", "the level of a heading, 1 to 6"),
        ("markdown:@2", "say which files"),
        ("reference:x", "takes no glob; write just `reference`"),
        ("tfds:lm1b", "write tfds:NAME:SPLIT@FIELD"),
        ("tfds:lm1b:train", "write tfds:NAME:SPLIT@FIELD"),
    ],
)
def test_specs_that_say_too_little(spec, message):
    with pytest.raises(UserError, match=f"source {spec}: ".replace("*", r"\*")) as error:
        parse(spec)
    assert message in str(error.value)


def test_specs():
    assert parse("markdown:a@b/*.md").pattern == "a@b/*.md"
    assert parse("markdown:a@b/*.md").level is None
    assert (parse("markdown:*.md@3").pattern, parse("markdown:*.md@3").level) == ("*.md", 3)
    jsonl = parse("jsonl:gs://b/a@b.jsonl@meta.text")
    assert (jsonl.pattern, jsonl.field) == ("gs://b/a@b.jsonl", "meta.text")
    tfds = parse("tfds:gs://b/wiki/en:train[:10%]@text")
    assert (tfds.name, tfds.split, tfds.field) == ("gs://b/wiki/en", "train[:10%]", "text")
    page = (pathlib.Path(__file__).parents[2] / "docs" / "corpus.md").read_text()
    for kind, (path, usage) in sources._KINDS.items():
        assert importlib.import_module(f"data_prep.sources.{path.partition('.')[0]}") and usage.startswith(kind)
        assert f"| `{usage.partition(' ')[0]}` |" in page


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / ".#a.txt").symlink_to(tmp_path / "me@host.1")  # as Emacs locks a file
    (tmp_path / "b.txt").symlink_to(tmp_path / "texts" / "a.txt")
    (tmp_path / "more").symlink_to(tmp_path / "texts")
    patterns = {"*.txt": 1, "*/*.txt": 2, "*/a.txt": 2, "**/*.txt": 2, "**/**/a.txt": 1, "*/../b.txt": 2}
    for pattern, count in patterns.items():
        assert read(f"text-files:{tmp_path}/{pattern}").texts == ["one"] * count, pattern
    links = {
        "c.txt": ["*.txt", "[a-d].txt", "**"],
        "d": ["*/a.txt", "*/*.txt"],
        "texts/e.txt": ["**/*.txt", "texts*/e.txt"],
    }
    for name, matching in links.items():
        (tmp_path / name).symlink_to(tmp_path / "gone")
        for pattern in matching:
            with pytest.raises(UserError, match=f"{name}: a symbolic link to nothing"):
                read(f"text-files:{tmp_path}/{pattern}")
        (tmp_path / name).unlink()
