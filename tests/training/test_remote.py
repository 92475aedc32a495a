"""Runs in object stores: what a run on disk does, without directories, renaming or files that grow."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from bert_jax.cli import main as cli
from bert_jax.config import CheckpointConfig, LogConfig
from bert_jax.config.presets import load_config
from bert_jax.convert.formats.tensor_files import SAFETENSORS as WEIGHTS
from bert_jax.data.corpus import Corpus
from bert_jax.data.integrity import check_corpus_files
from bert_jax.errors import UserError
from bert_jax.inference import loaded_model
from bert_jax.storage import lock
from bert_jax.storage.files import copy_tree
from bert_jax.training.run_directory import checkpoint
from bert_jax.training.run_directory.commit import COMMIT_MARKER
from bert_jax.training.run_directory.metrics import read_metrics
from tests.runs import assert_same_run, committed
from tests.stores import MemoryStore, memory_store, tree, use_s3

KILLED = Path(__file__).parent / "killed_config.py"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(tiny_corpus):
    """With `tiny_corpus` in it, under "corpus"."""
    bucket = memory_store()
    copy_tree(tiny_corpus, bucket / "corpus")
    MemoryStore.written.clear()
    return bucket


@pytest.fixture(scope="module")
def config(tiny_config):
    return dataclasses.replace(tiny_config, log=LogConfig(every=2), checkpoint=CheckpointConfig(every=3, keep=2))


@pytest.fixture(scope="module")
def run(config, train):
    """Trains on a corpus in a directory."""
    return lambda corpus, workdir, **arguments: train(config, workdir, corpus=corpus, **arguments)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory, run, tiny_corpus):
    """The same run as in the store, uninterrupted, on disk."""
    workdir = tmp_path_factory.mktemp("disk") / "run"
    run(tiny_corpus, workdir)
    return workdir


def files_of(workdir) -> set[str]:
    """Names of a run's files, but for those that are drawn."""
    return {name for name in tree(workdir) if "/d/" not in name and "events" not in name}


class Stored(NamedTuple):
    """A finished run in a bucket."""

    objects: dict[str, bytes]
    moments: list[tuple[str, dict[str, bytes]]]
    """Each name that was written, and the objects that were there then."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory, run, tiny_corpus) -> Stored:
    """A run of "run" on "corpus"."""
    bucket, put, moments = memory_store(), MemoryStore.put_whole, []
    copy_tree(tiny_corpus, bucket / "corpus")

    def remember(self, path, content):
        with self.lock:
            put(self, path, content)
            moments.append((path, dict(self.objects)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "put_whole", remember)
        patch.setattr(lock, "SETTLE_SECONDS", 0.0)
        patch.setenv("BERT_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert run(bucket / "corpus", bucket / "run").cursor.step == 8
    return Stored(dict(MemoryStore.objects), moments)


@pytest.mark.slow
def test_a_run_in_a_store_is_a_run_on_disk(stored, bucket, config, on_disk):
    """The commit is the last write of a checkpoint; the lines that the checkpoint covers are there before it."""
    MemoryStore.objects = dict(stored.objects)
    assert_same_run(bucket / "run", on_disk, config)
    assert files_of(bucket / "run") == files_of(on_disk)
    assert (bucket / "run" / "ledger.jsonl").read_bytes() == b""
    (events,) = (bucket / "run" / "tensorboard").iterdir()
    assert events.stat().length > 1000
    written = [name for name, _ in stored.moments]
    commits = [at for at, name in enumerate(written) if name.endswith(COMMIT_MARKER)]
    assert [written[at].split("/")[-2] for at in commits] == ["00000003", "00000006", "00000008"]
    for at in commits:
        own = written[at].removesuffix(COMMIT_MARKER)
        assert max(i for i, name in enumerate(written) if name.startswith(own)) == at
        first = min(i for i, name in enumerate(written) if name.startswith(own))
        assert "bucket/run/metrics.jsonl" in written[:first]
    assert written.index("bucket/run/config.json") > written.index("bucket/run/ledger.jsonl")


@pytest.mark.slow
def test_killed_after_any_write(stored, bucket, run, config, on_disk):
    """The store as it was after some of the writes: the same command goes on from there, and ends the same."""
    names = [path.removeprefix("bucket/run/") for path, _ in stored.moments]
    commits = [i for i, name in enumerate(names) if name.endswith(COMMIT_MARKER)]
    chosen = {
        "claimed by half": (names.index("ledger.jsonl"), []),
        "no marker yet": (commits[1] - 1, [3]),
        "committed": (commits[1], [6, 3]),
    }
    for name, (at, saves) in chosen.items():
        MemoryStore.objects = dict(stored.moments[at][1])
        assert committed(bucket / "run") == saves, name
        if saves:
            covered = [line["step"] for line in read_metrics(bucket / "run" / "metrics.jsonl")]
            assert max(covered) >= saves[0] - 1, f"{name}: a line of a committed checkpoint is lost"
        run(bucket / "corpus", bucket / "run")
        assert_same_run(bucket / "run", on_disk, config)
        assert files_of(bucket / "run") == files_of(on_disk), name


@pytest.mark.slow
def test_a_damaged_object_is_noticed(stored, bucket, run, config, on_disk, capfd):
    MemoryStore.objects = dict(stored.objects)
    name = max((n for n in MemoryStore.objects if "/00000008/" in n), key=lambda n: len(MemoryStore.objects[n]))
    raw = bytearray(MemoryStore.objects[name])
    raw[len(raw) // 2] ^= 1
    MemoryStore.objects[name] = bytes(raw)
    run(bucket / "corpus", bucket / "run")
    said = capfd.readouterr().err
    assert "az://bucket/run/checkpoints/00000008 is damaged" in said and "continuing from step 6" in said
    assert_same_run(bucket / "run", on_disk, config)


@pytest.mark.slow
def test_nothing_is_left_on_this_host(bucket, run, tmp_path, monkeypatch):
    """But the cached corpus; also when a save fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run(bucket / "corpus", bucket / "run", profile=(2, 4))
    assert any(name.startswith("profile/") for name in tree(bucket / "run"))
    put = MemoryStore.put_whole

    def fail(self, path, content):
        if "00000008" in path:
            raise OSError("lost")
        put(self, path, content)

    copy_tree(bucket / "corpus", tmp_path / "corpus")
    monkeypatch.setattr(MemoryStore, "put_whole", fail)
    with pytest.raises(OSError, match="lost"):
        run(bucket / "corpus", bucket / "other")
    left = [path.name for path in (tmp_path / "temporary").iterdir() if path.name.startswith("bert_jax-")]
    assert not left


