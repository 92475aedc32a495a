"""Records with fields: JSON lines, Parquet, TFDS."""

import base64
import gzip
import json
import pathlib
import struct
import sys

import google_crc32c
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.proto import tf_example_pb2

from bert_jax.errors import UserError
from data_prep.sources import InputRecord, parse
from data_prep.sources.tfrecord import read_records
from tests.data_prep.test_sources_reading import read

TEXTS = [f"Text {i}, mit Ümläuten.\n\nA second paragraph {'x' * (i % 7)}." for i in range(120)]


@pytest.fixture
def orjson():
    return pytest.importorskip("orjson")


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet")


def test_json_lines(tmp_path, orjson):
    lines = "\n".join(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS))
    (tmp_path / "a.jsonl").write_text(f"\n{lines}")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(f"{lines}\n".encode()))
    for block_bytes in (64, 1000, 1 << 20):
        reading = read(f"jsonl:{tmp_path}/*@text", block_bytes=block_bytes)
        assert reading.texts == TEXTS * 2
        assert not reading.skipped
        assert reading.documents[0].origin == f"{tmp_path}/a.jsonl:2"
        assert reading.documents[-1].origin == f"{tmp_path}/b.jsonl.gz:120"
        assert all(part.begins and part.ends for part in reading.parts)
    assert [file["bytes"] for file in reading.file_entries] == [
        path.stat().st_size for path in sorted(tmp_path.iterdir())
    ]


def test_what_is_wrong_with_a_json_line(tmp_path, orjson):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"text": "fine"}\n'
        b'{"text": "no end\n'
        b'{"text": "\xe9"}\n'
        b'{"Text": "x", "url": "y"}\n'
        b'{"text": null}\n'
        b'{"text": ["x"]}\n'
        b'{"text": " "}\n'
        b'["text"]\n'
        b"  \n"
        b'{"text": "also fine"}'
    )
    reading = read(f"jsonl:{path}@text")
    assert reading.texts == ["fine", "also fine"]
    reasons = ["malformed_json", "undecodable", "missing_field", "null_field", "field_not_text", "empty_document"]
    assert reading.places == [(reason, f"{path}:{line}") for line, reason in enumerate([*reasons, "missing_field"], 2)]
    details = [skipped.detail for skipped in reading.skipped]
    assert "end of data" in details[0] or "line 1 column" in details[0]
    assert "1 of 13 bytes are not UTF-8, the first at byte 44" in details[1]
    assert details[2] == "no field 'text', did you mean 'Text'? there are: Text, url".replace("? there", "; there")
    assert details[4] == "the field 'text' is a list, not text"
    assert details[6] == "the line is a list, not an object with a field 'text'"


def test_dotted_fields(tmp_path, orjson):
    path = tmp_path / "a.jsonl"
    path.write_text('{"meta": {"text": "x"}}\n{"meta": {"title": "y"}}\n{"meta": 3}\n{"meta": {"text": "z"}}\n')
    reading = read(f"jsonl:{path}@meta.text")
    assert reading.texts == ["x", "z"]
    assert [skipped.detail for skipped in reading.skipped] == [
        "no field 'text'; there are: title",
        "meta is a number, not an object with a field 'text'",
    ]


