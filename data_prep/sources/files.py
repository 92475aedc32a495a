"""Finds files by a glob and reads them: decompresses, hashes, checks that they are text."""

import bz2
import contextlib
import functools
import hashlib
import io
import os
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage import listing
from bert_jax.storage.listing import FileVersion, file_version
from bert_jax.storage.paths import is_remote, to_path
from bert_jax.storage.ranges import CONCURRENT_REQUESTS, ByteRange, read_ranges
from data_prep.sources import encodings
from data_prep.sources.base import DamagedFileError, FileSet, Input, import_optional

_RAW_BYTES = 1 << 20
"""Bytes of a file, or of decompressed data, at a time."""
_COMPRESSED_BYTES = 1 << 17
"""Of compressed data: each member of gzip copies what follows it."""
_HEAD_BYTES = 8192
"""Bytes that are searched for a NUL byte, to detect binary files."""

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS left in place of the content."""

OnDamage = Callable[[DamagedFileError], None]
"""What to do about damage: raises it, or records it, and the text ends there."""


def find_files(spec: str, pattern: str | FileSet) -> dict[str, FileVersion]:
    """The files of `listing.find_files`, or of a set.

    Raises:
      UserError: no file matches, or the store cannot be listed.
    """
    if not isinstance(pattern, str):
        return pattern.find()
    try:
        found = listing.find_files(pattern)
    except ValueError as error:
        raise UserError(f"source {spec}: not a glob: {str(error).lower()}") from error
    if found:
        return found
    path = to_path(pattern)
    if not is_remote(path) and path.is_dir():
        kind, _, rest = spec.partition(":")
        end = rest.removeprefix(pattern)  # a field
        raise UserError(f"source {spec}: {path} is a directory; write `{kind}:{path}/*{end}`, or name its files")
    if not is_remote(path) and os.path.lexists(path):
        raise UserError(f"source {spec}: {path} is not a file, but a device, a pipe, or a link to no file")
    raise UserError(f"source {spec}: no file matches {pattern}")


def check_unchanged(part: Input) -> None:
    """Checks that the files of an input are still those that were found.

    Raises:
      UserError: a file has changed since, or is gone.
    """

    def is_same(path: str, version: str) -> bool:
        try:
            return file_version(path).version == version
        except FileNotFoundError:
            return False

    pairs = [*zip(part.paths, part.versions, strict=False)]
    threads = CONCURRENT_REQUESTS if pairs and is_remote(part.paths[0]) else 1
    with ThreadPoolExecutor(threads) as pool:
        same = [*pool.map(is_same, *zip(*pairs, strict=True))] if pairs else []
    for (path, _), unchanged in zip(pairs, same, strict=True):
        if not unchanged:
            raise UserError(
                f"{path}: was changed or removed while it was read; start the same command again when nothing writes"
                " to it"
            )


def request_together(part: Input) -> dict[str, bytes]:
    """The files of an input of several files in a store, requested at the same time, by path; else nothing.

    Nothing either if one of them is gone or denied, and no file that was not received completely: these are read alone.
    """
    if len(part.sizes) < 2 or not is_remote(part.paths[0]):
        return {}
    sizes = dict(zip(part.paths, part.sizes, strict=True))
    # With a byte more, in case that a file has grown, which `check_unchanged` reports; an empty one has no range.
    ranges = {path: ByteRange(to_path(path), 0, size + 1, at_most=True) for path, size in sizes.items() if size}
    try:
        contents = dict.fromkeys(sizes, b"") | dict(zip(ranges, read_ranges([*ranges.values()]), strict=True))
    except OSError:
        return {}
    return {path: content for path, content in contents.items() if len(content) >= sizes[path]}


class TextReader:
    """Reads the text of a file, or of a range of one, sequentially, as UTF-8."""

    def __init__(self, path: str, on_damage: OnDamage, start: int = 0, encoding: str | None = encodings.UTF_8):
        self.path = path
        self.encoding = encoding
        """of the file; None: it is not text"""
        self.start = start
        """byte of the file on disk at which the range begins"""
        self.raw_bytes = 0
        """bytes of the file that have been read"""
        self.is_damaged = False
        """the text ends at damage that `on_damage` did not raise"""
        self.used_bytes = 0
        """bytes of the file that had been read at the damage"""
        self._on_damage = on_damage
        self._next: Callable[[int], bytes] = lambda size: b""
        """a piece of the text, of about that size or another; empty at its end"""
        self._rest = b""

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end of the text.

        Raises:
          DamagedFileError: the file cannot be read, or its compressed data is damaged or truncated, and `on_damage`
            raises it; if it does not, the text ends there.
        """
        parts = [self._rest[:size]] if self._rest else []
        missing = size - len(self._rest)
        self._rest = self._rest[size:]
        while missing > 0:
            try:
                part = self._next(missing)
            except DamagedFileError as error:
                self.end_at(error)
                break
            if not part:
                break
            parts.append(part[:missing])
            self._rest = part[missing:]
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end_at(self, error: DamagedFileError) -> None:
        """Ends the text at damage, unless `on_damage` raises it."""
        self._on_damage(error)
        self.is_damaged, self.used_bytes = True, self.raw_bytes
        self._next = lambda size: b""