def test_shards_are_cached_and_checked(bucket, cache):
    """A second opening reads the shard from this host; what is damaged in the store is refused."""
    corpus = Corpus.open(bucket / "corpus")
    check_corpus_files([corpus], "checksums")
    names = {path.name for path in cache.iterdir() if not path.suffix}
    files = json.loads((bucket / "corpus" / "corpus.json").read_text())["files"]
    assert names == {facts["sha256"] for facts in files.values()}
    (shard,) = (bucket / "corpus").glob("corpus-train.array_record-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    assert len(Corpus.open(bucket / "corpus").read_sentences(0, 50)) > 50, "it is read from the cache"
    for path in cache.iterdir():
        path.unlink()
    for level in ("checksums", "counts"):
        with pytest.raises(UserError, match="damaged, its SHA-256 is not the recorded one"):
            check_corpus_files([Corpus.open(bucket / "corpus")], level)


@pytest.mark.slow
def test_commands(bucket, tiny_run, tmp_path, capfd):
    """evaluate, fill-mask and convert, from a store and to one, say what they say of the same run on disk."""
    copy_tree(tiny_run, bucket / "run")

    def said(*words: str) -> str:
        assert cli.main(list(words)) == 0
        return capfd.readouterr().out

    for words in (["evaluate", "{}/run", "--corpus", "{}/corpus", "--json"], ["fill-mask", "{}/run", "the [MASK]"]):
        corpus, run = str(bucket / "corpus"), str(bucket / "run")
        remote = said(*(word.format(bucket) for word in words))
        places = {run: str(tiny_run), corpus: corpus}
        assert remote == said(*(places.get(word.format(bucket), word) for word in words)) != ""
    said("convert", f"{bucket}/run", f"{bucket}/export")
    assert MemoryStore.written[-1] == f"bucket/export/{WEIGHTS}"
    said("convert", f"{bucket}/run", str(tmp_path / "export"))
    here, there = tree(tmp_path / "export"), tree(bucket / "export")
    assert here.keys() == there.keys() and here[WEIGHTS] == there[WEIGHTS]
    text = "the [MASK] runs"
    assert loaded_model.load(bucket / "export").fill_mask(text) == loaded_model.load(tiny_run).fill_mask(text)
    assert cli.main(["convert", f"{bucket}/run", f"{bucket}/export"]) == 2
    assert "exists already" in capfd.readouterr().err


def test_several_processes_are_refused_where_orbax_cannot_write(bucket, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"several processes write one checkpoint together.*use gs:// or a shared"):
        checkpoint.check_checkpoint_storage(bucket / "run", 2)
    checkpoint.check_checkpoint_storage(Path("run"), 2)


@pytest.fixture
def s3(s3_server, tiny_corpus, monkeypatch, request):
    """A bucket of its own with `tiny_corpus` in it, and what the server is asked."""
    address, requests = s3_server
    bucket = use_s3(monkeypatch, address, f"bucket-{zlib.crc32(request.node.name.encode())}")
    copy_tree(tiny_corpus, bucket / "corpus")
    requests.clear()
    return bucket, requests


@pytest.mark.slow
def test_killed_and_continued_on_s3(s3, train, tmp_path, capfd):
    """The run of test_resume.py, killed before a commit."""
    bucket, requests = s3
    words = ["pretrain", str(KILLED), "--corpus", f"{bucket}/corpus", "--workdir", f"{bucket}/run"]
    worker = [sys.executable, str(KILLED.with_name("killed_worker.py")), "commit", "2"]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiled like the programs of this process
    killed = subprocess.run([*worker, *words], capture_output=True, text=True, env=quick)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert committed(bucket / "run") == [10]
    config = load_config(str(KILLED))
    train(config, bucket / "run", corpus=bucket / "corpus")
    assert "continuing from step 10" in capfd.readouterr().err
    train(config, tmp_path / "run")
    assert_same_run(bucket / "run", tmp_path / "run", config)
    assert any(request.method == "PUT" for request in requests)
    assert not [request for request in requests if request.copies], "something was renamed"
    assert not [request for request in requests if (request.method, request.path) == ("PUT", f"/{bucket.name}")]
