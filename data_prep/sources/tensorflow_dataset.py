"""`tfds:NAME[/CONFIG]:SPLIT@FIELD`: a prepared TFDS dataset, ArrayRecord or TFRecord, read without TensorFlow."""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from bert_jax.errors import UserError
from data_prep.sources import tfrecord
from data_prep.sources.base import DamagedFileError, Document, Input, InputRecord, Skipped, Source, SourceBlock
from data_prep.sources.field_validation import document_or_skipped, missing_field_message

# A slice of a split may contain a colon: train[:10%].
_ARGUMENT = re.compile(r"(?P<name>.+):(?P<split>[^:@\[\]]+(?:\[[^\[\]]*\])?)@(?P<field>[^@]+)")
_BLOCKS_PER_INPUT = 16
_FORMATS = (tfds.core.FileFormat.ARRAY_RECORD, tfds.core.FileFormat.TFRECORD)
_INFO = "dataset_info.json"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)/?")
_PREPARE_HINT = (
    "on a machine with TensorFlow, prepare it with tfds.builder(NAME).download_and_prepare() and copy it here"
)


@dataclasses.dataclass(frozen=True)
class TfdsSource(Source):
    """`tfds:NAME[/CONFIG][/VERSION]:SPLIT@FIELD`, or a directory for the name; FIELD may be dotted.

    The dataset is searched below $TFDS_DATA_DIR, by default ~/tensorflow_datasets; of several versions the highest is
    read. SPLIT may be a slice, e.g. `train[:10%]`.

    Of ArrayRecord, which has random access, an input and the payload of a block are ranges of examples, so that workers
    read. Of TFRecord an input is a shard, and the payload of a block its examples.
    """

    name: str
    split: str
    field: str
    has_fields = True

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> Source:
        """`tfds:NAME:SPLIT@FIELD`."""
        if match := _ARGUMENT.fullmatch(argument):
            return cls(spec, **match.groupdict())
        raise UserError(f"source {spec}: write tfds:NAME:SPLIT@FIELD, e.g. `tfds:lm1b:train@text`")

    def inputs(self) -> list[Input]:
        """Ranges of examples with about 16 blocks each, or parts of shards."""
        directory = os.fspath(_find(self.spec, self.name))
        info = self._checked_info(directory)
        ranges = self._shards if info.file_format is tfds.core.FileFormat.TFRECORD else self._ranges
        if inputs := list(ranges(directory, info)):
            return inputs
        raise UserError(f"source {self.spec}: the split {self.split!r} has no examples")

    def _ranges(self, directory: str, info: tfds.core.DatasetInfo) -> Iterator[Input]:
        """Ranges of examples, counted in the split."""
        whole = info.splits[self.split.partition("[")[0]]
        examples, share = info.splits[self.split].num_examples, whole.num_bytes / max(1, whole.num_examples)
        rows = self._rows(info) * _BLOCKS_PER_INPUT
        for start in range(0, examples, rows):
            stop = min(examples, start + rows)
            yield Input((directory,), int(share * stop) - int(share * start), start=start, stop=stop)

    def _shards(self, directory: str, info: tfds.core.DatasetInfo) -> Iterator[Input]:
        """Ranges of examples, counted in their shard: its path is the second one."""
        for shard in info.splits[self.split].file_instructions:
            path = epath.Path(shard.filename)
            size = path.stat().length if path.exists() else 0  # reading it is the error
            size = size * shard.take // max(1, shard.examples_in_shard)
            yield Input((directory, os.fspath(path)), size, start=shard.skip, stop=shard.skip + shard.take)

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Ranges of examples, which the workers read, or the examples of a shard."""
        directory, *shard = part.paths
        info = _builder(directory).info
        rows, total = self._rows(info), part.stop - part.start
        records = self._examples(shard[0], part, record) if shard else None
        for start in range(part.start, part.stop, rows):
            stop = min(part.stop, start + rows)
            # In integers, so that the sizes sum to that of the input.
            before, after = (part.size * (row - part.start) // total for row in (start, stop))
            origin = shard[0] if shard else f"{directory}:{self.split}"
            examples = tuple(itertools.islice(records, stop - start)) if shard else None
            yield SourceBlock(f"{origin} {start}", (origin, directory, start, stop, examples), after - before)
        split = info.splits[self.split]
        if (part.paths[-1] == split.file_instructions[-1].filename) if shard else (part.stop == split.num_examples):
            record.files.append(
                {"name": f"{info.full_name}:{self.split}", "path": directory, "examples": split.num_examples}
            )

    def _examples(self, shard: str, part: Input, record: InputRecord) -> Iterator[bytes]:
        """Of a TFRecord file."""
        try:
            yield from tfrecord.read_records(shard, part.start, part.stop)
        except DamagedFileError as error:
            if not self.skip_damaged:
                raise
            record.damaged.append(str(error))

    def documents(self, block: SourceBlock) -> Iterator[Document | Skipped]:
        """A document for each example."""
        place, directory, start, stop, examples = block.payload
        key = self.field.replace(".", "/")
        try:
            examples = _records(directory, self.split, start, stop) if examples is None else examples
        except DamagedFileError as error:
            if not self.skip_damaged:
                raise
            yield Skipped("damaged_file", f"{place} {start}", str(error))
            return
        for row, record in enumerate(examples, start):
            origin = f"{place} {row}"
            features = tf_example_pb2.Example.FromString(record).features.feature
            values = features[key].bytes_list.value
            if not values:
                yield Skipped("missing_field", origin, f"the example has no {self.field!r}")
            else:
                fields = {name: _as_text(features[name.replace(".", "/")]) for name in self.fields}
                yield document_or_skipped(values[0], self.field, origin, self.max_record_bytes, fields)

    def _rows(self, info: tfds.core.DatasetInfo) -> int:
        """Examples in a block."""
        split = info.splits[self.split.partition("[")[0]]
        return max(1, self.block_bytes * split.num_examples // max(1, split.num_bytes))

    def _checked_info(self, directory: str) -> tfds.core.DatasetInfo:
        """TFDS's description of the dataset, after checks that it can be read."""
        info = _builder(directory).info
        if info.file_format not in _FORMATS:
            file_format = info.file_format.value if info.file_format else "in an unknown format"
            known = " and ".join(known.value for known in _FORMATS)
            raise UserError(f"source {self.spec}: {directory} is {file_format}; {known} can be read; {_PREPARE_HINT}")
        try:
            _ = info.splits[self.split]
        except (KeyError, ValueError) as error:
            splits = ", ".join(sorted(info.splits)) or "none"
            raise UserError(f"source {self.spec}: no split {self.split!r}; there are: {splits}") from error
        self._check_field(info.features, self.field, ("O",), "text")
        for field in self.fields:
            self._check_field(info.features, field, ("O", "i", "u", "f"), "text or a number")
        return info

    def _check_field(self, feature: Any, field: str, kinds: tuple[str, ...], words: str) -> None:
        """Checks that a field exists and has a NumPy type of some kinds."""
        for name in field.split("."):
            names = list(feature) if isinstance(feature, tfds.features.FeaturesDict) else []
            if name not in names:
                raise UserError(f"source {self.spec}: {missing_field_message(name, names)}")
            feature = feature[name]
        if feature.shape != () or np.dtype(feature.np_dtype).kind not in kinds:
            kind = " ".join(str(feature).split())
            raise UserError(f"source {self.spec}: the field {field!r} is {kind}, not {words}")


