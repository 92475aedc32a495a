"""Corpora in a store: the batches of a local disk, with a small cache and over a link that is slow and fails."""

import dataclasses
import hashlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import numpy as np
import pytest
from array_record.python import array_record_module

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.data import epoch_plan, shards
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.data.integrity import check_corpus_files
from bert_jax.data.mixture import CorpusWeight, check_cache_limit, open_corpora
from bert_jax.data.shards import ShardParts
from bert_jax.errors import TRY_AGAIN, OutageError, UserError
from bert_jax.storage import ranges
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.files import copy_tree
from bert_jax.storage.ranges import ByteRange, read_ranges
from tests.corpus_writer import write_sample
from tests.data.test_batches import assert_same_batches
from tests.faulty_link import FAULTS, faulty_link
from tests.pages import SMALL_RUN
from tests.storage.test_cache import release
from tests.stores import MemoryStore, memory_store, use_s3


@pytest.fixture(autouse=True)
def read_in_parts(monkeypatch, tmp_path):
    """Shards are read in parts whatever their size, and nothing waits for long."""
    monkeypatch.setattr(shards, "COPIED_BYTES", 0)
    monkeypatch.setattr(ranges, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    yield
    release()


@pytest.fixture(scope="module")
def small_windows():
    """Several windows per epoch of a small corpus."""
    patch = pytest.MonkeyPatch()
    patch.setattr(epoch_plan, "CHUNK_TOKENS", 100)
    patch.setattr(epoch_plan, "WINDOW_CHUNKS", 6)
    yield
    patch.undo()


@pytest.fixture
def bucket(tiny_corpus):
    bucket = memory_store()
    copy_tree(tiny_corpus, bucket / "corpus")
    return bucket


@pytest.fixture
def link(s3_server, tiny_corpus, second_corpus, monkeypatch, request):
    """A bucket with two corpora after a link without faults, and the link."""
    bucket = use_s3(monkeypatch, s3_server[0], f"link-{zlib.crc32(request.node.name.encode())}")
    copy_tree(tiny_corpus, bucket / "corpus")
    copy_tree(second_corpus, bucket / "second")
    with faulty_link(s3_server[0]) as (address, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        yield bucket, faults
        s3fs.S3FileSystem.clear_instance_cache()


def shard_of(corpus: Corpus) -> shards.StoredFile:
    return corpus._records._shards[0]


def test_parts_of_a_shard_are_its_records(tmp_path):
    """Of an index that is longer than the tail, of records that span blocks, and of an empty one."""
    rng = np.random.default_rng(0)
    bucket, records = memory_store(), [b"", *(rng.bytes(n) for n in rng.integers(1, 8192, 400)), rng.bytes(200_000)]
    writer = array_record_module.ArrayRecordWriter(str(tmp_path / "shard"), "group_size:1")
    for one in records:
        writer.write(one)
    writer.close()
    (bucket / "shard").write_bytes((tmp_path / "shard").read_bytes())
    size = (tmp_path / "shard").stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "TAIL_BYTES", 1 << 17)
        parts = ShardParts(bucket / "shard", size)
    assert parts.num_records() == len(records)
    for _ in range(50):
        chosen = sorted(rng.choice(len(records), rng.integers(1, 20), replace=False).tolist())
        assert parts.read(chosen) == [records[index] for index in chosen]
    assert parts.read(range(len(records))) == records
    everything = parts.ranges(range(len(records)))
    assert len(everything) == 1 and len(parts.ranges([0, len(records) - 1])) == 2
    bytes_of_two = sum(one.end - one.start for one in parts.ranges([5, 6]))
    assert bytes_of_two < 20_000 < parts.bytes_read
    start = parts.ranges([7])[0].start
    MemoryStore.objects["bucket/shard"] = flipped(MemoryStore.objects["bucket/shard"], start + 60)
    with pytest.raises((RuntimeError, ValueError), match="hash mismatch"):
        parts.read([7])
    assert parts.read([6]) == [records[6]]
    parts.close()


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MAGIC", 1, "its postscript is damaged"),
        ("LAYOUT_VERSION", 2, "its layout has version 1 instead of 2"),
        ("FIRST_CHUNK", 65, "its index has gaps"),
    ],
)
def test_a_layout_that_is_not_the_stated_one(bucket, name, value, words, monkeypatch):
    corpus = Corpus.open(bucket / "corpus")
    monkeypatch.setattr(shards, name, value)
    with pytest.raises(UserError, match=f"cannot be read as ArrayRecord .*{words}"):
        shards.open_shard(shard_of(corpus), corpus.cache)