def _raise(error: DamagedFileError) -> None:
    raise error


class DecompressingReader(TextReader):
    """Reads a file sequentially, decompresses it, and hashes the file on disk.

    .gz, .bz2 and .zst files are decompressed, with any number of members, streams or frames per file.
    """

    def __init__(
        self,
        path: str,
        on_damage: OnDamage = _raise,
        encoding: str | None = encodings.UTF_8,
        content: bytes | None = None,
    ):
        """Opens a file.

        Args:
          path: of the file.
          on_damage: called with damage.
          encoding: of the text; `auto`: it is identified, and becomes the attribute `encoding`; None: it is not text.
          content: of the file on disk, if it was read.

        Raises:
          DamagedFileError: it cannot be opened, is damaged at its start, or is not text.
        """
        super().__init__(path, on_damage, encoding=encoding)
        self._digest = hashlib.sha256()
        with readable(path):
            self._file: BinaryIO = epath.Path(path).open("rb") if content is None else io.BytesIO(content)
        try:
            kind = compression(path)
            if kind:
                pieces = decompress(path, kind, self._raw)
                self._next = lambda size: next(pieces, b"")
            else:
                self._next = self._raw
            if encoding is None:
                return
            is_auto = encoding == encodings.AUTO
            samples = [self.read(encodings.PIECE_BYTES * encodings.PIECES if is_auto else _HEAD_BYTES)]
            head = samples[0] + self._rest
            if is_auto and not kind:
                samples += self._samples(len(head))
            self.encoding = _text_encoding(path, samples, encoding)
            if self.encoding != encodings.UTF_8:
                self._next = encodings.to_utf_8(_with_head(head, self._next), self.encoding)
                head = b""
            self._rest = head
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "DecompressingReader":
        return self

    def __exit__(self, *_):
        self._file.close()

    def file_entry(self) -> dict:
        """{"path", "sha256", "bytes"} of the file on disk; reads what damage has left unread."""
        while self._raw(_RAW_BYTES):
            pass
        return {"path": self.path, "sha256": self._digest.hexdigest(), "bytes": self.raw_bytes}

    def _samples(self, known: int) -> Iterator[bytes]:
        """Whole lines of evenly spaced places after the first `known` bytes of a file that is not compressed."""
        with readable(self.path):
            size = self._file.seek(0, os.SEEK_END)
            for index in range(1, encodings.PIECES):
                place = index * size // encodings.PIECES
                if place >= known:
                    self._file.seek(place)
                    data = self._file.read(encodings.PIECE_BYTES)
                    yield encodings.whole_lines(data)
            self._file.seek(known)

    def _raw(self, size: int) -> bytes:
        with readable(self.path):
            data = self._file.read(size)
        self._digest.update(data)
        self.raw_bytes += len(data)
        return data


def file_entry(path: epath.PathLike) -> dict:
    """{"sha256", "bytes"} of a file.

    Raises:
      DamagedFileError: it cannot be read.
    """
    with readable(os.fspath(path)), epath.Path(path).open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.seek(0, os.SEEK_END)}


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns an OSError while reading a file into a DamagedFileError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DamagedFileError(f"{path}: cannot be read ({reason}); leave it out of the source") from error


