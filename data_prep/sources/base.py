"""The interface of sources of text: inputs are read sequentially and split into blocks; blocks give documents.

Reading and splitting (`Source.blocks`) is cheap and sequential, so that one process can feed many workers; decoding and
parsing (`Source.documents`) depends on one block alone and runs in any process.
"""

import abc
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from bert_jax.errors import UserError, install_command

BLOCK_BYTES = 4 << 20
"""Approximate size of the text of a block: large enough that sending it to a process costs little."""
MAX_RECORD_BYTES = 1 << 30
"""Longer JSON lines, articles and table cells are skipped, because records are read into memory as a whole."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document of a source before cleaning, or a part of a document that is longer than a block."""

    origin: str
    """start of the document, for messages: "path:line", "path#page title", or a module"""
    text: str
    """paragraphs separated by blank lines, or one sentence per line; the concatenated parts of a document are its text,
    and a part may be empty"""
    sentence_per_line: bool = False
    begins: bool = True
    """False: continues the last document of the previous block"""
    ends: bool = True
    """False: continues in the first document of the next block"""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something that a source could not read as a document and skipped."""

    reason: str
    """a key: "invalid_utf8", "malformed_json", "malformed_xml", "missing_field", "field_not_text", "empty_file", ..."""
    origin: str
    detail: str
    """what is wrong, and a remedy if there is one"""

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Input:
    """The unit of sequential reading: a large file, several small files, or a range of rows."""

    paths: tuple[str, ...]
    size: int
    """bytes on disk, or another measure of the work in bytes; for progress"""
    start: int = 0
    """first row or row group of a range"""
    stop: int = 0
    """the row or row group after the last"""


@dataclasses.dataclass(frozen=True)
class Block:
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

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> "Source":
        """Parses `KIND`, `KIND:GLOB` or `KIND:GLOB@FIELD`, as the class has a `pattern` and a `field`.

        Args:
          spec: as the user wrote it.
          argument: what follows the kind and its colon.
          workers: processes that `blocks` may use, for a class with `workers`.

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
    def blocks(self, part: Input, file_entries: list[dict]) -> Iterator[Block]:
        """Splits an input into blocks, at least one.

        Args:
          part: one of `inputs`.
          file_entries: a list to which an entry is appended after each file is read, {"path", "sha256" of the file on
            disk, "bytes"}, or for a package {"name", "version"}.

        Raises:
          UserError: a file cannot be read, is damaged or truncated, or is not text.
        """

    @abc.abstractmethod
    def documents(self, block: Block) -> Iterator[Document | Skipped]:
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


def import_optional(name: str, purpose: str) -> ModuleType:
    """Imports a library of the optional extra `formats`.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{purpose} needs {name}, which is missing: {install_command('formats')}") from error
