"""Finds files by a glob, groups them, and reads them: decompresses, hashes, and checks that they are text."""

import bz2
import contextlib
import hashlib
import os
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from etils import epath

from bert_jax.errors import UserError
from data_prep.sources.base import Input, import_optional

_WILDCARD = re.compile(r"[*?\[]")
_RAW_BYTES = 1 << 20
"""Bytes of compressed data that are read at a time."""
_HEAD_BYTES = 8192
"""Bytes that are searched for a NUL byte, to detect binary files."""


def find_files(spec: str, pattern: str) -> list[tuple[str, int]]:
    """Path and size in bytes of the files that match a glob, sorted by path.

    Raises:
      UserError: no file matches, or the glob has a `**` and is not on a local disk.
    """
    # epath does not support "**", which is slow on object stores; on a local disk it is fast.
    path_type = epath.Path if "://" in pattern else pathlib.Path
    parts = path_type(pattern).expanduser().parts
    fixed = next((i for i, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
    root = path_type(*parts[:fixed])
    try:
        matches = list(root.glob("/".join(parts[fixed:]))) if fixed < len(parts) else [root]
    except NotImplementedError as error:
        raise UserError(f"source {spec}: `**` works on local disks only; name the folders") from error
    files = sorted((epath.Path(path) for path in matches if path.is_file()), key=os.fspath)
    if not files:
        if root.is_dir() and fixed == len(parts):
            kind = spec.partition(":")[0]
            raise UserError(f"source {spec}: {root} is a directory; write `{kind}:{root}/*`, or name its files")
        raise UserError(f"source {spec}: no file matches {pattern}")
    return [(os.fspath(path), path.stat().length) for path in files]


def group_files(sizes: Sequence[tuple[str, int]], max_bytes: int) -> list[Input]:
    """Groups consecutive files into inputs of at most `max_bytes`; a larger file is an input of its own."""
    inputs: list[Input] = []
    for path, size in sizes:
        if inputs and inputs[-1].size + size <= max_bytes:
            inputs[-1] = Input((*inputs[-1].paths, path), inputs[-1].size + size)
        else:
            inputs.append(Input((path,), size))
    return inputs


class DecompressingReader:
    """Reads a file sequentially, decompresses it, and hashes the file on disk.

    .gz, .bz2 and .zst files are decompressed, with any number of members, streams or frames per file.
    """

    def __init__(self, path: str):
        """Opens a file.

        Raises:
          UserError: it cannot be opened, is damaged at its start, or is not text.
        """
        self.path = path
        self.raw_bytes = 0
        """bytes of the file that have been read"""
        self._digest = hashlib.sha256()
        with readable(path):
            self._file: BinaryIO = epath.Path(path).open("rb")
        try:
            kind = pathlib.PurePath(path).suffix.lower()
            self._chunks = _decompress(path, kind, self._raw) if kind in _DECOMPRESSORS else None
            self._rest = b""
            head = self.read(_HEAD_BYTES)
            self._rest = head + self._rest
            _check_is_text(path, head)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "DecompressingReader":
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end of the file.

        Raises:
          UserError: the file cannot be read, or its compressed data is damaged or truncated.
        """
        parts = [self._rest[:size]] if self._rest else []
        missing = size - len(self._rest)
        self._rest = self._rest[size:]
        while missing > 0:
            part = self._raw(missing) if self._chunks is None else next(self._chunks, b"")
            if not part:
                break
            parts.append(part[:missing])
            self._rest = part[missing:]
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def file_entry(self) -> dict:
        """{"path", "sha256", "bytes"} of the file on disk; call it after reading to the end."""
        return {"path": self.path, "sha256": self._digest.hexdigest(), "bytes": self.raw_bytes}

    def _raw(self, size: int) -> bytes:
        with readable(self.path):
            data = self._file.read(size)
        self._digest.update(data)
        self.raw_bytes += len(data)
        return data


def file_entry(path: epath.PathLike) -> dict:
    """{"sha256", "bytes"} of a file."""
    with epath.Path(path).open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns an OSError while reading a file into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{path}: cannot be read ({reason}); leave it out of the source") from error


def _check_is_text(path: str, head: bytes) -> None:
    # UTF-16, UTF-32, archives and unknown compressions have NUL bytes; PDF has them later.
    if b"\0" in head or head.startswith(b"%PDF-"):
        raise UserError(
            f"{path}: is not UTF-8 text; convert it (compressed files end in {', '.join(_DECOMPRESSORS)}; other"
            " encodings need e.g. `iconv -f UTF-16 -t UTF-8`), or leave it out of the source"
        )


class _Gzip:
    """zlib's decompressor with the interface of those of bz2 and zstd."""

    def __init__(self):
        self._zlib = zlib.decompressobj(wbits=31)
        self._pending = b""

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._pending

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        result = self._zlib.decompress(self._pending + data, max_length)
        self._pending = self._zlib.unconsumed_tail
        return result


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    zstd = import_optional("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "reading .zst")
    return zstd.ZstdDecompressor, zstd.ZstdError


# Constructor of the decompressor, and the exception that it raises.
_DECOMPRESSORS: dict[str, Callable[[], tuple[Callable[[], Any], type[Exception]]]] = {
    ".gz": lambda: (_Gzip, zlib.error),
    ".bz2": lambda: (bz2.BZ2Decompressor, OSError),
    ".zst": _zstd,
}


def _decompress(path: str, kind: str, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Decompressed data in pieces of at most 1 MiB, for any compression ratio.

    The file objects of bz2 and zstd are not used: they ignore damaged data after the first stream.
    """
    new, damage = _DECOMPRESSORS[kind]()
    data = read(_RAW_BYTES)
    while True:
        decompressor = new()
        while not decompressor.eof:
            try:
                result = decompressor.decompress(data, _RAW_BYTES)
            except damage as error:
                raise UserError(
                    f"{path}: damaged {kind} data ({error}); download it again, or rename it if it is not {kind}"
                ) from error
            if result:
                yield result
            if decompressor.eof:
                break
            data = read(_RAW_BYTES) if decompressor.needs_input else b""
            if decompressor.needs_input and not data and not result:
                raise UserError(f"{path}: truncated, its {kind} data has no end; download it again")
        data = decompressor.unused_data.lstrip(b"\0")  # some tools pad with zeros
        while not data and (more := read(_RAW_BYTES)):
            data = more.lstrip(b"\0")
        if not data:
            return
