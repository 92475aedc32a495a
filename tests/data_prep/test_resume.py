"""Killed with SIGKILL at any time and started again, a build writes the same bytes."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions, NearDuplicateOptions
from data_prep.builder import scratch, writer
from data_prep.builder.prepare import BlockPreparer
from data_prep.verify import verify_corpus
from tests.building import files, interrupted, make_documents, run

ROOT = pathlib.Path(__file__).parents[2]
SPECS = ["text:text.txt", "text-files:books/*.txt"]

# Runs the build of tests/building.py; is killed before the N-th file of a kind is written.
DRIVER = """
import os, signal, sys
sys.path.insert(0, {root!r})
from data_prep.builder import scratch, writer
from data_prep.builder.engines.local import LocalEngine
from tests.building import run
from tests.data_prep.test_resume import OPTIONS, SPECS

kind, number, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
write_atomic, seen = scratch.write_atomic, []
def write_or_die(path, content):
    seen.append(path.name.startswith(kind))
    if seen[-1] and sum(seen) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    write_atomic(path, content)
scratch.write_atomic = write_or_die
print("ready", flush=True)
run("c", SPECS, OPTIONS, LocalEngine(workers))
"""

OPTIONS = BuildOptions(
    validation_fraction=0.2, max_shard_bytes=4000, drop_duplicate_paragraphs=20, near_duplicates=NearDuplicateOptions()
)


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """Every file of the corpus of an uninterrupted build."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("\n\n".join(make_documents(0, 200)))
    pathlib.Path("books").mkdir()
    for index, document in enumerate(make_documents(1, 20, paragraphs=30)):
        pathlib.Path(f"books/{index:03d}.txt").write_text(document)
    run("undisturbed", SPECS, OPTIONS)
    return files("undisturbed")


def start(kind="none", number=0, workers=1):
    driver = DRIVER.format(root=str(ROOT))
    command = [sys.executable, "-c", driver, kind, str(number), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_in_each_phase(expected):
    """What one start leaves in a phase is finished by the next, which is killed in a later phase."""
    for kind, number in (("unit", 12), ("rows", 2), ("shard-train", 2), ("corpus.json", 1)):
        with start(kind, number) as process:
            _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        assert pathlib.Path("c/corpus.incomplete").exists() and not pathlib.Path("c/corpus.json").exists()
        with pytest.raises(UserError, match="not a finished corpus"):
            verify_corpus("c")
    run("c", SPECS, OPTIONS)
    assert files("c") == expected


@pytest.mark.parametrize(
    "points",
    [
        [("unit", 1, False), ("rows", 3, True), ("shard-train", 2, False)],
        [("unit", 2, True), ("plan-train", 2, True), ("shard-validation", 1, True)],
        [("input", 1, False), ("plans", 1, False), ("corpus.json", 1, False)],
    ],
)
def test_interrupted_in_each_phase(text, points):
    """At the N-th file of a kind, before or after it is written."""
    options, write_atomic = dataclasses.replace(OPTIONS, max_shard_bytes=1500), scratch.write_atomic
    for kind, number, written in points:
        seen = []

        def interrupt(path, content, kind=kind, number=number, written=written, seen=seen):
            seen.append(path.name.startswith(kind))
            hit = seen[-1] and sum(seen) == number
            if written or not hit:
                write_atomic(path, content)
            if hit:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(scratch, "write_atomic", interrupt)
            run("c", SPECS[:1], options)
        assert not pathlib.Path("c/corpus.json").exists()
    run("c", SPECS[:1], options)
    run("fresh", SPECS[:1], options)
    assert files("c") == files("fresh")


@pytest.mark.slow
def test_killed_again_and_again_with_workers(expected):
    """At random times, until one run finishes."""
    rng = random.Random(0)
    for _ in range(2):
        with start(workers=2) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.2, 4.0))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        if process.returncode == 0:
            break
    if not pathlib.Path("c/corpus.json").exists():
        run("c", SPECS, OPTIONS)
    assert files("c") == expected


def test_scratch_files_of_a_killed_decision_are_removed(text):
    with interrupted("pipeline.decide"):
        run("c", SPECS[:1], OPTIONS)
    scratch_dir = pathlib.Path("c/corpus.incomplete")
    (scratch_dir / "columns-x/near-duplicates-y/step-0").mkdir(parents=True)
    for name in ("columns-x/near-duplicates-y/step-0/1.run", "rows-00000007.safetensors", "found-0000000003.pickle"):
        (scratch_dir / name).write_bytes(b"")
    with interrupted("pipeline.decide"):
        run("c", SPECS[:1], OPTIONS)
    assert {path.name.split("-")[0] for path in scratch_dir.iterdir()} == {"build.json", "input", "units"}


@contextlib.contextmanager
def prepared(monkeypatch):
    """Yields a list that gets the source of every block that is prepared."""
    sources, prepare = [], BlockPreparer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(BlockPreparer, "__call__", lambda self, task: sources.append(task.source) or prepare(self, task))
        yield sources


