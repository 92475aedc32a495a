"""The frames of a range of a compressed file: those of zstd, and the members of gzip, begin with a magic number.

A frame is decompressed without those before it. The magic number also occurs by chance, so it counts only with what
must follow it. The reader of a range reads the frames up to the one with which the next range begins, and checks that
the reader of that range finds the same one; so the text is that of the file as a whole, or there is an error.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bert_jax.errors import UserError
from data_prep.sources import files

ReadAt = Callable[[int, int], bytes]
"""Bytes of a file, from an offset and a size; fewer only at its end"""

_RAW_BYTES = 1 << 20
_FILE_END = 1 << 62


class FrameFormat(NamedTuple):
    """A kind of compressed file."""

    kind: str
    """see `files.compression`"""
    magic: bytes
    begins_frame: Callable[[ReadAt, int], bool]
    """whether a frame may begin at a place with the magic number"""
    searched_to_end: bool
    """after a frame that extends to the end of the file, the other ranges are searched for a beginning, too"""


def read_frames(path: str, form: FrameFormat, read_at: ReadAt, start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    """The text of the frames that begin in a range of a file, and of those after it.

    Args:
      path: for messages.
      form: of the file.
      read_at: reads the file.
      start: first byte of the range.
      stop: the byte after its last.

    Yields:
      a piece of text, and whether its frame begins in the range.

    Raises:
      DamagedFileError: a frame is damaged or truncated.
      UserError: data inside of a frame looks like the beginning of one.
    """
    first = first_frame(form, read_at, start, stop) if start else 0
    if first is None:
        return
    position, frame, checked, overlooked = first, first, False, False

    def read(size: int) -> bytes:
        nonlocal position
        data = read_at(position, size)
        position += len(data)
        return data

    def on_frame(offset: int) -> None:
        nonlocal frame, checked, overlooked
        frame = first + offset
        if frame >= stop and not checked and read_at(frame, len(form.magic)) == form.magic:
            found = first_frame(form, read_at, stop, frame + 1)
            checked, overlooked = found is not None, found is None
            if found not in (None, frame):
                raise _looks_like_a_frame(path, found)

    for text in files.decompress(path, form.kind, read, on_frame):
        if overlooked:
            raise files.damaged(path, form.kind, f"in the first blocks of the frame at byte {frame}")
        yield text, frame < stop
    if form.searched_to_end and not checked:
        found = first_frame(form, read_at, stop, _FILE_END)
        if found is not None:
            raise _looks_like_a_frame(path, found)


def _looks_like_a_frame(path: str, place: int) -> UserError:
    return UserError(
        f"{path}: cannot be read by several workers, because data inside of a frame, at byte {place}, looks like the"
        " beginning of one; decompress it, then compress it again"
    )


def first_frame(form: FrameFormat, read_at: ReadAt, start: int, stop: int) -> int | None:
    """The first byte in [start, stop) of a file at which a frame begins."""
    position = start
    while position < stop:
        data = read_at(position, min(_RAW_BYTES, stop - position) + len(form.magic) - 1)
        place = data.find(form.magic)
        while place >= 0:
            if form.begins_frame(read_at, position + place):
                return position + place
            place = data.find(form.magic, place + 1)
        if len(data) < len(form.magic):
            return None
        position += _RAW_BYTES
    return None
