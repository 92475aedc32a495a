"""Builds from files that are read by ranges, and `--skip-damaged`: bytes do not depend on workers or interruption."""

import gzip
import json
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions, NearDuplicateOptions
from data_prep.builder.engines.local import LocalEngine
from data_prep.builder.prepare import BlockPreparer
from data_prep.cli.main import main
from data_prep.filters.chain import Filters
from data_prep.filters.function import FilterFunction
from data_prep.filters.gopher import GopherQuality
from tests.building import files, interrupted, make_documents, normal, parse, run, texts
from tests.data_prep.test_file_ranges import FORMS

ROOT = pathlib.Path(__file__).parents[2]
SPECS = ["text:a.txt", "text:a.txt.bz2", "jsonl:a.jsonl.zst@text", "parquet:a.parquet@text", "text-files:book*"]
SPECS += ["lines:a.txt.gz"]
CODE = """
def keep(text, language):
    if len(text) > 1000:
        return True
    if "light light" in text:
        raise ValueError
    return "slow slow" not in text
"""
OPTIONS = BuildOptions(
    validation_fraction=0.2,
    skip_damaged=True,
    drop_repeated_lines=True,
    filters=Filters(gopher_quality=GopherQuality(min_words=8, min_mean_word_length=None, min_stop_words=None)),
    filter_functions=(FilterFunction("keep.py:keep", "0" * 64, CODE),),
    min_characters=30,
    drop_duplicate_paragraphs=20,
    near_duplicates=NearDuplicateOptions(),
    max_shard_bytes=20_000,
)
RANGES = {"range_bytes": 8000, "block_bytes": 6000}


@pytest.fixture
def large_files(tmp_path, monkeypatch):
    """Files of each kind that can be split, and one that cannot beside a damaged one."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    documents = [make_documents(seed, 900 if seed in (1, 2) else 200) for seed in range(4)]
    pathlib.Path("a.txt").write_bytes("\n\n".join(documents[0]).encode() + b"\n\ncaf\xe9\n\nEnd.")
    pathlib.Path("a.txt.bz2").write_bytes(FORMS[".multistream.bz2"]("\n\n".join(documents[1]).encode()))
    pathlib.Path("a.txt.gz").write_bytes(FORMS[".bgzf.gz"]("\n\n".join(make_documents(8, 500)).encode()))
    lines = [json.dumps({"text": text}) for text in documents[2]] + ["{broken"]
    pathlib.Path("a.jsonl.zst").write_bytes(FORMS[".zst"]("\n".join(lines).encode()))
    parquet.write_table(pyarrow.table({"text": documents[3]}), "a.parquet", row_group_size=20)
    pathlib.Path("book.txt").write_text("\n\n".join(make_documents(9, 300)))
    pathlib.Path("book.bin").write_bytes(b"\0")
    run("whole", SPECS, OPTIONS, block_bytes=6000)
    return files("whole")


def test_no_byte_depends_on_ranges_workers_and_scratch(large_files):
    assert [len(parse(spec, **RANGES).inputs()) > 3 for spec in SPECS] == [True, True, True, False, False, True]
    run("c", SPECS, OPTIONS, LocalEngine(2), **RANGES, scratch="elsewhere")
    assert files("c") == large_files and list(pathlib.Path("elsewhere").iterdir()) == []
    manifest = json.loads(large_files["corpus.json"])
    assert "book.bin: is binary" in manifest["sources"][4]["damaged"][0]
    rules = manifest["filters"]["rules"]
    assert [len(rules[rule]["examples"]) for rule in ("gopher_quality.min_words", "keep.py:keep")] == [3, 3]
    assert manifest["skipped"]["filter_function_failed"]["count"] > 3
    places = [place for entry in manifest["skipped"].values() for place in entry["first"]]
    line = pathlib.Path("a.txt").read_bytes().count(b"\n") - 1
    assert any(re.match(rf"a\.txt:{line}: 1 of 5 bytes are not UTF-8, the first at byte \d", place) for place in places)


@pytest.mark.slow
@pytest.mark.beam
@pytest.mark.filterwarnings("default")
def test_no_byte_depends_on_the_engine(large_files):
    pytest.importorskip("apache_beam", reason="needs the extra `beam`")
    from data_prep.builder.engines.beam import BeamEngine

    run("beam", SPECS, OPTIONS, BeamEngine(None), **RANGES)
    assert files("beam") == large_files


DRIVER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from data_prep.builder import prepare
from data_prep.builder.engines.local import LocalEngine
from tests.building import run
from tests.data_prep.test_build_ranges import OPTIONS, RANGES, SPECS

prepare_block = prepare.BlockPreparer.__call__
def die_in_range(self, task):
    if task.source == 3 and "-00000000-00000004." in task.target:
        os.kill(os.getppid(), signal.SIGKILL)
    return prepare_block(self, task)
prepare.BlockPreparer.__call__ = die_in_range
if __name__ == "__main__":
    run("c", SPECS, OPTIONS, LocalEngine(2), **RANGES)
"""


