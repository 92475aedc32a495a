"""`tfds:NAME[/CONFIG]:SPLIT@FIELD`: a prepared TFDS dataset in ArrayRecord format, read without TensorFlow."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from bert_jax.errors import UserError
from data_prep.sources.base import Block, DamagedFileError, Document, Input, InputRecord, Skipped, Source
from data_prep.sources.field_validation import document_or_skipped, missing_field_message

# A slice of a split may contain a colon: train[:10%].
_ARGUMENT = re.compile(r"(?P<name>.+):(?P<split>[^:@\[\]]+(?:\[[^\[\]]*\])?)@(?P<field>[^@]+)")
_BLOCKS_PER_INPUT = 16
_INFO = "dataset_info.json"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)/?")
_PREPARE_HINT = (
    "on a machine with TensorFlow, prepare it with"
    " tfds.builder(NAME, file_format='array_record').download_and_prepare() and copy it here"
)


@dataclasses.dataclass(frozen=True)
class TfdsSource(Source):
    """`tfds:NAME[/CONFIG][/VERSION]:SPLIT@FIELD`, or a directory for the name; FIELD may be dotted.

    The dataset is searched below $TFDS_DATA_DIR, by default ~/tensorflow_datasets; of several versions the highest is
    read. SPLIT may be a slice, e.g. `train[:10%]`. The payload of a block is a range of examples.
    """

    name: str
    split: str
    field: str

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> Source:
        """`tfds:NAME:SPLIT@FIELD`."""
        if match := _ARGUMENT.fullmatch(argument):
            return cls(spec, **match.groupdict())
        raise UserError(f"source {spec}: write tfds:NAME:SPLIT@FIELD, e.g. `tfds:lm1b:train@text`")

    def inputs(self) -> list[Input]:
        """Ranges of examples with about 16 blocks each."""
        directory = os.fspath(_find(self.spec, self.name))
        info = self._checked_info(directory)
        examples = info.splits[self.split].num_examples
        rows, size = self._rows(info), info.splits[self.split.partition("[")[0]].num_bytes
        share = size / max(1, info.splits[self.split.partition("[")[0]].num_examples)
        inputs = []
        for start in range(0, examples, rows * _BLOCKS_PER_INPUT):
            stop = min(examples, start + rows * _BLOCKS_PER_INPUT)
            inputs.append(Input((directory,), int(share * stop) - int(share * start), start, stop))
        if not inputs:
            raise UserError(f"source {self.spec}: the split {self.split!r} has no examples")
        return inputs

    def blocks(self, part: Input, record: InputRecord) -> Iterator[Block]:
        """Ranges of examples; the workers read them."""
        (directory,) = part.paths
        info = _builder(directory).info
        rows, total = self._rows(info), part.stop - part.start
        for start in range(part.start, part.stop, rows):
            stop = min(part.stop, start + rows)
            # In integers, so that the sizes sum to that of the input.
            before, after = (part.size * (row - part.start) // total for row in (start, stop))
            yield Block(f"{directory}:{self.split} {start}", (directory, start, stop), after - before)
        split = info.splits[self.split]
        if part.stop == split.num_examples:
            record.files.append(
                {"name": f"{info.full_name}:{self.split}", "path": directory, "examples": split.num_examples}
            )

    def documents(self, block: Block) -> Iterator[Document | Skipped]:
        """A document for each example."""
        directory, start, stop = block.payload
        key = self.field.replace(".", "/")
        try:
            records = _records(directory, self.split, start, stop)
        except DamagedFileError as error:
            if not self.skip_damaged:
                raise
            yield Skipped("damaged_file", f"{directory}:{self.split} {start}", str(error))
            return
        for row, record in enumerate(records, start):
            origin = f"{directory}:{self.split} {row}"
            values = tf_example_pb2.Example.FromString(record).features.feature[key].bytes_list.value
            if not values:
                yield Skipped("missing_field", origin, f"the example has no {self.field!r}")
            else:
                yield document_or_skipped(values[0], self.field, origin, self.max_record_bytes)

    def _rows(self, info: tfds.core.DatasetInfo) -> int:
        """Examples in a block."""
        split = info.splits[self.split.partition("[")[0]]
        return max(1, self.block_bytes * split.num_examples // max(1, split.num_bytes))

    def _checked_info(self, directory: str) -> tfds.core.DatasetInfo:
        """TFDS's description of the dataset, after checks that it can be read."""
        info = _builder(directory).info
        if info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
            file_format = info.file_format.value if info.file_format else "an unknown format"
            raise UserError(
                f"source {self.spec}: {directory} is {file_format}, which needs TensorFlow; {_PREPARE_HINT}"
            )
        try:
            _ = info.splits[self.split]
        except (KeyError, ValueError) as error:
            splits = ", ".join(sorted(info.splits)) or "none"
            raise UserError(f"source {self.spec}: no split {self.split!r}; there are: {splits}") from error
        feature = info.features
        for name in self.field.split("."):
            names = list(feature) if isinstance(feature, tfds.features.FeaturesDict) else []
            if name not in names:
                raise UserError(f"source {self.spec}: {missing_field_message(name, names)}")
            feature = feature[name]
        if feature.shape != () or np.dtype(feature.np_dtype) != object:
            kind = " ".join(str(feature).split())
            raise UserError(f"source {self.spec}: the field {self.field!r} is {kind}, not text")
        return info


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
