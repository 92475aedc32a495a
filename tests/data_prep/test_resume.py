"""Killed with SIGKILL at any moment and started again, a build makes the same bytes."""

import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from bert_jax.errors import UserError
from data_prep.options import NearDuplicates, Options
from data_prep.verify import verify
from tests.building import files, make_documents, run

ROOT = pathlib.Path(__file__).parents[2]
SPECS = ["text:text.txt", "text-files:books/*.txt"]

# Runs the build of tests/building.py; dies before or after the N-th file of a kind is put in its place.
DRIVER = """
import os, pathlib, signal, sys
sys.path.insert(0, {root!r})
from data_prep import scratch, writer
from data_prep.engines.local import LocalEngine
from tests.building import run
from tests.data_prep.test_resume import OPTIONS, SPECS

kind, number, when, workers = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
seen = 0
def dying(function, name):
    def wrapped(path, *arguments):
        global seen
        hit = pathlib.Path(os.fspath(path)).name.startswith(name)
        seen += hit
        if hit and seen == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(path, *arguments)
        if hit and seen == number and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped
scratch.write_whole = dying(scratch.write_whole, kind)
if kind == "manifest":
    writer._write_tfds_metadata = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
run("c", SPECS, OPTIONS, LocalEngine(workers))
"""

OPTIONS = Options(
    validation_fraction=0.2,
    max_shard_bytes=4000,
    drop_duplicate_paragraphs=20,
    near_duplicates=NearDuplicates(),
)


@pytest.fixture
def expected(tmp_path, monkeypatch):
    """Every file of the corpus that no one disturbed."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("text.txt").write_text("\n\n".join(make_documents(0, 200)))
    pathlib.Path("books").mkdir()
    for index, document in enumerate(make_documents(1, 20, paragraphs=30)):
        pathlib.Path(f"books/{index:03d}.txt").write_text(document)
    run("undisturbed", SPECS, OPTIONS)
    return files("undisturbed")


def start(kind="none", number=0, when="before", workers=1):
    driver = DRIVER.format(root=str(ROOT))
    command = [sys.executable, "-c", driver, kind, str(number), when, str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kind", "number", "when"),
    [
        ("unit", 1, "before"),
        ("unit", 12, "after"),
        ("input", 2, "before"),
        ("plan-train", 2, "after"),
        ("plans", 1, "before"),
        ("shard-train", 2, "before"),
        ("shard-validation", 1, "after"),
        ("manifest", 1, "before"),
    ],
)
def test_killed_at_a_named_point(expected, kind, number, when):
    with start(kind, number, when) as process:
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert pathlib.Path("c/corpus.incomplete").exists() and not pathlib.Path("c/corpus.json").exists()
    with pytest.raises(UserError, match="not a finished corpus"):
        verify("c")
    run("c", SPECS, OPTIONS)
    assert files("c") == expected


@pytest.mark.slow
def test_killed_again_and_again_with_workers(expected):
    """Random moments, until one run gets through."""
    rng = random.Random(0)
    kills = 0
    while kills < 5:
        with start(workers=2) as process:
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.2, 4.0))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        kills += 1
        if process.returncode == 0:
            break
    if not pathlib.Path("c/corpus.json").exists():
        run("c", SPECS, OPTIONS)
    assert files("c") == expected