def test_long_json_lines(tmp_path, orjson):
    path = tmp_path / "a.jsonl"
    texts = ["a" * 5, "b" * 500, "c" * 7]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert read(f"jsonl:{path}@text", block_bytes=64).texts == texts
    reading = read(f"jsonl:{path}@text", block_bytes=64, max_record_bytes=300)
    assert reading.texts == ["a" * 5, "c" * 7]
    assert reading.places == [("record_too_long", f"{path}:2")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("jsonl:{}@text", "orjson"), ("parquet:{}@text", "pyarrow"), ("markdown:{}", "pyromark"), ("text:{}", "zstd")],
)
def test_libraries_that_are_missing(tmp_path, monkeypatch, kind, name):
    from data_prep.sources import markdown

    markdown._parser.cache_clear()
    path = tmp_path / ("a.zst" if name == "zstd" else "a")
    path.write_text("{}")
    for module in (name, "backports.zstd", "compression.zstd") if name == "zstd" else (name,):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"needs .*{name}, which is missing: pip install .*{name}"):
        read(kind.format(path))


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet(tmp_path, parquet, kind):
    import pyarrow

    types = {"dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    column = pyarrow.array(TEXTS, types.get(kind) or getattr(pyarrow, kind)())
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": column})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    parquet.write_table(table.slice(0, 3), tmp_path / "b.parquet")
    parquet.write_table(table.slice(0, 0), tmp_path / "c.parquet")
    for block_bytes in (20, 64, 1000, 1 << 20):
        reading = read(f"parquet:{tmp_path}/*@text", block_bytes=block_bytes)
        assert reading.texts == TEXTS + TEXTS[:3]
        assert reading.places == [("empty_file", f"{tmp_path}/c.parquet")]
        assert [d.origin for d in reading.documents][119:121] == [
            f"{tmp_path}/a.parquet:row 119",
            f"{tmp_path}/b.parquet:row 0",
        ]
        assert [file["path"][-9] for file in reading.file_entries] == ["a", "b", "c"]
        assert all(len(file["sha256"]) == 64 for file in reading.file_entries)
    inputs = parse(f"parquet:{tmp_path}/a.parquet@text").inputs()
    assert [(part.start, part.stop) for part in inputs] == [(0, 3)]


def test_parquet_row_groups_are_inputs(tmp_path, parquet):
    import pyarrow

    path = tmp_path / "a.parquet"
    other = [f"{i} is in no size".center(1000) for i in range(len(TEXTS))]
    parquet.write_table(pyarrow.table({"text": TEXTS, "other": other}), path, row_group_size=10, compression="none")
    source = parse(f"parquet:{path}@text")
    source = type(source)(source.spec, source.pattern, source.field, block_bytes=64)
    inputs = source.inputs()
    assert len(inputs) > 3
    assert sum(part.size for part in inputs) < 10_000 < 100_000 < path.stat().st_size
    assert [part.start for part in inputs] == [0, *(part.stop for part in inputs[:-1])]
    assert inputs[-1].stop == 12
    texts = [[d.text for b in source.read_blocks(part, InputRecord()) for d in source.documents(b)] for part in inputs]
    assert [text for group in texts for text in group] == TEXTS


def test_parquet_values(tmp_path, parquet):
    import pyarrow

    path = tmp_path / "a.parquet"
    struct = [text and {"text": text} for text in (b"x", b"-", None, b" ", b"\xff", b"y" * 99, b"z")]
    struct[1] = {"text": None}
    kind = pyarrow.struct({"text": pyarrow.binary()})
    parquet.write_table(pyarrow.table({"meta": pyarrow.array(struct, kind), "n": list(range(7))}), path)
    reading = read(f"parquet:{path}@meta.text", max_record_bytes=98)
    assert reading.texts == ["x", "z"]
    reasons = ["null_field", "null_field", "empty_document", "undecodable", "record_too_long"]
    assert reading.places == [(reason, f"{path}:row {row}") for row, reason in enumerate(reasons, 1)]


def test_parquet_mistakes(tmp_path, parquet):
    import pyarrow

    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"text": TEXTS, "id": list(range(120)), "tags": [["a"]] * 120, "meta": [{"title": "x"}] * 120}),
        path,
    )
    for field, message in {
        "txt": "no field 'txt', did you mean 'text'; there are: id, meta, tags, text",
        "id": "the column 'id' has type int64, not text",
        "tags": "the column 'tags' has type list<.*>, not text",
        "meta": "the column 'meta' has type struct<.*>, not text",
        "text.x": "no field 'x'; there are no fields",
    }.items():
        with pytest.raises(UserError, match=message):
            parse(f"parquet:{path}@{field}").inputs()
    whole = path.read_bytes()
    damaged = whole[:4] + bytes(296) + whole[300:]
    for content in (whole[: len(whole) // 2], b"", b"no Parquet at all, but some text", damaged):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"a\.parquet: cannot be read as Parquet .* is it complete\? download it again"
        ):
            read(f"parquet:{path}@text")


FEATURES = tfds.features.FeaturesDict(
    {
        "text": tfds.features.Text(),
        "id": tfds.features.Scalar(np.int64),
        "meta": {"title": tfds.features.Text()},
        "image": tfds.features.Image(shape=(1, 1, 3)),
        "words": tfds.features.Sequence(tfds.features.Text()),
    }
)


class TfRecordWriter:
    """As TensorFlow's (core/lib/io/record_writer.h), from its description."""

    def __init__(self, path):
        self._file = pathlib.Path(path).open("wb")  # noqa: SIM115
        self.close = self._file.close

    def write(self, record):
        length = struct.pack("<Q", len(record))
        self._file.write(length + self._masked(length) + record + self._masked(record))

    def _masked(self, data):
        crc = int.from_bytes(google_crc32c.Checksum(data).digest())
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32)