@pytest.mark.slow
def test_stopped_in_ranges_of_every_kind(large_files, monkeypatch):
    """Interrupted in three kinds of file, then killed in the fourth with two workers: what was prepared is used."""
    prepare, done, places = BlockPreparer.__call__, [], [0, 1, 2]

    def stop_or_note(self, task):
        if task.source in places and "-00000002-00000001." in task.target:
            places.remove(task.source)
            raise KeyboardInterrupt
        done.append(pathlib.Path(task.target).name)
        return prepare(self, task)

    monkeypatch.setattr(BlockPreparer, "__call__", stop_or_note)
    while places:
        with pytest.raises(KeyboardInterrupt):
            run("c", SPECS, OPTIONS, **RANGES)
    pathlib.Path("driver.py").write_text(DRIVER.format(root=str(ROOT)))
    process = subprocess.run([sys.executable, "driver.py"], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    found = {path.name for path in pathlib.Path("c/corpus.incomplete").glob("units/*/unit-*.safetensors")}
    assert found > set(done)
    done += found - set(done)
    run("c", SPECS, OPTIONS, **RANGES)
    assert len(done) == len(set(done)) and files("c") == large_files


@pytest.fixture
def some_damaged(tmp_path, monkeypatch):
    """Damaged files beside good ones, in one source."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("dump").mkdir()
    documents = [make_documents(seed, 600 if seed == 1 else 300) for seed in range(5)]
    contents = ["\n\n".join(part).encode() for part in documents]
    blocks = FORMS[".multistream.bz2"](contents[1])
    frames = FORMS[".zst"](contents[2])
    middle, end = len(blocks) // 2, len(frames) - 5
    pathlib.Path("dump/a.txt").write_bytes(contents[0])
    pathlib.Path("dump/b.bz2").write_bytes(blocks[:middle] + bytes(9) + blocks[middle + 9 :])
    pathlib.Path("dump/c.zst").write_bytes(frames[:end])
    pathlib.Path("dump/d.gz").write_bytes(gzip.compress(contents[3])[:-300])
    pathlib.Path("dump/e.bin").write_bytes(b"\0" + contents[4])
    pathlib.Path("dump/f.txt").write_bytes(b"The last river sings.")
    return documents


NAMES = ["b.bz2: damaged .bz2", "c.zst: truncated", "d.gz: truncated", "e.bin: is binary"]
SKIP = BuildOptions(validation_fraction=0.1, skip_damaged=True)


def test_damaged_files_are_left_out_and_listed(some_damaged, capsys):
    """A build that was interrupted leaves nothing that makes a later one accept damage."""

    def refused():
        with pytest.raises(UserError, match=r"dump/b\.bz2: damaged"):
            run("c", ["text:dump/*"], **RANGES)

    refused()
    with interrupted("writer.finish_corpus"):
        run("c", ["text:dump/*"], SKIP, **RANGES)
    refused()
    manifest = run("c", ["text:dump/*"], SKIP, **RANGES)
    for message, name in zip(manifest["sources"][0]["damaged"], NAMES, strict=True):
        assert message.startswith(f"dump/{name}")
    lost = manifest["skipped"]["damaged_file"].pop("bytes")
    assert manifest["skipped"]["damaged_file"] == {"count": 4, "first": manifest["sources"][0]["damaged"]}
    sizes = [one.stat().st_size for one in pathlib.Path("dump").iterdir()]
    assert pathlib.Path("dump/e.bin").stat().st_size <= lost < sum(sizes)
    kept = set(texts("c"))
    by_file = [{normal(text) for text in part} for part in some_damaged]
    assert by_file[0] <= kept and "the last river sings." in kept and not (by_file[4] - by_file[0]) & kept
    for part in by_file[1:4]:
        assert 0.4 * len(part) < len(part & kept) < len(part)
    run("fresh", ["text:dump/*"], SKIP, **RANGES)
    assert files("fresh") == files("c")
    run("whole", ["text:dump/[ab]*"], SKIP, block_bytes=3000)
    assert by_file[1] & set(texts("whole")) < by_file[1] & kept, "in ranges, only the rest of one is lost"
    assert main(["inspect", "c"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "damaged file 4" in output and "dump/d.gz: truncated" in output


def test_every_kind_of_file_can_be_damaged(tmp_path, monkeypatch):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    text = "\n\n".join(make_documents(3, 100))
    pathlib.Path("good.txt").write_text(text)
    parquet.write_table(pyarrow.table({"text": text.split("\n\n")}), "a.parquet", row_group_size=50)
    data = pathlib.Path("a.parquet").read_bytes()
    pathlib.Path("b.parquet").write_bytes(data[: len(data) // 2])
    pathlib.Path("c.parquet").write_bytes(data[:100] + bytes(300) + data[400:])
    pathlib.Path("book.gz").write_bytes(gzip.compress(text.encode())[:-200])
    pathlib.Path("page.md.bz2").write_bytes(b"no compressed data")
    pathlib.Path("dump.xml.gz").write_bytes(b"")
    specs = {
        "parquet:[abc].parquet@text": 2,
        "text-files:book.gz": 1,
        "markdown:page.md.bz2": 1,
        "mediawiki:dump.xml.gz": 1,
    }
    for spec, damaged in specs.items():
        with pytest.raises(UserError):
            run("strict", [spec, "text:good.txt"])
        name = spec.partition(":")[0]
        if spec.startswith(("markdown", "mediawiki")):
            with pytest.raises(UserError, match=r"nothing could be used, everything was skipped \(1 x damaged_file\)"):
                run(name, [spec, "text:good.txt"], SKIP)
        else:
            manifest = run(name, [spec, "text:good.txt"], SKIP)
            assert len(manifest["sources"][0]["damaged"]) == damaged and manifest["sources"][0]["documents"] > 0