@pytest.mark.parametrize("scratch", [None, "elsewhere"])
def test_a_corrected_source_goes_on(text, monkeypatch, scratch):
    """A failed source leaves no files, and the prepared blocks of the other source are used."""
    pathlib.Path("data.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in text[:50]))
    with pytest.raises(UserError, match=r"did you mean 'text'"):
        run("c", ["jsonl:data.jsonl@txt"], scratch=scratch)
    assert not pathlib.Path("c").exists() and not list(pathlib.Path().glob("elsewhere/*"))
    with pytest.raises(UserError, match=r"did you mean 'text'"):
        run("c", ["text:text.txt", "jsonl:data.jsonl@txt"], scratch=scratch)
    with prepared(monkeypatch) as sources:
        run("c", ["text:text.txt", "jsonl:data.jsonl@text"], scratch=scratch)
    assert sources and set(sources) == {1}
    run("fresh", ["text:text.txt", "jsonl:data.jsonl@text"])
    assert files("c") == files("fresh")


def test_a_directory_of_the_user_stays(text):
    pathlib.Path("c").mkdir()
    pathlib.Path("cut.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"cut.txt.gz"):
        run("c", ["text:cut.txt.gz"])
    assert list(pathlib.Path("c").iterdir()) == []


def test_other_arguments(text, monkeypatch, capsys):
    """Work that does not depend on them is used, and the work of a first build is kept until a second is finished."""
    specs, first = ["text:text.txt"], BuildOptions(validation_fraction=0.1, max_shard_bytes=3000)
    again = BuildOptions(validation_fraction=0.3, min_characters=50)
    run("fresh", specs, again)
    for options in (first, dataclasses.replace(first, drop_repeated_lines=True)):
        with prepared(monkeypatch) as sources, interrupted("writer.finish_corpus"):
            run("c", specs, options)
        assert len(sources) > 3
    assert "note: c/corpus.incomplete also keeps the work of an unfinished build" in capsys.readouterr().err
    with prepared(monkeypatch) as sources:
        run("c", specs, again)
    assert sources == [] and files("c") == files("fresh")


def test_what_changed_is_prepared_again(text, monkeypatch):
    pathlib.Path("books").mkdir()
    for index, document in enumerate(make_documents(5, 30, paragraphs=20)):
        pathlib.Path(f"books/{index}.txt").write_text(document)
    specs = ["text:text.txt", "text-files:books/*.txt"]
    with interrupted("writer.finish_corpus"):
        run("c", specs)
    pathlib.Path("books/3.txt").write_text("Quite another mountain.")
    pathlib.Path("books/99.txt").write_text("A new stone falls.")
    with prepared(monkeypatch) as sources:
        run("c", specs)
    assert sources and set(sources) == {1}
    run("fresh", specs)
    assert files("c") == files("fresh")


@pytest.mark.parametrize("kind", ["rows", "shard-train"])
def test_a_file_that_changed_after_it_was_prepared_is_read_again(text, monkeypatch, kind):
    """Also if its size is the same. If only its time has changed, it is read, but nothing is prepared again."""
    source, write_atomic = pathlib.Path("text.txt"), scratch.write_atomic

    def interrupt(path, content):
        if path.name.startswith(kind):
            raise KeyboardInterrupt
        write_atomic(path, content)

    def interrupted():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), prepared(patch) as sources:
            patch.setattr(scratch, "write_atomic", interrupt)
            run("c", SPECS[:1], OPTIONS)
        return len(sources)

    assert interrupted() > 3
    os.utime(source, (1, 1))
    assert interrupted() == 0
    source.write_text(source.read_text().replace("river", "stone").replace("quick", "light"))
    with prepared(monkeypatch) as sources:
        run("c", SPECS[:1], OPTIONS)
    assert len(sources) > 3
    run("fresh", SPECS[:1], OPTIONS)
    assert files("c") == files("fresh")


@pytest.mark.parametrize("change", [lambda path: path.write_text("Another."), pathlib.Path.unlink])
def test_a_file_that_changes_while_it_is_read(text, monkeypatch, change):
    def prepare_then_change(self, task):
        metadata = prepare(self, task)
        if pathlib.Path("text.txt").exists():
            change(pathlib.Path("text.txt"))
        return metadata

    prepare = BlockPreparer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(BlockPreparer, "__call__", prepare_then_change)
        with pytest.raises(UserError, match=r"text\.txt: was changed or removed while it was read"):
            run("c", SPECS[:1], block_bytes=500)
    assert not pathlib.Path("c/corpus.json").exists()


def test_the_work_of_an_older_version_is_not_used(text, monkeypatch):
    with monkeypatch.context() as patch, interrupted("pipeline.decide"):
        patch.setattr(scratch, "FORMAT_VERSION", 1)
        run("c", SPECS[:1])
    (marker,) = pathlib.Path("c/corpus.incomplete").glob("input-*.json")
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"blocks": 3}))
    run("c", SPECS[:1])
    run("fresh", SPECS[:1])
    assert files("c") == files("fresh")


@pytest.mark.parametrize(
    ("place", "others"),
    [(None, [("c", None), ("c", "b")]), ("a", [("c", "b"), ("other", "a"), ("mine", "a")])],
)
def test_one_build_at_a_time(text, monkeypatch, place, others):
    """In the directory of a corpus, for any --scratch, and in a scratch directory. A refused build leaves nothing."""
    finish, refused = writer.finish_corpus, []
    pathlib.Path("mine").mkdir()

    def refuse_others(*arguments):
        for out, other in others:
            with pytest.raises(UserError, match=r"is in use by process \d+ on .*: wait until it ends"):
                run(out, SPECS[:1], scratch=other)
            refused.append(out)
        return finish(*arguments)

    monkeypatch.setattr(writer, "finish_corpus", refuse_others)
    run("c", SPECS[:1], scratch=place)
    verify_corpus("c")
    assert len(refused) == len(others) and not pathlib.Path("other").exists()
    assert [*pathlib.Path("mine").iterdir(), *pathlib.Path().glob("b/*")] == []


def test_a_directory_with_characters_of_globs(text):
    with interrupted("writer.finish_corpus"):
        run("[c]", SPECS[:1], BuildOptions(validation_fraction=0.3))
    run("[c]", SPECS[:1], OPTIONS)
    run("fresh", SPECS[:1], OPTIONS)
    verify_corpus("[c]")
    assert files("[c]") == files("fresh")
