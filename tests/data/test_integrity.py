"""Files that differ from corpus.json are found before the first step, by one process or by many."""

import itertools
import json
import resource
import shutil
from pathlib import Path

import pytest
from array_record.python import array_record_module

from bert_jax.data import integrity, shards
from bert_jax.data.corpus import Corpus
from bert_jax.data.integrity import check_corpus_files
from bert_jax.errors import UserError
from data_prep.sources.files import file_entry
from tests.corpus_writer import write_sample


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound")
    write_sample(directory / "one", 0)
    write_sample(directory / "two", 1)
    return directory


@pytest.fixture
def corpora(sound, tmp_path):
    """Copies to break, opened."""
    shutil.copytree(sound, tmp_path / "c")
    return [Corpus.open(tmp_path / "c" / name) for name in ("one", "two")]


def files_of(corpora):
    every = (path for one in corpora for path in sorted(one.directory.iterdir()))
    return [path for path in every if path.name not in ("corpus.json", "README.md")]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_manifest(corpus, change):
    path = corpus.directory / "corpus.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_sound(corpora):
    assert len(files_of(corpora)) == 34
    for verify, processes in itertools.product(("checksums", "counts"), (1, 3)):
        for process in range(processes):
            check_corpus_files(corpora, verify, process, processes)


def test_shards_stay_open_for_the_process_that_reads_them(corpora, monkeypatch):
    opened, open_shard = [], shards.open_shard
    for module in (shards, integrity):
        monkeypatch.setattr(module, "open_shard", lambda *pair: opened.append(pair[0].path) or open_shard(*pair))
    check_corpus_files(corpora, "counts", keep_open=True)
    every = {path for one in corpora for path in one.directory.glob("*.array_record*")}
    assert len(opened) == len(every) > 2 and set(opened) == every
    kept = corpora[0].records(range(3))
    assert len(opened) == len(every)
    check_corpus_files(corpora, "counts")
    other = Corpus.open(corpora[0].directory).records(range(3))
    assert len(opened) > 2 * len(every)
    assert [record.tokens.tolist() for record in kept] == [record.tokens.tolist() for record in other]


def test_more_shards_than_open_files(corpora):
    """The limit is raised; if that is not permitted, the message does not call the shard damaged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    directory = corpora[0].directory
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        one = Corpus.open(directory)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(UserError, match="too many files are open; raise the limit"):
            one.records([0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_flipped_bit_in_any_file(corpora):
    for path in files_of(corpora):
        content = path.read_bytes()
        flip(path)
        words = f"{path.parent.name}/{path.name}: damaged, its SHA-256 is not the recorded one; copy the corpus again"
        with pytest.raises(UserError, match=words):
            check_corpus_files(corpora, "checksums")
        path.write_bytes(content)
    check_corpus_files(corpora, "checksums")


def test_missing_or_cut_files(corpora):
    """Each file of the one corpus is checked in the one way, of the other, in the other: a corpus has 17 files."""
    for path, verify in zip(files_of(corpora), itertools.cycle(("checksums", "counts")), strict=False):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(UserError, match=rf"{path.parent.name}/{path.name}: missing; copy the corpus again or"):
            check_corpus_files(corpora, verify)
        path.write_bytes(content[:-1])
        words = f"{path.name}: damaged, it has {len(content) - 1} bytes where corpus.json lists {len(content)}; copy"
        with pytest.raises(UserError, match=words):
            check_corpus_files(corpora, verify)
        path.write_bytes(content)


@pytest.mark.parametrize("verify", ["checksums", "counts"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_another_number_of_records(corpora, verify, split):
    """A shard with a record less, of which corpus.json knows all but the number."""
    manifest = json.loads((corpora[1].directory / "corpus.json").read_text())
    shard = manifest["splits"][split]["shards"][0]
    path = corpora[1].directory / shard["file"]
    reader = array_record_module.ArrayRecordReader(str(path))
    records = reader.read_all()
    reader.close()
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records[:-1]:
        writer.write(record)
    writer.close()
    change_manifest(corpora[1], lambda m: m["files"].update({shard["file"]: file_entry(path)}))
    count = len(records)
    with pytest.raises(UserError, match=f"{path.name}: holds {count - 1} records where corpus.json lists {count};"):
        check_corpus_files(corpora, verify)


@pytest.mark.parametrize("verify", ["checksums", "counts"])
def test_a_shard_that_is_not_array_record(corpora, verify):
    (path,) = corpora[0].directory.glob("*validation.array_record*")
    path.write_bytes(bytes(path.stat().length))
    change_manifest(corpora[0], lambda m: m["files"].update({path.name: file_entry(path)}))
    with pytest.raises(UserError, match=f"{path.name}: damaged, it cannot be read as ArrayRecord .*rebuild it"):
        check_corpus_files(corpora, verify)


def is_shard(path) -> bool:
    return "array_record" in path.name


def test_a_process_reads_only_its_files(corpora, monkeypatch):
    read = []

    def note(manifest_file, cache, on_bytes):
        read.append(Path(manifest_file.path))
        return file_entry(manifest_file.path)["sha256"]

    monkeypatch.setattr(integrity, "_sha256", note)
    shards = [path for path in files_of(corpora) if is_shard(path)]
    for process in range(3):
        before = len(read)
        check_corpus_files(corpora, "checksums", process, 3)
        mine = [path for path in read[before:] if is_shard(path)]
        assert {path for path in files_of(corpora) if not is_shard(path)} < set(read[before:])
        assert len(shards) // 3 <= len(mine) <= -(-len(shards) // 3)
    assert sorted(path for path in read if is_shard(path)) == sorted(shards)
    assert set(read) == set(files_of(corpora))
    read.clear()
    check_corpus_files(corpora, "counts")
    assert not read


def test_the_first_file_is_named_however_threads_run(corpora):
    for path in files_of(corpora)[2:]:
        if path.suffix == ".npy":
            flip(path)
    manifest_file = list(json.loads((corpora[0].directory / "corpus.json").read_text())["files"])
    first = next(name for name in manifest_file if name.endswith(".npy"))
    for _ in range(5):
        with pytest.raises(UserError, match=f"one/{first}: damaged"):
            check_corpus_files(corpora, "checksums")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].pop("train.sentence_lengths.npy"), "lacks 'train.sentence_lengths.npy'"),
        (lambda m: m["splits"].pop("validation"), "lacks 'validation'"),
        (lambda m: m["files"]["tokenizer.json"].pop("sha256"), r"field 'files\.tokenizer\.json\.sha256' is missing"),
    ],
)
def test_an_incomplete_corpus_json(corpora, change, message):
    change_manifest(corpora[0], change)
    with pytest.raises(UserError, match=message):
        check_corpus_files(corpora, "counts")


@pytest.mark.parametrize(("bound", "shown"), [(1, True), (1 << 40, False)])
def test_large_corpora_show_progress_and_how_to_skip_it(corpora, monkeypatch, capfd, bound, shown):
    monkeypatch.setattr(integrity, "PROGRESS_BYTES", bound)
    check_corpus_files(corpora, "checksums")
    printed = capfd.readouterr().err
    assert ("--data.verify counts" in printed) == shown == ("100%" in printed)
