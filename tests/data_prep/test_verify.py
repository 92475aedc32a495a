"""`verify`: everything a corpus on disk can contradict is found and named."""

import json
import shutil

import numpy as np
import pytest
from array_record.python import array_record_module

from bert_jax.data.record import parse_record
from bert_jax.errors import UserError
from data_prep import verify as verify_module
from data_prep.builder.records import serialize_example
from data_prep.sources.files import file_entry
from data_prep.verify import verify_corpus
from tests.corpus_writer import write_sample


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sample") / "c"
    write_sample(directory)
    return directory


@pytest.fixture
def corpus(sample, tmp_path):
    """A copy to break."""
    return shutil.copytree(sample, tmp_path / "c")


def manifest_of(directory):
    return json.loads((directory / "corpus.json").read_text())


def update_checksum(directory, name):
    manifest = manifest_of(directory)
    manifest["files"][name] = file_entry(directory / name)
    (directory / "corpus.json").write_text(json.dumps(manifest))


def rewrite_shard(directory, shard, change):
    """Changes the records of a shard of train, and the checksum with them."""
    name = manifest_of(directory)["splits"]["train"]["shards"][shard]["file"]
    reader = array_record_module.ArrayRecordReader(str(directory / name))
    records = [parse_record(raw, np.dtype("<u2")) for raw in reader.read_all()]
    reader.close()
    records = change(records)
    writer = array_record_module.ArrayRecordWriter(str(directory / name), "group_size:1")
    for record in records:
        writer.write(record if isinstance(record, bytes) else serialize_example(*record))
    writer.close()
    update_checksum(directory, name)
    return directory / name


def test_intact(corpus):
    manifest = manifest_of(corpus)
    assert len(manifest["splits"]["train"]["shards"]) == 2
    size = sum(path.stat().st_size for path in corpus.iterdir() if path.name != "corpus.json")
    intact = f"intact; 17 files ({size / 1e6:.1f} MB) and all 62 records agree with corpus.json"
    assert verify_corpus(corpus) == intact
    rewrite_shard(corpus, 0, lambda records: records)
    assert verify_corpus(corpus).startswith("intact"), "rewriting alone is not damage"
    (corpus / "notes.txt").write_text("mine")
    (corpus / "corpus.incomplete").mkdir()
    assert verify_corpus(corpus).endswith("\nnot of this corpus: corpus.incomplete, notes.txt")


def test_sizes_and_checksums_are_compared(corpus):
    """Each file is in tests/data/test_integrity.py."""
    path = corpus / "features.json"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b" ")
    with pytest.raises(UserError, match=r"features\.json: damaged, its SHA-256"):
        verify_corpus(corpus)
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"features\.json: damaged, it has"):
        verify_corpus(corpus)


def replace(position, **fields):
    """A change of one record; a field is a value or a function of the record."""

    def change(records):
        records, record = list(records), records[position]
        new = {name: value(record) if callable(value) else value for name, value in fields.items()}
        records[position] = record._replace(**new)
        return records

    return change


EMPTY = np.zeros(0, np.uint16)