RECORD_WRITERS = {
    "array_record": lambda path: array_record_module.ArrayRecordWriter(path, "group_size:1"),
    "tfrecord": TfRecordWriter,
    "riegeli": TfRecordWriter,
}


def write_tfds(base, name="my_text", config="cfg", version="1.0.0", suffix="array_record"):
    directory = base / name / config / version if config else base / name / version
    directory.mkdir(parents=True)
    serializer = tfds.core.example_serializer.ExampleSerializer(FEATURES.get_serialized_info())
    size, shards = 0, [TEXTS[:50], TEXTS[50:]]
    for index, texts in enumerate(shards):
        path = directory / f"{name}-train.{suffix}-{index:05d}-of-00002"
        writer = RECORD_WRITERS[suffix](str(path))
        for i, text in enumerate(texts):
            example = {"text": text, "id": i, "meta": {"title": f"T{version}"}, "words": ["a"]}
            example["image"] = b"no image at all: it is not decoded"
            record = serializer.serialize_example(example)
            size += len(record)
            writer.write(record)
        writer.close()
    template = tfds.core.ShardedFileTemplate(
        data_dir=directory, dataset_name=name, split="train", filetype_suffix=suffix
    )
    split = tfds.core.SplitInfo(
        name="train", shard_lengths=[len(s) for s in shards], num_bytes=size, filename_template=template
    )
    tfds.folder_dataset.write_metadata(data_dir=directory, features=FEATURES, split_infos=[split], check_data=False)
    return directory


def test_tfds(tmp_path, monkeypatch):
    directory = write_tfds(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    for name in ("my_text/cfg", "my_text/cfg/1.0.0", directory, directory.parent):
        for block_bytes in (64, 1000, 1 << 20):
            reading = read(f"tfds:{name}:train@text", block_bytes=block_bytes)
            assert reading.texts == TEXTS
        assert reading.documents[7].origin == f"{directory}:train 7"
        assert reading.file_entries == [{"name": "my_text/1.0.0:train", "path": str(directory), "examples": 120}]
    assert read("tfds:my_text/cfg:train[40:60]@text", block_bytes=100).texts == TEXTS[40:60]
    assert read("tfds:my_text/cfg:train[:10%]@meta.title").texts == ["T1.0.0"] * 12
    reading = read("tfds:my_text/cfg:train[:2]@text", language="@meta.title")
    assert [document.fields["meta.title"] for document in reading.documents] == ["T1.0.0"] * 2
    for version in ("1.10.0", "1.9.0"):
        write_tfds(tmp_path, version=version)
    assert read("tfds:my_text/cfg:train[:1]@meta.title").texts == ["T1.10.0"]
    assert "tensorflow" not in sys.modules


def test_tfds_mistakes(tmp_path, monkeypatch):
    write_tfds(tmp_path)
    riegeli = write_tfds(tmp_path, name="old", config="", suffix="riegeli")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    way_round = r"with TensorFlow, prepare it with tfds\.builder\(NAME\)"
    for rest, message in {
        "my_text:train@text": r"if it has configurations, write my_text/CONFIG",
        "my_txt:train@text": rf"no dataset my_txt prepared in {tmp_path} \(\$TFDS_DATA_DIR\); .*{way_round}",
        "my_text/cfg:test@text": "no split 'test'; there are: train",
        "my_text/cfg:train[5:5]@text": "has no examples",
        "my_text/cfg:train@txt": "no field 'txt', did you mean 'text'; there are: id, image, meta, text, words",
        "my_text/cfg:train@meta": "the field 'meta' is FeaturesDict.*not text",
        "my_text/cfg:train@id": "the field 'id' is .*int64.*not text",
        "my_text/cfg:train@words": "the field 'words' is .*not text",
        "old:train@text": rf"{riegeli} is riegeli; array_record and tfrecord can be read; .*{way_round}",
    }.items():
        with pytest.raises(UserError, match=f"(?s)source tfds:.*{message}") as error:
            parse(f"tfds:{rest}").inputs()
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"the field 'words' is .*not text or a number"):
        parse("tfds:my_text/cfg:train@text", score="@words").inputs()