def _find(spec: str, name: str) -> epath.Path:
    """The directory of a dataset's version."""
    base = epath.Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    for place in (epath.Path(name).expanduser(), base / name):
        if (place / _INFO).exists():
            return place
        versions = [path.parent for path in place.glob(f"*/{_INFO}") if _VERSION.fullmatch(path.parent.name)]
        if versions:
            return max(versions, key=lambda folder: [int(number) for number in folder.name.split(".")])
    raise UserError(
        f"source {spec}: no dataset {name} prepared in {base} ($TFDS_DATA_DIR); if it has configurations, write"
        f" {name}/CONFIG; else {_PREPARE_HINT}"
    )


@functools.lru_cache(maxsize=4)
def _builder(directory: str) -> tfds.core.DatasetBuilder:
    return tfds.builder_from_directory(directory)


@functools.lru_cache(maxsize=4)
def _data_source(directory: str, split: str) -> Any:
    # Raw, because TFDS would decode every feature, images for example.
    raw = tfds.decode.DeserializeMethod.RAW_BYTES
    return _builder(directory).as_data_source(split, deserialize_method=raw)


def _records(directory: str, split: str, start: int, stop: int) -> list[bytes]:
    try:
        records = _data_source(directory, split).__getitems__(range(start, stop))
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise DamagedFileError(f"{directory}: cannot be read ({reason}); prepare the dataset again") from error
    if b"" in records:  # ArrayRecord's result for a truncated shard or a wrong checksum
        row = start + records.index(b"")
        raise DamagedFileError(
            f"{directory}: example {row} of {split} is damaged or cut off; prepare the dataset again"
        )
    return records


def _as_text(feature: Any) -> bytes | None:
    """The first value of a feature, numbers in decimal digits."""
    values = (*feature.bytes_list.value, *feature.int64_list.value, *feature.float_list.value)
    return next((value if isinstance(value, bytes) else str(value).encode() for value in values), None)