def _text_encoding(path: str, samples: list[bytes], encoding: str) -> str:
    """The encoding of a file, of which the first sample is the start; checks that it is text."""
    if samples[0].startswith(b"%PDF-"):
        raise DamagedFileError(f"{path}: is a PDF file; extract its text, or leave it out of the source")
    if samples[0].startswith(POINTER):
        raise DamagedFileError(f"{path}: is a pointer of Git LFS without the content; run `git lfs pull` in its folder")
    # UTF-16, UTF-32, archives and unknown compressions have NUL bytes. These two encodings need a byte order mark.
    if encoding not in (encodings.AUTO, "utf-16", "utf-32") and (
        b"\0" not in samples[0] or not encodings.keeps_ascii(encoding)
    ):
        return encoding
    found = encodings.identify(samples)
    if found is None:
        raise DamagedFileError(
            f"{path}: is binary, not text; leave it out of the source (compressed files must end in"
            f" {', '.join(_DECOMPRESSORS)})"
        )
    if encoding not in (encodings.AUTO, found):
        raise DamagedFileError(f"{path}: is {found}, not {encoding}; add --encoding {found}, or auto")
    return found


def _with_head(head: bytes, read: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """A function that gives bytes that were read before, then further ones."""
    parts = [head]
    return lambda size: parts.pop() if parts else read(size)


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
    module = import_optional("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", "reading .zst")
    # The largest, of `zstd --long=31`; without it 27. A frame takes the memory of its own window.
    window = {module.DecompressionParameter.window_log_max: module.DecompressionParameter.window_log_max.bounds()[1]}
    return functools.partial(module.ZstdDecompressor, options=window), module.ZstdError


# Constructor of the decompressor, and the exception that it raises.
_DECOMPRESSORS: dict[str, Callable[[], tuple[Callable[[], Any], type[Exception]]]] = {
    ".gz": lambda: (_Gzip, zlib.error),
    ".bz2": lambda: (bz2.BZ2Decompressor, OSError),
    ".zst": _zstd,
}


def compression(path: str) -> str | None:
    """ ".gz", ".bz2", ".zst", or None."""
    kind = pathlib.PurePath(path).suffix.lower()
    return kind if kind in _DECOMPRESSORS else None


def truncated(path: str, kind: str) -> DamagedFileError:
    """The error for compressed data without an end."""
    return DamagedFileError(f"{path}: truncated, its {kind} data has no end; download it again")


def damaged(path: str, kind: str, reason: object) -> DamagedFileError:
    """The error for compressed data that cannot be decompressed."""
    return DamagedFileError(
        f"{path}: damaged {kind} data ({reason}); download it again, or rename it if it is not {kind}"
    )


def decompress(
    path: str, kind: str, read: Callable[[int], bytes], on_member: Callable[[int], None] = lambda offset: None
) -> Iterator[bytes]:
    """Decompressed data in pieces of at most 1 MiB, for any compression ratio.

    The file objects of bz2 and zstd are not used: they ignore damaged data after the first stream.

    Args:
      path: for messages.
      kind: of compression.
      read: gives the next bytes on disk.
      on_member: called with the offset of each member, stream or frame, from where `read` began, before its data.

    Raises:
      DamagedFileError: the data is damaged or truncated.
    """
    new, damage = _DECOMPRESSORS[kind]()
    data = read(_COMPRESSED_BYTES)
    total = len(data)
    while True:
        decompressor = new()
        on_member(total - len(data))
        while not decompressor.eof:
            try:
                result = decompressor.decompress(data, _RAW_BYTES)
            except damage as error:
                raise damaged(path, kind, error) from error
            if result:
                yield result
            if decompressor.eof:
                break
            data = read(_COMPRESSED_BYTES) if decompressor.needs_input else b""
            total += len(data)
            if decompressor.needs_input and not data and not result:
                raise truncated(path, kind)
        data = decompressor.unused_data.lstrip(b"\0")  # some tools pad with zeros
        while not data and (more := read(_COMPRESSED_BYTES)):
            total += len(more)
            data = more.lstrip(b"\0")
        if not data:
            return