GOLDEN = (
    "VAAAAAAAAABfUUWHClIKFwoNbWV0YS9sYW5ndWFnZRIGCgQKAmRlCg4KBWxhYmVsEgUaAwoBBAonCgR0ZXh0Eh8KHQobVGV4dCBudW1iZXIgNCwg"
    "w7xiZXIgYWxsZXMuazzwPVQAAAAAAAAAX1FFhwpSChcKDW1ldGEvbGFuZ3VhZ2USBgoECgJkZQoOCgVsYWJlbBIFGgMKAQAKJwoEdGV4dBIfCh0K"
    "G1RleHQgbnVtYmVyIDAsIMO8YmVyIGFsbGVzLsHPpD4="
)
"""The first two records of a shard that TFDS 4.9.10 wrote with TensorFlow 2.21, base64."""


def test_tfrecord_is_read_as_tensorflow_writes_it(tmp_path):
    shard = base64.b64decode(GOLDEN)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(shard)
    records = list(read_records(str(path), 0, 2))
    expected = [{"meta/language": b"de", "text": f"Text number {i}, über alles.".encode()} for i in (4, 0)]
    for record, fields in zip(records, expected, strict=True):
        features = tf_example_pb2.Example.FromString(record).features.feature
        assert {name: features[name].bytes_list.value[0] for name in fields} == fields
    assert list(read_records(str(path), 1, 2)) == records[1:]
    writer = TfRecordWriter(tmp_path / "again")
    for record in records:
        writer.write(record)
    writer.close()
    assert (tmp_path / "again").read_bytes() == shard
    for place in (0, 9, 30, 97, len(shard) - 1):  # length, its checksum, data, its checksum; of either record
        path.write_bytes(shard[:place] + bytes([shard[place] ^ 1]) + shard[place + 1 :])
        with pytest.raises(UserError, match=rf"{path}: record {place // 100} is damaged or cut off"):
            list(read_records(str(path), 0, 2))
    for size in (0, 5, 100, len(shard) - 1):
        path.write_bytes(shard[:size])
        with pytest.raises(UserError, match=r"record [01] is damaged or cut off; prepare the dataset again"):
            list(read_records(str(path), 0, 2))


def test_tfds_in_tfrecord(tmp_path, monkeypatch):
    """The same documents as in ArrayRecord, for whole splits, slices and any size of blocks."""
    directory = write_tfds(tmp_path, suffix="tfrecord")
    other = write_tfds(tmp_path / "other")
    for split in ("train", "train[40:60]", "train[:10%]", "train[50:]"):
        for block_bytes in (64, 1000, 1 << 20):
            reading = read(f"tfds:{directory}:{split}@text", block_bytes=block_bytes)
            assert reading.texts == read(f"tfds:{other}:{split}@text").texts != []
            (entry,) = reading.file_entries
            assert entry["path"] == str(directory) and entry["examples"] == len(reading.texts)
    assert reading.documents[0].origin == f"{directory}/my_text-train.tfrecord-00001-of-00002 0"
    assert read(f"tfds:{directory}:train@meta.title").texts == ["T1.0.0"] * 120
    shard = directory / "my_text-train.tfrecord-00001-of-00002"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"00001-of-00002: record 69 is damaged or cut off"):
        read(f"tfds:{directory}:train@text")
    reading = read(f"tfds:{directory}:train@text", skip_damaged=True, block_bytes=100)
    assert reading.texts == TEXTS[:-1] and "record 69 is damaged" in reading.damaged[0]
    shard.unlink()
    assert read(f"tfds:{directory}:train@text", skip_damaged=True).texts == TEXTS[:50]
    with pytest.raises(UserError, match=r"my_text-train\.tfrecord-00001-of-00002: cannot be read"):
        read(f"tfds:{directory}:train@text")
    assert "tensorflow" not in sys.modules


def test_tfds_damage(tmp_path):
    directory = write_tfds(tmp_path)
    shard = directory / "my_text-train.array_record-00001-of-00002"
    whole = shard.read_bytes()
    from data_prep.sources import tensorflow_dataset

    for content in (whole[: len(whole) // 2], None):
        tensorflow_dataset._data_source.cache_clear()
        shard.unlink()
        if content is not None:
            shard.write_bytes(content)
        with pytest.raises(UserError, match=rf"{directory}: .*; prepare the dataset again"):
            read(f"tfds:{directory}:train@text")