@pytest.mark.parametrize("damage", ["cut", "index", "postscript", "groups", "gone"])
def test_a_shard_without_a_usable_index(bucket, tmp_path, damage):
    """One line with its name."""
    corpus = Corpus.open(bucket / "corpus")
    shard = shard_of(corpus)
    content = shard.path.read_bytes()
    if damage == "groups":
        writer = array_record_module.ArrayRecordWriter(str(tmp_path / "shard"), "group_size:2")
        for _ in range(shard.records):
            writer.write(b"text")
        writer.close()
        content = (tmp_path / "shard").read_bytes()
        shard = shard._replace(size=len(content))
    if damage == "gone":
        shard.path.unlink()
    else:
        index = int(ShardParts(shard.path, shard.size)._offsets[-1]) + 50
        at = {"index": index, "postscript": shard.size - (1 << 16) + 70}.get(damage)
        content = content[: shard.size // 2] if damage == "cut" else flipped(content, at) if at else content
        shard.path.write_bytes(content)
    other = {"gone": "this shard is missing", "cut": "cannot be reached"}
    expected = other.get(damage, "cannot be read as ArrayRecord")
    with pytest.raises(UserError, match=f"^az://bucket/corpus/{shard.path.name}.*{expected}"):
        shards.open_shard(shard, corpus.cache)


def batches_of(corpora, special_ids, config, start=Cursor()):  # noqa: B008 (frozen)
    shares = [1 / len(corpora)] * len(corpora)
    return list(TrainingStream(corpora, shares, config, special_ids).batches(start))


def test_the_batches_of_a_disk(bucket, tiny_corpus, special_ids, two_phases, small_windows):
    local = batches_of([Corpus.open(tiny_corpus)], special_ids, two_phases)
    corpus = Corpus.open(bucket / "corpus")
    assert isinstance(corpus._records._reader(0), ShardParts), "otherwise nothing is compared"
    remote = batches_of([corpus], special_ids, two_phases)
    assert_same_batches(local, remote)
    middle = local[len(local) // 2]
    resumed = batches_of([Corpus.open(bucket / "corpus")], special_ids, two_phases, middle.next_cursor)
    assert_same_batches(local[len(local) // 2 + 1 :], resumed)


def test_parts_without_files_in_memory(bucket, tiny_corpus, tmp_path, monkeypatch):
    """As on macOS, which has neither `memfd_create` nor /proc: a temporary file without a name, emptied after use."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(mmap, "MADV_REMOVE")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    corpus, local = Corpus.open(bucket / "corpus"), Corpus.open(tiny_corpus)
    parts = corpus._records._reader(0)
    assert isinstance(parts, ShardParts)
    everything = range(len(local.record_offsets) - 1)
    for one, two in zip(corpus.records(everything), local.records(everything), strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
    assert os.fstat(parts._file).st_blocks == 0 and not [*(tmp_path / "temporary").iterdir()]


def test_a_shard_that_was_read_in_parts_often_is_copied(bucket, tiny_corpus, tmp_path):
    corpus, local = Corpus.open(bucket / "corpus"), Corpus.open(tiny_corpus)
    shard, everything = shard_of(corpus), range(len(local.record_offsets) - 1)
    end = time.monotonic() + 60
    while isinstance(corpus._records._reader(0), ShardParts) and time.monotonic() < end:
        records = corpus.records(everything)
        time.sleep(0.01)
    assert (tmp_path / "cache" / shard.sha256).read_bytes() == shard.path.read_bytes()
    shard.path.unlink()
    for one, two in zip(corpus.records(everything), records, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def test_a_shard_is_copied_once(bucket):
    """A thread that still reads its parts may ask for it again when the copy has taken their place."""
    records = Corpus.open(bucket / "corpus")._records
    parts = records._reader(0)
    records._copy(0, parts)
    copying = records._copying
    copying.join()
    assert not isinstance(records._reader(0), ShardParts)
    records._copy(0, parts)
    assert records._copying is copying


@pytest.mark.parametrize("name", ["../mine", "{outside}/mine"])
def test_a_checksum_is_no_path_out_of_the_cache(bucket, tmp_path, name):
    """`doctor` once removed a user's file that corpus.json named this way."""
    mine, manifest = tmp_path / "mine.lock", json.loads((bucket / "corpus" / "corpus.json").read_text())
    mine.write_text("mine")
    manifest["files"]["train.token_counts.npy"]["sha256"] = name.format(outside=tmp_path)
    (bucket / "corpus" / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"sha256 is .*mine': it must be a string that is a SHA-256"):
        Corpus.open(bucket / "corpus")
    assert mine.read_text() == "mine"


def test_without_room_a_shard_is_never_copied(bucket, tmp_path):
    manifest = json.loads((bucket / "corpus" / "corpus.json").read_text())
    arrays = sum(entry["bytes"] for name, entry in manifest["files"].items() if name.endswith(".npy"))
    corpus = Corpus.open(bucket / "corpus", cache=LocalCache(str(tmp_path / "cache"), (arrays + 1000) / 1e9))
    end = time.monotonic() + 60
    while corpus._records._copying is None and time.monotonic() < end:
        corpus.records(range(len(corpus.record_offsets) - 1))
    corpus._records._copying.join()
    assert isinstance(corpus._records._reader(0), ShardParts)
    check_corpus_files([corpus], "checksums")
    shards = {entry["sha256"] for name, entry in manifest["files"].items() if "array_record" in name}
    assert not shards & {path.name for path in (tmp_path / "cache").iterdir()}
    shard = shard_of(corpus)
    MemoryStore.objects[f"bucket/corpus/{shard.path.name}"] = flipped(shard.path.read_bytes(), 200)
    with pytest.raises(UserError, match="damaged, its SHA-256 is not the recorded one"):
        check_corpus_files([corpus], "checksums")


def test_a_limit_that_is_too_small(bucket, tmp_path, monkeypatch, capfd):
    """Before anything is copied; the value of the message is enough."""
    write_sample(tmp_path / "sample")
    copy_tree(tmp_path / "sample", bucket / "sample")
    both = [bucket / "corpus", bucket / "sample"]
    with pytest.raises(UserError, match=r"data.cache_limit_gb is 1e-06, but .*: set it to at least \S+$") as caught:
        check_cache_limit(both, LocalCache(None, 1e-6))
    enough = float(str(caught.value).rpartition(" ")[2])
    check_cache_limit(both, LocalCache(None, enough))
    with pytest.raises(UserError, match="set it to at least"):
        check_cache_limit(both, LocalCache(None, enough * 0.99))
    check_cache_limit([tmp_path / "sample"], LocalCache(None, 1e-9))
    monkeypatch.chdir(tmp_path)
    words = ["pretrain", "bert_tiny", "--corpus", str(bucket / "corpus"), "--workdir", "run"]
    assert cli.main([*words, "--data.cache-limit-gb", "1e-6"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: data.cache_limit_gb is 1e-06") and not (tmp_path / "cache").exists()


def test_corpora_share_the_limit(bucket, second_corpus, tiny_corpus, special_ids, two_phases, small_windows, tmp_path):
    copy_tree(second_corpus, bucket / "second")
    both = [CorpusWeight(bucket / "corpus"), CorpusWeight(bucket / "second")]
    with pytest.raises(UserError) as caught:
        check_cache_limit([part.directory for part in both], LocalCache(None, 1e-6))
    limit = float(str(caught.value).rpartition(" ")[2])
    _, corpora = open_corpora(both, cache=LocalCache(str(tmp_path / "cache"), limit))
    check_corpus_files(corpora, "checksums")
    sizes = [path.stat().st_size for path in (tmp_path / "cache").iterdir()]
    assert max(sizes) > 1000 and sum(sizes) <= limit * 1e9
    kinds = {isinstance(one._records._reader(0), ShardParts) for one in corpora}
    assert True in kinds, "the limit has no room for the shards of both"
    _, local = open_corpora([CorpusWeight(tiny_corpus), CorpusWeight(second_corpus)])
    assert_same_batches(*(batches_of(each, special_ids, two_phases) for each in (local, corpora)))


def test_the_next_window_is_read_before_it_is_needed(bucket, special_ids, two_phases, small_windows, monkeypatch):
    """No record is read by the thread that waits for the second window's batches."""
    corpus = Corpus.open(bucket / "corpus")
    stream = TrainingStream([corpus], [1.0], config_lib.replace(two_phases, data={"examples_per_row": 1}), special_ids)
    read_by, read = [], corpus._records.read

    def watched(indices):
        if len(indices):
            read_by.append(threading.current_thread())
        return read(indices)

    monkeypatch.setattr(corpus._records, "read", watched)
    cursor = stream.normalize_cursor(Cursor())
    while cursor.positions[0].window == 0:
        assert cursor.positions[0].epoch == 0, "the corpus has one window"
        stream.rows_at(cursor)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and "_load_ahead" in thread.name:
                thread.join()
        cursor = stream.next_cursor(cursor)
    assert any(thread is not threading.main_thread() for thread in read_by)
    before = read_by.count(threading.main_thread())
    window = cursor.positions[0].window
    while cursor.positions[0].window == window:
        stream.rows_at(cursor)
        cursor = stream.next_cursor(cursor)
    rows = len(stream.corpora[0].window(32, dataclasses.replace(cursor.positions[0], window=window, row=0)).window)
    assert rows > 0 and read_by.count(threading.main_thread()) - before <= 2, "only rows at the edges, if any"


@pytest.mark.slow
def test_reads_over_a_failing_link(link, tiny_corpus, second_corpus, special_ids, two_phases, small_windows):
    """Each kind of fault several times: the same batches, and every fault was there."""
    bucket, faults = link
    local = [Corpus.open(directory) for directory in (tiny_corpus, second_corpus)]
    faults.schedule = [fault for fault in FAULTS * 12 for fault in (fault, None)]
    remote = [Corpus.open(bucket / name) for name in ("corpus", "second")]
    check_corpus_files(remote[:1], "counts")
    assert_same_batches(*(batches_of(each, special_ids, two_phases) for each in (local, remote)))
    assert set(faults.done) == set(FAULTS), faults.done


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ([OSError("reset"), b"whole"], 2),
        ([b"who", ConnectionError("refused"), b"whole"], 3),
        ([b"who", b"who", b"who"], 3),
        ([FileNotFoundError("x")], 1),
        ([PermissionError("x")], 1),
    ],
)
def test_a_range_is_tried_again(bucket, monkeypatch, answers, tries):
    """Also one of which only a part came; the other ranges are not read again."""
    left, read = list(answers), []

    def answer(self, path, start=None, end=None, **_):
        read.append(path)
        if not path.endswith("bad"):
            return b"intact"
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(MemoryStore, "cat_file", answer)
    ranges = [ByteRange(bucket / "good", 0, 6), ByteRange(bucket / "bad", 0, 5)]
    if answers[-1] == b"whole":
        assert read_ranges(ranges) == [b"intact", b"whole"]
    else:
        expected = OutageError if tries > 1 else type(answers[-1])
        with pytest.raises(expected, match=r"az://bucket/bad cannot be reached|x"):
            read_ranges(ranges)
    assert len(read) == tries + 1 and not left


def test_tries_are_bounded(link, monkeypatch):
    """A fault that does not end is an outage, named with its object."""
    bucket, faults = link
    monkeypatch.setattr(ranges, "ATTEMPTS", 2)
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    content = (bucket / "corpus" / "tokenizer.json").read_bytes()
    part = ByteRange(bucket / "corpus" / "tokenizer.json", 10, 60)
    assert read_ranges([part]) == [content[10:60]]
    for faults.always in ("reset", "503", "truncate"):
        with pytest.raises(OutageError, match=r"^s3://.*tokenizer.json cannot be reached \(") as caught:
            read_ranges([part])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    faults.always = None
    with pytest.raises(FileNotFoundError):
        read_ranges([ByteRange(bucket / "corpus" / "nothing", 0, 5)])


@pytest.mark.slow
def test_a_run_over_a_failing_link(link, tmp_path, monkeypatch):
    """Truncated and refused answers: the run ends. A store that goes away: one line and exit code 75."""
    bucket, faults = link
    words = ["pretrain", "bert_tiny", "--corpus", str(bucket / "corpus"), *SMALL_RUN.split()]
    words += ["--data.verify", "counts", "--data.cache-dir", str(tmp_path / "ssd")]

    def train(workdir: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "bert_jax", *words, "--workdir", str(tmp_path / workdir)]
        return subprocess.run(command, capture_output=True, text=True)

    faults.schedule = [fault for fault in FAULTS * 12 for fault in (fault, None)]
    done = train("good")
    assert done.returncode == 0, done.stderr[-3000:]
    assert faults.done and (tmp_path / "ssd").is_dir() and not (tmp_path / "cache").exists()
    faults.schedule, faults.always = [], "down"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    failed = train("bad")
    assert failed.returncode == TRY_AGAIN, failed.stderr[-3000:]
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert "cannot be reached" in line


def test_equal_content_is_one_copy(bucket, tmp_path):
    """Copies are named by their content."""
    corpus = Corpus.open(bucket / "corpus")
    for path in (tmp_path / "cache").iterdir():
        if not path.suffix:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    copy_tree(bucket / "corpus", bucket / "again")
    before = {path.name for path in (tmp_path / "cache").iterdir()}
    assert Corpus.open(bucket / "again").identity == corpus.identity
    assert {path.name for path in (tmp_path / "cache").iterdir()} == before
