"""What a source of text is: inputs are read from begin to end, cut into blocks, blocks become documents.

Reading and cutting (`Source.blocks`) is cheap and sequential, so that one process can feed many workers;
decoding and parsing (`Source.documents`) is a function of one block, wherever it runs.
"""

import abc
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from bert_jax.errors import UserError, install_command

BLOCK_BYTES = 4 << 20
"""About how much text a block holds: enough that handing it to a process costs nothing beside the work on it."""
MAX_RECORD_BYTES = 1 << 30
"""A JSON line, an article or a table cell that is longer is left out: records are held in memory whole."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A document as its source gave it, not yet cleaned, or a part of one that is longer than a block."""

    origin: str
    """where it begins, for messages: "path:line", "path#page title", or a module"""
    text: str
    """paragraphs divided by blank lines, or one sentence on each line; the parts of a document, put together, are
    its text, and a part may be empty"""
    sentence_per_line: bool = False
    begins: bool = True
    """False: goes on from the last document of the block before"""
    ends: bool = True
    """False: goes on with the first document of the next block"""


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Something a source could not read as a document and left out."""

    reason: str
    """a key: "invalid_utf8", "malformed_json", "malformed_xml", "missing_field", "field_not_text", "empty_file", ..."""
    origin: str
    detail: str
    """what is wrong there, and what to do about it where that can be said"""


@dataclasses.dataclass(frozen=True)
class Input:
    """What one reader reads from begin to end: a large file, several small ones, or a range of rows."""

    paths: tuple[str, ...]
    size: int
    """bytes on disk, or another measure of the work in bytes; for progress"""
    start: int = 0
    """first row or row group, where it is a range"""
    stop: int = 0
    """the row or row group after its last"""


@dataclasses.dataclass(frozen=True)
class Block:
    """What a worker is handed at a time."""

    origin: str
    payload: Any
    """picklable; what it is, only its source knows"""
    size: int
    """how much of its input's `size` has been read since the block before; the sizes of all sum to it"""


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """A parsed SPEC; picklable and small. What it gives depends on the files alone."""

    spec: str

    @abc.abstractmethod
    def inputs(self) -> list[Input]:
        """All there is to read, in the order of the text.

        Raises:
          UserError: no file matches, or one can be seen to be of no use.
        """

    @abc.abstractmethod
    def blocks(self, part: Input, file_entries: list[dict]) -> Iterator[Block]:
        """Cuts an input into blocks; at least one.

        Args:
          part: one of `inputs`.
          file_entries: what was read is appended here when its end has been reached, for a file
            {"path", "sha256" of what lies on the disk, "bytes"}, for a package {"name", "version"}.

        Raises:
          UserError: a file cannot be read, is damaged or truncated, or is no text.
        """

    @abc.abstractmethod
    def documents(self, block: Block) -> Iterator[Document | Skipped]:
        """The documents of a block, in order, and what had to be left out.

        Where the first one does not begin its document, or the last one does not end it, the whole block before
        or after it belongs to the same reading: `begins` and `ends` always fit together across blocks.
        """

    def check_not_empty(self, documents: int, skipped: Mapping[str, int], first: Skipped | None) -> None:
        """To be called when everything has been read.

        Args:
          documents: how many the source gave.
          skipped: how many it left out for each reason.
          first: the first thing it left out.

        Raises:
          UserError: there was no document at all, most often because a field's name or the kind is mistyped.
        """
        if documents:
            return
        if first is None:
            raise UserError(f"--source {self.spec}: holds no document; is this the right kind of source?")
        counts = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
        raise UserError(
            f"--source {self.spec}: nothing could be used, everything was left out ({counts}); the first:"
            f" {first.origin}: {first.detail}"
        )


def import_optional(name: str, purpose: str) -> ModuleType:
    """A library of the optional extra `formats`.

    Raises:
      UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{purpose} needs {name}, which is missing: {install_command('formats')}") from error
