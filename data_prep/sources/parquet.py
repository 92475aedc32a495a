"""`parquet:GLOB@FIELD`: Parquet files, each row a record with a document in one of its columns.

pyarrow reads the column page by page, so that neither other columns nor a whole row group is in memory.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import UserError
from data_prep.sources import files
from data_prep.sources.base import (
    DamagedFileError,
    Document,
    FileSet,
    Input,
    InputRecord,
    Skipped,
    Source,
    SourceBlock,
    import_optional,
)
from data_prep.sources.field_validation import document_or_skipped, missing_field_message

_BLOCKS_PER_INPUT = 16
_PAGE_BUFFER_BYTES = 1 << 20
_MAX_ROWS = 1 << 14
"""Rows to read at a time: if values repeat, their size in memory can be much larger than in the file."""


@dataclasses.dataclass(frozen=True)
class ParquetSource(Source):
    """`parquet:GLOB@FIELD`; FIELD may be dotted: `meta.text` is the field `text` of the struct `meta`.

    An input is a range of row groups; the payload of a block is the path, the number of its first row, and the
    column's values, and those of the language's column if there is one, serialised by Arrow.
    """

    pattern: str | FileSet
    field: str
    has_fields = True

    def inputs(self) -> list[Input]:
        """Ranges of row groups with about 16 blocks of the column each."""
        inputs = []
        for path, (_, version) in files.find_files(self.spec, self.pattern).items():
            versions = (version,)
            try:
                sizes = self._row_group_sizes(path)
            except DamagedFileError:
                if not self.skip_damaged:
                    raise
                sizes = []  # `read_blocks` records why
            ranges, start = [], 0
            for stop in range(1, len(sizes) + 1):
                if stop == len(sizes) or sum(sizes[start:stop]) >= _BLOCKS_PER_INPUT * self.block_bytes:
                    ranges.append(Input((path,), sum(sizes[start:stop]), versions, start, stop))
                    start = stop
            if len(ranges) > 1:
                inputs.append(Input((path,), 0, versions, hash_only=True))
            inputs += ranges or [Input((path,), 0, versions)]
        return inputs

    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Reads the column; a file with one range is hashed after its last row."""
        (path,) = part.paths
        reported = 0
        try:
            if part.hash_only:
                record.files.append({"path": path, **files.file_entry(path)})
                return
            for block in self._read(path, part, record):
                yield block
                reported += block.size
        except DamagedFileError as error:
            if not self.skip_damaged:
                raise
            record.damaged.append(str(error))
            if not part.hash_only:
                yield SourceBlock(path, (path, 0, b""), part.size - reported)

    def _read(self, path: str, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        with _open_parquet(path) as parquet:
            groups = [parquet.metadata.row_group(group) for group in range(part.start, part.stop)]
            columns = self._names(path, parquet.schema_arrow)
            first = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
            rows = sum(group.num_rows for group in groups)
            begin = first
            for column, *language in self._columns(parquet, part, columns):
                for start, stop in self._cuts(column):
                    # In integers, so that the sizes sum to that of the input.
                    done = [part.size * (row - first) // rows for row in (begin, begin + stop - start)]
                    payload = path, begin, _serialized([one[start:stop] for one in (column, *language)])
                    yield SourceBlock(f"{path}:row {begin}", payload, done[1] - done[0])
                    begin += stop - start
            is_whole = part.start == 0 and part.stop == parquet.num_row_groups
        if not rows:
            yield SourceBlock(path, (path, 0, None), part.size)
        if is_whole:
            record.files.append({"path": path, **files.file_entry(path)})

    def _row_group_sizes(self, path: str) -> list[int]:
        """Bytes of the column in each row group; checks that it exists."""
        with _open_parquet(path) as parquet:
            self._names(path, parquet.schema_arrow)
            return [self._sizes(parquet.metadata.row_group(group))[0] for group in range(parquet.num_row_groups)]

    def documents(self, block: SourceBlock) -> Iterator[Document | Skipped]:
        """A document for each row."""
        path, begin, data = block.payload
        if data is None:
            yield Skipped("empty_file", path, "has no rows")
        if not data:
            return
        for row, (value, *others) in enumerate(zip(*_values(data), strict=True), begin):
            fields = dict(zip(self.fields, others, strict=True))
            yield document_or_skipped(value, self.field, f"{path}:row {row}", self.max_record_bytes, fields)

    def _names(self, path: str, schema: Any) -> list[list[str]]:
        """`_field_names` of the text and of the other fields, which may be numbers."""
        names = [self._field_names(path, schema, self.field, _TEXT_TYPES)]
        return names + [self._field_names(path, schema, field, _TEXT_TYPES | _NUMBER_TYPES) for field in self.fields]

    def _field_names(self, path: str, schema: Any, field: str, types: Collection[str]) -> list[str]:
        """The names of a field from the outermost struct inwards; checks that it exists and has one of the types."""
        names = [field] if field in schema.names else field.split(".")
        kind = import_optional("pyarrow", "reading Parquet").struct(list(schema))
        for name in names:
            fields = [field.name for field in kind] if hasattr(kind, "get_field_index") else []
            if name not in fields:
                raise UserError(f"source {self.spec}: {path}: {missing_field_message(name, fields)}")
            kind = kind.field(name).type
        if str(getattr(kind, "value_type", kind)) not in types or hasattr(kind, "value_field"):
            raise UserError(
                f"source {self.spec}: {path}: the column {field!r} has type {kind}, not {_TYPE_WORDS[types]}"
            )
        return names

    def _sizes(self, group: Any) -> tuple[int, int]:
        """Bytes of the column in a row group, compressed and uncompressed."""
        columns = [group.column(index) for index in range(group.num_columns)]
        own = [column for column in columns if column.path_in_schema == self.field]
        return sum(c.total_compressed_size for c in own), sum(c.total_uncompressed_size for c in own)

    def _columns(self, parquet: Any, part: Input, columns: list[list[str]]) -> Iterator[list[Any]]:
        """The values of the columns, as large binary arrays; those of the first have about the size of a block."""
        pyarrow, compute = (import_optional(name, "reading Parquet") for name in ("pyarrow", "pyarrow.compute"))
        for group in range(part.start, part.stop):
            metadata = parquet.metadata.row_group(group)
            rows = self.block_bytes * metadata.num_rows // max(1, self._sizes(metadata)[1])
            rows = min(max(1, rows), _MAX_ROWS)
            paths = [".".join(names) for names in columns]
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=paths, use_threads=False):
                values = []
                for names in columns:
                    column = batch.column(names[0])
                    for name in names[1:]:
                        column = compute.struct_field(column, name)
                    if pyarrow.types.is_dictionary(column.type):
                        column = column.dictionary_decode()
                    if str(column.type) in _NUMBER_TYPES:
                        column = column.cast(pyarrow.large_string())
                    values.append(column.cast(pyarrow.large_binary()))
                yield values

    def _cuts(self, column: Any) -> Iterator[tuple[int, int]]:
        """Ranges of rows with about a block of text, at least a row."""
        lengths = import_optional("pyarrow.compute", "reading Parquet").binary_length(column).fill_null(0)
        ends = np.cumsum(lengths.to_numpy(zero_copy_only=False))
        start = 0
        while start < len(column):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self.block_bytes, side="right")))
            yield start, stop
            start = stop