CHANGES = [
    (lambda records: [*records[:4], records[5], records[4], *records[6:]], "record 4 of train"),
    (replace(1, sentence_ends=lambda r: r.sentence_ends + np.array([1, 0], np.uint16)), "record 1 of train"),
    (replace(1, tokens=np.full(8193, 7, np.uint16), sentence_ends=np.array([8193], np.uint16)), "record 1 of train"),
    (replace(5, tokens=lambda r: np.append(r.tokens[:-1], np.uint16(20))), "record 5 of train"),
    (replace(2, tokens=lambda r: np.append(r.tokens, np.uint16(7))), "record 2 of train"),
    (replace(-1, tokens=EMPTY), "of train contradicts"),
    (replace(3, tokens=EMPTY, sentence_ends=EMPTY), "record 3 of train"),
    (replace(3, document=4), "record 3 of train"),
    (replace(3, document=2**64 - 1), "record 3 of train"),
    (replace(3, part=1), "record 3 of train"),
    (lambda records: records[:-1], "records where corpus.json lists"),
    (lambda records: [*records[:-1], b"\x0a\x03abc"], "damaged .not a record"),
    (lambda records: [*records[:-1], b""], "damaged .not a record"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_wrong_records_under_right_checksums(corpus, monkeypatch, change, message):
    monkeypatch.setattr(verify_module, "_BATCH_RECORDS", 4)
    shard = rewrite_shard(corpus, 0, change)
    with pytest.raises(UserError, match=f"{shard.name}: .*{message}"):
        verify_corpus(corpus)


@pytest.mark.parametrize("ends", [[0, 9], [9, 9], [8193]])
def test_arrays_that_agree_with_records_that_must_not_be(corpus, ends):
    """A sentence without tokens, and a record longer than 8,192 tokens."""
    ends = np.array(ends, np.uint16)
    offsets = np.load(corpus / "train.record_offsets.npy")
    position = int(np.argmax(np.diff(offsets) == len(ends)))
    rewrite_shard(corpus, 0, replace(position, tokens=np.full(ends[-1], 7, np.uint16), sentence_ends=ends))
    lengths = np.load(corpus / "train.sentence_lengths.npy")
    lengths[offsets[position] : offsets[position + 1]] = np.diff(ends, prepend=0)
    np.save(corpus / "train.sentence_lengths.npy", lengths)
    update_checksum(corpus, "train.sentence_lengths.npy")
    with pytest.raises(UserError, match=f"record {position} of train contradicts"):
        verify_corpus(corpus)


def test_the_bad_shard_is_named_and_records_are_numbered_through_the_split(corpus):
    first = manifest_of(corpus)["splits"]["train"]["shards"][0]["records"]
    shard = rewrite_shard(corpus, 1, replace(2, part=5))
    with pytest.raises(UserError, match=f"{shard.name}: record {first + 2} of train"):
        verify_corpus(corpus)


def test_a_part_that_is_lost_between_two_shards(corpus):
    """Sizes all agree, but the last record of shard 0 claims to be a part further."""
    shard = rewrite_shard(corpus, 0, lambda records: [*records[:-1], records[-1]._replace(part=records[-1].part + 1)])
    with pytest.raises(UserError, match=f"{shard.name}: record"):
        verify_corpus(corpus)


@pytest.mark.parametrize(
    ("array", "place", "message"),
    [
        ("sentence_lengths", 3, "of train contradicts the arrays"),
        ("record_offsets", 3, "record 2 of train contradicts the arrays"),
        ("document_offsets", 3, "of train contradicts the arrays"),
        ("token_counts", 6, "token_counts.npy: contradicts the records"),
        ("word_starts", 3, "word_starts.npy: contradicts the records"),
    ],
)
def test_wrong_arrays_under_right_checksums(corpus, array, place, message):
    path = corpus / f"train.{array}.npy"
    values = np.load(path)
    values[place] += 1
    values[place + 1] -= 1
    np.save(path, values)
    update_checksum(corpus, path.name)
    with pytest.raises(UserError, match=message):
        verify_corpus(corpus)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"].pop("c-train.array_record-00001-of-00002"), "lacks 'c-train.array_record-00001"),
        (lambda m: m["tokenizer"].update(fingerprint="0" * 64), "not the tokenizer this corpus was built with"),
        (lambda m: m["splits"]["train"].update(unknown_tokens=4), "counts 4 unknown tokens in train, but .* 3;"),
    ],
)
def test_a_corpus_json_that_says_something_else(corpus, change, message):
    manifest = manifest_of(corpus)
    change(manifest)
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        verify_corpus(corpus)


def test_tfds_would_see_other_shards(corpus):
    path = corpus / "dataset_info.json"
    info = json.loads(path.read_text())
    info["splits"][0]["shardLengths"][0] = "1"
    path.write_text(json.dumps(info))
    update_checksum(corpus, path.name)
    with pytest.raises(UserError, match=r"dataset_info\.json: has other counts"):
        verify_corpus(corpus)
    for content, message in ((b'{"splits": [1]}', "splits"), (b"\xde", "not JSON")):
        path.write_bytes(content)
        update_checksum(corpus, path.name)
        with pytest.raises(UserError, match=rf"dataset_info\.json.*{message}"):
            verify_corpus(corpus)
