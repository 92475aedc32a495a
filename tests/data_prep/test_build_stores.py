"""Builds in object stores: one at a time, few requests, the bytes of a disk whether or not they are killed."""

import collections
import dataclasses
import gzip
import json
import pathlib
import re
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from etils import epath

from bert_jax.data.manifest import INCOMPLETE
from bert_jax.errors import UserError
from bert_jax.storage import lock
from bert_jax.storage.files import make_directory_if_local
from bert_jax.storage.listing import file_version, find_files
from bert_jax.storage.lock import LOCK_FILE, DirectoryLock
from data_prep.builder import resume, scratch, writer
from data_prep.builder.engines.local import LocalEngine
from data_prep.cli import main as cli
from data_prep.sources import InputRecord
from data_prep.sources import files as source_files
from tests.building import interrupted, make_tokenizer, parse, run
from tests.data_prep.test_sources_reading import read
from tests.stores import MemoryStore, memory_store, tree, use_s3

ROOT = pathlib.Path(__file__).parents[2]
SPECS = ["text:text.txt"]
SCRATCH = "c/" + INCOMPLETE
# Builds at the URL of its argument; waits before the N-th prepared block.
DRIVER = """
import sys
sys.path.insert(0, {root!r})
from bert_jax.errors import UserError
from data_prep.builder import scratch
from tests.building import run
url, number = sys.argv[1], int(sys.argv[2])
write_atomic, seen = scratch.write_atomic, []
def write(path, content):
    seen.append(path.name.startswith("unit"))
    if seen[-1] and sum(seen) == number:
        print("waits", flush=True)
        sys.stdin.readline()
    write_atomic(path, content)
scratch.write_atomic = write
try:
    run(url, ["text:text.txt"])
except UserError as error:
    print("error:", error, file=sys.stderr)
    raise SystemExit(2)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def prepared(text):
    """A bucket with a build at "c" that was stopped before its decisions, and the number of its blocks."""
    bucket = memory_store()
    with interrupted("pipeline.decide"):
        run(bucket / "c", SPECS, block_bytes=500)
    blocks = scratch.prepared_blocks(bucket / SCRATCH)
    assert len(blocks) > 50
    return bucket, len(blocks)


def corpus_files(place) -> dict[str, bytes]:
    return tree(epath.Path(place))


def test_prepared_blocks_are_listed(tmp_path):
    """On disk and in a store, also of headers that are longer than those of most blocks."""
    for place in (memory_store(), epath.Path(tmp_path)):
        names = [scratch.block_file_name("a1", part, block) for part in range(3) for block in (0, 5, 1023, 1024)]
        for number, name in enumerate(names):
            make_directory_if_local((place / name).parent)
            scratch.write_arrays(place / name, {"x": np.zeros(number)}, {"number": number, "long": "x" * number * 900})
        sizes = scratch.prepared_blocks(place)
        assert sizes == {name: (place / name).stat().length for name in names}
        assert {scratch.source_key(name) for name in sizes} == {"a1"}
        assert [scratch.read_metadata(place / name)["number"] for name in names] == list(range(len(names)))
        assert len({name.rpartition("/")[0] for name in names}) == 4, "parts, and runs of 1,024 blocks"
        (place / names[0]).write_bytes((10).to_bytes(8, "little") + b"not JSON..")
        with pytest.raises(UserError, match=f"{names[0]}: damaged, perhaps by a crash"):
            scratch.read_metadata(place / names[0])


@pytest.mark.parametrize("head_bytes", [1 << 14, 300])
def test_arrays_in_a_store_are_requested_without_the_others(tmp_path, monkeypatch, head_bytes):
    """Signatures without tokens; for files smaller and larger than the first request, and headers longer than it."""
    monkeypatch.setattr(scratch, "_HEAD_BYTES", head_bytes)
    rng, store, requests = np.random.default_rng(0), memory_store() / "scratch", []
    read_ranges = scratch.read_ranges

    def counted(ranges):
        contents = read_ranges(ranges)
        requests.append([*map(len, contents)])
        return contents

    monkeypatch.setattr(scratch, "read_ranges", counted)
    paths = []
    for index, documents in enumerate([0, 3, 2000, 1, 700]):
        arrays = {
            "part_signatures": rng.integers(0, 1 << 32, (documents, 128), np.uint32),
            "part_keys": rng.integers(0, 1 << 60, (documents, 4), np.uint64),
            "part_begins": np.ones(documents, np.uint8),
            "tokens": rng.integers(0, 1 << 15, 400 * documents).astype(np.uint16),
        }
        paths.append((tmp_path / f"{index}.safetensors", store / f"{index}.safetensors"))
        for path in map(epath.Path, paths[-1]):
            scratch.write_arrays(path, arrays, {"first": "x" * 20_000 * (index == 3)})
    local, remote = ([epath.Path(pair[i]) for pair in paths] for i in (0, 1))
    for names in (["part_signatures"], ["part_keys", "part_begins", "none"], ["tokens", "part_begins"], []):
        requests.clear()
        expected, found = ([*scratch.iterate_arrays(of, names)] for of in (local, remote))
        assert len(requests) == 3
        assert [*map(sorted, found)] == [*map(sorted, expected)] == [sorted({*names} - {"none"})] * 5
        for one, other in zip(found, expected, strict=True):
            for name in one:
                assert one[name].dtype == other[name].dtype
                np.testing.assert_array_equal(one[name], other[name])
        if names == ["part_signatures"]:
            assert sum(requests[2]) == 4 * 128 * (3 + 2000 + 1 + 700)
            assert sum(map(sum, requests[:2])) < 5 * (1 << 14) + 25_000
    assert scratch.read_arrays(remote[4], ["part_keys"])["part_keys"].shape == (700, 4)
    begin = local[2].read_bytes()[:8]
    headers = (
        json.dumps({"__metadata__": {}, "tokens": entry}).encode() for entry in ([], {}, {"data_offsets": [2, 1]})
    )
    damaged = [begin + b"{" * 3000, (1 << 62).to_bytes(8, "little") + b"{}"]
    damaged += [len(text).to_bytes(8, "little") + text for text in (b"[1]", b"[" * 10**5, *headers)]
    for content in damaged:
        remote[2].write_bytes(content)
        with pytest.raises(UserError, match=r"2\.safetensors: damaged"):
            scratch.read_arrays(remote[2], ["tokens"])


def test_the_bytes_of_a_disk_after_an_interruption(prepared):
    bucket, _ = prepared
    run("c", SPECS, block_bytes=500)
    run(bucket / "c", SPECS, block_bytes=500)
    assert corpus_files(bucket / "c") == corpus_files("c")


def counted(monkeypatch) -> collections.Counter:
    """Counts the requests of a store, but not those that the store in memory makes of itself."""
    requests, inside = collections.Counter(), threading.local()
    for name in ("ls", "info", "_open", "cat_file", "find", "rm", "put_whole"):
        function = getattr(MemoryStore, name)

        def count(self, *arguments, name=name, function=function, **options):
            if getattr(inside, "call", False):
                return function(self, *arguments, **options)
            requests[name] += 1
            inside.call = True
            try:
                return function(self, *arguments, **options)
            finally:
                inside.call = False

        monkeypatch.setattr(MemoryStore, name, count)
    return requests


def test_a_resumed_build_opens_no_block_before_it_decides(prepared, monkeypatch):
    """Metadata of blocks is in the marker of their input, and equal to that in each block."""
    bucket, blocks = prepared
    requests, prepare = collections.Counter(), LocalEngine.prepare

    def note(self, job, inputs):
        requests.update(current)
        assert not inputs, "everything is prepared"
        prepare(self, job, inputs)

    monkeypatch.setattr(LocalEngine, "prepare", note)
    current = counted(monkeypatch)
    decided = []

    def note_blocks(_, prepared_blocks, *__):
        decided.extend(prepared_blocks)
        requests["before decisions"] = sum(current.values())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr("data_prep.builder.pipeline.decide", note_blocks)
        run(bucket / "c", SPECS, block_bytes=500)
    before_decisions = requests.pop("before decisions")
    assert 0 < sum(requests.values()) < 25 < blocks, requests
    assert before_decisions < 30, "no request for each block"
    place = bucket / SCRATCH
    assert [block.metadata for block in decided] == [scratch.read_metadata(place / block.name) for block in decided]
    assert len(decided) == blocks


def test_sources_in_a_store_are_found_by_listing(text, monkeypatch):
    """Two folders, each listed once; a file that was replaced by one of the same size is read again."""
    bucket = memory_store()
    for number, document in enumerate(text):
        (bucket / f"texts/{number % 2}/{number}.txt").write_text(document)
    (bucket / "texts/0/other.md").write_text("not this one")
    requests = counted(monkeypatch)
    source = parse(f"text-files:{bucket}/texts/**/*.txt")
    found = [path for part in source.inputs() for path in part.paths]
    assert sorted(found) == found and len(found) == len(text) > 4 * sum(requests.values())
    with interrupted("pipeline.decide"):
        run("c", [source.spec])
    changed = bucket / "texts/1/5.txt"
    changed.write_text(changed.read_text().replace("the", "our").replace(".", "!"))
    run("c", [source.spec])
    run("fresh", [source.spec])
    assert corpus_files("c") == corpus_files("fresh")


@pytest.mark.parametrize("pattern", ["absent/*.txt", "texts", "absent.txt"])
def test_no_source_in_a_store(pattern):
    bucket = memory_store()
    (bucket / "texts/0.txt").write_text("A stone.")
    with pytest.raises(UserError, match=f"source text:az://bucket/{re.escape(pattern)}: no file matches"):
        parse(f"text:{bucket}/{pattern}").inputs()


def test_small_files_in_a_store_are_requested_together(tmp_path, monkeypatch):
    """With empty and compressed ones; what changes meanwhile is reported as for files that are read one by one."""
    contents = {f"{index:03d}.txt": b"Text %d." % index for index in range(200)}
    contents |= {"050.txt": b"", "300.txt.gz": gzip.compress(b"Packed."), "400.txt": b"caf\xe9 " * 90}
    store, requests, read_ranges = memory_store(), [], source_files.read_ranges
    monkeypatch.setattr(source_files, "read_ranges", lambda ranges: requests.append(ranges) or read_ranges(ranges))
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        (store / name).write_bytes(content)
    local, found = (read(f"text-files:{place}/*.txt*") for place in (tmp_path, store))
    assert len(requests) == 1 and len(requests[0]) == len(contents) - 1
    assert [one.text for one in found.documents] == [one.text for one in local.documents]
    assert len(found.documents) == 200 and [one.reason for one in found.skipped] == [
        one.reason for one in local.skipped
    ]
    sums = ([file["sha256"] for file in reading.file_entries] for reading in (local, found))
    assert next(sums) == next(sums)
    source = parse(f"text-files:{store}/*.txt*", 1 << 20)
    (part,) = source.inputs()
    (store / "007.txt").write_bytes(b"A longer text.")
    (blocks,) = source.read_blocks(part, InputRecord())
    assert len(blocks.payload) == len(contents)
    with pytest.raises(UserError, match=r"007\.txt: was changed or removed"):
        source_files.check_unchanged(part)
    (store / "007.txt").unlink()
    some = dataclasses.replace(part, paths=part.paths[:7], sizes=part.sizes[:7])
    for received, used in (
        (b"Other text.", [b"Other text."] * 7),
        (b"Text", [b"Text %d." % index for index in range(7)]),
    ):
        with monkeypatch.context() as patch:  # of whole files, nothing else is read
            patch.setattr(source_files, "read_ranges", lambda ranges, content=received: [content] * len(ranges))
            (blocks,) = source.read_blocks(some, InputRecord())
        assert [chunk.data for chunk in blocks.payload] == used
    with pytest.raises(UserError, match=r"007\.txt: cannot be read"):
        [*source.read_blocks(part, InputRecord())]


def test_a_block_that_is_gone_is_prepared_again(prepared):
    bucket, _ = prepared
    name = next(iter(scratch.prepared_blocks(bucket / SCRATCH)))
    (bucket / SCRATCH / name).unlink()
    run("c", SPECS, block_bytes=500)
    run(bucket / "c", SPECS, block_bytes=500)
    assert corpus_files(bucket / "c") == corpus_files("c")


@pytest.mark.parametrize(("place", "others"), [(None, [("c", None)]), ("one", [("c", "two"), ("d", "one")])])
def test_one_build_at_a_time(text, monkeypatch, place, others):
    bucket, finish, refused = memory_store(), writer.finish_corpus, []

    def refuse_others(*arguments):
        for out, other in others:
            with pytest.raises(UserError, match=r"^az://bucket/.* is in use by process \d+ on .*: wait until it ends"):
                run(bucket / out, SPECS, scratch=other and bucket / other)
            refused.append(out)
        return finish(*arguments)

    monkeypatch.setattr(writer, "finish_corpus", refuse_others)
    run(bucket / "c", SPECS, scratch=place and bucket / place)
    assert len(refused) == len(others)
    assert not [name for name in MemoryStore.objects if INCOMPLETE in name or LOCK_FILE in name]


@pytest.mark.parametrize("phase", ["prepare", "run_steps", "assemble"])
def test_a_build_whose_lock_was_taken_over_ends_after_the_phase(text, monkeypatch, phase):
    """As after a suspension."""
    bucket, called = memory_store(), []

    def noted(name, function):
        def call(self, *arguments, **options):
            called.append(name)
            return function(self, *arguments, **options)

        return call

    def check(self):
        self._lost = "process 3 on node7" if phase in called else None
        real(self)

    real = DirectoryLock.check
    monkeypatch.setattr(DirectoryLock, "check", check)
    phases = ["prepare", "run_steps", "assemble"]
    for name in phases:
        monkeypatch.setattr(LocalEngine, name, noted(name, getattr(LocalEngine, name)))
    with pytest.raises(UserError, match="was taken over by process 3 on node7"):
        run(bucket / "c", SPECS)
    assert list(dict.fromkeys(called)) == phases[: phases.index(phase) + 1]
    assert "bucket/c/corpus.json" not in MemoryStore.objects


@pytest.mark.parametrize("denied", ["ls", "put_whole", "scratch"])
def test_a_bucket_that_denies_listing_or_writing(text, monkeypatch, capsys, denied):
    bucket = memory_store()
    pathlib.Path("tokenizer.json").write_text(make_tokenizer().to_json())
    function = "ls" if denied == "scratch" else denied

    def refuse(self, path, *_, **__):
        if denied != "scratch" or "scratch" in str(path):
            raise PermissionError(13, "AccessDenied", path)
        return original(self, path)

    original = getattr(MemoryStore, function)
    monkeypatch.setattr(MemoryStore, function, refuse)
    words = ["build", "--source", "text:text.txt", "--tokenizer", "tokenizer.json", "--out", str(bucket / "c")]
    words += ["--workers", "1", *(["--scratch", str(bucket / "scratch")] if denied == "scratch" else [])]
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "az://bucket" in line and len(line) < 400, line


def start(url: str, number: int) -> subprocess.Popen:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", DRIVER.format(root=str(ROOT)), url, str(number)], text=True, **pipes)


@pytest.fixture
def s3(s3_server, monkeypatch, request):
    address, _ = s3_server
    return use_s3(monkeypatch, address, f"build-{zlib.crc32(request.node.name.encode())}")


@pytest.mark.slow
def test_two_builds_at_once_on_s3(text, s3, capfd):
    """Exactly one goes on. It is killed, and its lock is taken over at once; the bytes are those of a disk."""
    run("c", SPECS)
    both = [start(f"{s3}/c", 3) for _ in range(2)]
    refused = next(iter([one for one in both if one.stdout.readline() == ""]), None)
    assert refused is not None, "both go on"
    assert "is in use by process" in refused.communicate()[1] and refused.returncode == 2
    (other,) = (one for one in both if one is not refused)
    other.kill()
    other.communicate()
    assert (s3 / SCRATCH / LOCK_FILE).exists() and not (s3 / "c" / "corpus.json").exists()
    run(s3 / "c", SPECS)
    assert f"was left locked by process {other.pid} on " in capfd.readouterr().err
    assert corpus_files(s3 / "c") == corpus_files("c")


@pytest.mark.slow
def test_versions_on_s3(s3):
    """A listing and a look at each object give the same; another content has another version."""
    for number in range(3):
        (s3 / f"texts/{number}/a.txt").write_text(f"{number} river")
    before = find_files(f"{s3}/texts/*/*.txt")
    assert before == find_files(f"{s3}/texts/**/*.txt") == {path: file_version(path) for path in before}
    assert len(before) == 3 and find_files(f"{s3}/texts/1/a.txt") == dict([[*before.items()][1]])
    (s3 / "texts/1/a.txt").write_text("1 stone")
    after = find_files(f"{s3}/texts/*/*.txt")
    assert [after[path] == before[path] for path in before] == [True, False, True]
    assert find_files("s3://no-such-bucket/*.txt") == {}


def test_partial_files_of_a_killed_worker_are_removed(text):
    with interrupted("pipeline.decide"):
        run("c", SPECS)
    left = next(pathlib.Path(SCRATCH, scratch.UNITS).iterdir()) / "unit-1.partial"
    left.write_bytes(b"")
    resume.resume_or_start(epath.Path(SCRATCH), epath.Path("c"), {}, ())
    assert not left.exists() and scratch.prepared_blocks(epath.Path(SCRATCH))