_TEXT_TYPES = frozenset({"string", "large_string", "string_view", "binary", "large_binary", "binary_view"})
_NUMBER_TYPES = frozenset(
    {"float", "double"} | {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
)
_TYPE_WORDS = {_TEXT_TYPES: "text", _TEXT_TYPES | _NUMBER_TYPES: "text or a number"}


@contextlib.contextmanager
def _open_parquet(path: str) -> Iterator[Any]:
    """Opens a Parquet file; errors while it is open become a UserError."""
    pyarrow, parquet = (import_optional(name, "reading Parquet") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with (
            epath.Path(path).open("rb") as file,
            parquet.ParquetFile(file, buffer_size=_PAGE_BUFFER_BYTES, pre_buffer=False) as parquet_file,
        ):
            yield parquet_file
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DamagedFileError(
            f"{path}: cannot be read as Parquet ({reason}); is it complete? download it again"
        ) from error


def _serialized(columns: list[Any]) -> bytes:
    """Arrow's stream format, which includes the schema."""
    pyarrow = import_optional("pyarrow", "reading Parquet")
    batch = pyarrow.RecordBatch.from_arrays(columns, [str(index) for index in range(len(columns))])
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _values(data: bytes) -> list[list[bytes | None]]:
    pyarrow = import_optional("pyarrow", "reading Parquet")
    with pyarrow.ipc.open_stream(pyarrow.py_buffer(data)) as reader:
        return [column.to_pylist() for column in reader.read_next_batch().columns]
