"""The interface of sources of text: inputs are read sequentially and split into blocks; blocks give documents.

An input, a few small files or a range of a large one, can be read by any process, without the others; the inputs depend
on the files alone. Its blocks (`Source.read_blocks`) bound the memory of that process.
"""

import abc
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, Protocol

from bert_jax.errors import UserError, install_command
from bert_jax.storage.listing import FileVersion
from data_prep import languages
from data_prep.sources import encodings

BLOCK_BYTES = 4 << 20
"""Approximate size of the text of a block."""
RANGE_BYTES = 32 << 20
"""Bytes on disk of a range of a file: small enough that many workers share a file, large enough that finding the first
document of a range costs little (a block of bzip2, 0.9 MB of text)."""
MAX_RECORD_BYTES = 1 << 30
"""Longer JSON lines, articles and table cells are skipped, because records are read into memory as a whole."""


class DamagedFileError(UserError):
    """A file cannot be read, is truncated, damaged, or not text; `--skip-damaged` leaves it out."""


def field_name(setting: str | None) -> str | None:
    """FIELD of the setting `@FIELD` of a source; None: it has no field."""
    return setting[1:] if setting and setting.startswith("@") else None


@dataclasses.dataclass(frozen=True)
class Document:
    """A document of a source before cleaning, or a part of a document that is longer than a block."""

    origin: str
    """start of the document, for messages: "path:line", "path#page title", or a module; in a later range of a file,
    "path@byte:line" (see `text_chunks.TextChunk`)"""
    text: str
    """paragraphs separated by blank lines, or one sentence per line; the concatenated parts of a document are its text,
    and a part may be empty"""
    sentence_per_line: bool = False
    begins: bool = True
    """False: continues the last document of the previous block"""
    ends: bool = True
    """False: continues in the first document of the next block"""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """values of `Source.fields` that it has, as text"""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something that a source could not read as a document and skipped."""

    reason: str
    """a key: "undecodable", "malformed_json", "malformed_xml", "missing_field", "field_not_text", "empty_file", ..."""
    origin: str
    detail: str
    """what is wrong, and a remedy if there is one"""
    size: int = 0
    """bytes of text that are lost"""

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Input:
    """The unit of sequential reading: a file, several small files, or a range of a large one."""

    paths: tuple[str, ...]
    size: int
    """bytes on disk, or another measure of the work in bytes; for progress"""
    versions: tuple[str, ...] = ()
    """of the paths when they were found, see `storage.listing.FileVersion`; empty if they are not files of the user"""
    start: int = 0
    """first row, row group or byte on disk of a range"""
    stop: int = 0
    """the row, row group or byte after the last; 0: the whole files"""
    hash_only: bool = False
    """the file is hashed; other inputs have its text. SHA-256 cannot be computed by ranges, at 0.5 GB/s or more it is
    short beside the preparation of the text, and as an input of its own it delays no range."""
    sizes: tuple[int, ...] = ()
    """bytes on disk of each path of an input of several files"""

    @property
    def origin(self) -> str:
        """For messages."""
        path = self.paths[0] if self.paths else "the source"
        return f"{path}, from {self.start} on" if self.start else path


class FileSet(Protocol):
    """Files that no glob describes."""

    def find(self) -> dict[str, FileVersion]:
        """The files, sorted by path."""


@dataclasses.dataclass
class InputRecord:
    """What `Source.read_blocks` finds in an input besides its blocks."""

    files: list[dict] = dataclasses.field(default_factory=list)
    """an entry for each file: {"path", "sha256" of the file on disk, "bytes"}, or for a package {"name", "version"}"""
    damaged: list[str] = dataclasses.field(default_factory=list)
    """with `skip_damaged`, why text was left out"""
    damaged_bytes: int = 0
    """bytes on disk that were left out"""
    encodings: dict[str, int] = dataclasses.field(default_factory=dict)
    """number of files, by encoding"""
    lines: int = 0
    """line ends in the text of a range of a file"""
    text_bytes: int = 0
    """of a range of a file"""


@dataclasses.dataclass(frozen=True)
class SourceBlock:
    """The unit of work of a worker."""

    origin: str
    payload: Any
    """picklable; its type depends on the source"""
    size: int
    """the part of its input's `size` read since the previous block; the sizes of all blocks sum to it"""


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """A parsed SPEC; picklable and small. Its documents depend on the files alone."""

    spec: str
    block_bytes: int = dataclasses.field(default=BLOCK_BYTES, kw_only=True)
    """approximate size of the text of a block"""
    max_record_bytes: int = dataclasses.field(default=MAX_RECORD_BYTES, kw_only=True)
    """longer records are skipped"""
    language: str = dataclasses.field(default=languages.DEFAULT, kw_only=True)
    """ISO 639 code of its documents, `@FIELD` for a field of each record, or `auto` to identify each document's"""
    source_name: str | None = dataclasses.field(default=None, kw_only=True)
    """for weights of sampling, or `@FIELD`; None: the SPEC"""
    score: str | None = dataclasses.field(default=None, kw_only=True)
    """`@FIELD` with a number of each document, such as its quality; None: there is none"""
    encoding: str = dataclasses.field(default=encodings.UTF_8, kw_only=True)
    """of its files, or `auto` to identify each file's"""
    license: str | None = dataclasses.field(default=None, kw_only=True)
    """identifier, for corpus.json; None: not stated"""
    has_encodings: ClassVar[bool] = False
    """whether it reads files of text, which may be in other encodings than UTF-8"""
    has_fields: ClassVar[bool] = False
    """whether documents are records with fields, so that `language`, `source_name` and `score` can be some"""
    range_bytes: int = dataclasses.field(default=RANGE_BYTES, kw_only=True)
    """bytes on disk of a range of a file that can be split; half of it in a compressed file"""
    skip_damaged: bool = dataclasses.field(default=False, kw_only=True)
    """of a file that cannot be read, or is damaged or binary, the text before the damage is used: in its range if it is
    read by ranges, else in the file"""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that are read beside the text, each once."""
        return tuple(dict.fromkeys(filter(None, map(field_name, (self.language, self.source_name, self.score)))))

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> "Source":
        """Parses `KIND`, `KIND:GLOB` or `KIND:GLOB@FIELD`, as the class has a `pattern` and a `field`.

        Args:
          spec: as the user wrote it.
          argument: what follows the kind and its colon.
          workers: processes that `read_blocks` may use, for a class with `workers`.

        Raises:
          UserError: a part of the SPEC is missing or wrong.
        """
        kind, names = spec.partition(":")[0], {field.name for field in dataclasses.fields(cls)}
        values = {"workers": workers} if "workers" in names else {}
        if "pattern" not in names and argument:
            raise UserError(f"source {spec}: {kind} takes no glob; write just `{kind}`")
        if "pattern" in names:
            if not argument:
                raise UserError(f"source {spec}: say which files, e.g. `{kind}:texts/*.txt`")
            values["pattern"] = argument
        if "field" in names:
            values["pattern"], _, values["field"] = argument.rpartition("@")
            if not all(values.values()):
                example = f"`{kind}:{argument.rstrip('@')}@text`"
                raise UserError(f"source {spec}: say which field holds the text, e.g. {example}")
        return cls(spec, **values)

    @abc.abstractmethod
    def inputs(self) -> list[Input]:
        """All inputs, in the order of the text.

        Raises:
          UserError: no file matches, or a file is unusable.
        """

    @abc.abstractmethod
    def read_blocks(self, part: Input, record: InputRecord) -> Iterator[SourceBlock]:
        """Splits an input into blocks, at least one unless it is `hash_only`.

        Args:
          part: one of `inputs`.
          record: gets what is found; complete after the last block.

        Raises:
          DamagedFileError: a file cannot be read, is damaged or truncated, or is not text.
        """

    @abc.abstractmethod
    def documents(self, block: SourceBlock) -> Iterator[Document | Skipped]:
        """The documents of a block, in order, and what was skipped.

        If the first one does not begin its document, the previous block ends with the part before it; if the last one
        does not end it, the next block begins with the part after it.
        """

    def check_not_empty(self, documents: int, skipped: Mapping[str, int], first: Skipped | str | None) -> None:
        """Checks that a source gave documents; call it after everything was read.

        Args:
          documents: number of documents.
          skipped: number of skipped items by reason.
          first: the first skipped item.

        Raises:
          UserError: there was no document, usually because the name of a field or the kind is wrong.
        """
        if documents:
            return
        if first is None:
            raise UserError(f"source {self.spec}: contains no document; is this the right kind of source?")
        counts = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
        raise UserError(
            f"source {self.spec}: nothing could be used, everything was skipped ({counts}); the first: {first}"
        )


def import_optional(name: str, purpose: str, extra: str = "formats") -> ModuleType:
    """Imports a library of an optional extra.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name if name.startswith("backports.") else name.partition(".")[0]
        raise UserError(f"{purpose} needs {package}, which is missing: {install_command(extra)}") from error
