"""The frames of a range of a zstd file.

A frame of zstd is decompressed without those before it; pzstd, the seekable format and concatenated files have many,
but `zstd` writes one frame per file. That is read by the first range, and the others are empty: they search it for the
beginning of a frame. A frame begins with a magic number of 32 bits, which also occurs by chance, once in 4 GiB. It
counts if the headers of the first blocks (RFC 8878, section 3.1.1) are possible; by chance one block in 20 has one.
"""

from collections.abc import Callable, Iterator

from data_prep.sources import files

ReadAt = Callable[[int, int], bytes]
"""Bytes of a file, from an offset and a size; fewer only at its end"""

_KIND = ".zst"
_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"
"""after a byte 0x50 to 0x5f"""
_RAW_BYTES = 1 << 20
_MAX_BLOCK_BYTES = 1 << 17
_BLOCKS_TO_CHECK = 8
_LONGEST_HEADER = 18


def read_frames(path: str, read_at: ReadAt, start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    """The text of the frames that begin in a range of a file, and of those after it.

    Args:
      path: for messages.
      read_at: reads the file.
      start: first byte of the range.
      stop: the byte after its last.

    Yields:
      a piece of text, and whether its frame begins in the range.

    Raises:
      DamagedFileError: a frame is damaged or truncated.
    """
    first = _first_frame(read_at, start, stop) if start else 0
    if first is None:
        return
    position, frame, checked = first, first, False

    def read(size: int) -> bytes:
        nonlocal position
        data = read_at(position, size)
        position += len(data)
        return data

    def on_frame(offset: int) -> None:
        nonlocal frame, checked
        frame = first + offset
        if frame >= stop and not checked and read_at(frame, len(_MAGIC)) == _MAGIC:
            checked = True  # the reader of a later range finds this frame by the same check
            if not _begins_frame(read_at, frame):
                raise files.damaged(path, _KIND, f"in the first blocks of the frame at byte {frame}")

    for text in files.decompress(path, _KIND, read, on_frame):
        yield text, frame < stop


def _first_frame(read_at: ReadAt, start: int, stop: int) -> int | None:
    """The first byte of a range at which a frame begins."""
    position = start
    while position < stop:
        data = read_at(position, min(_RAW_BYTES, stop - position) + len(_MAGIC) - 1)
        place = data.find(_MAGIC)
        while place >= 0:
            if _begins_frame(read_at, position + place):
                return position + place
            place = data.find(_MAGIC, place + 1)
        position += _RAW_BYTES
    return None


def _begins_frame(read_at: ReadAt, offset: int) -> bool:
    """Whether the headers of a frame and of its first blocks are possible; a file that ends in between counts."""
    header = read_at(offset, _LONGEST_HEADER)
    if header[1:4] == _SKIPPABLE_MAGIC and header[0] >> 4 == 5:
        return True
    if len(header) < _LONGEST_HEADER:
        return True
    descriptor = header[4]
    if not header.startswith(_MAGIC) or descriptor & 0b1000:
        return False
    single_segment = descriptor >> 5 & 1
    content_size = (single_segment, 2, 4, 8)[descriptor >> 6]
    place = offset + 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + content_size
    for _ in range(_BLOCKS_TO_CHECK):
        block = int.from_bytes(read_at(place, 3), "little")
        last, kind, size = block & 1, block >> 1 & 3, block >> 3
        if kind == 3 or size > _MAX_BLOCK_BYTES:
            return False
        place += 3 + (1 if kind == 1 else size)
        if last:
            following = read_at(place + (descriptor >> 2 & 1) * 4, 4)
            return following in (_MAGIC, b"", b"\0\0\0\0"[: len(following)]) or following[1:] == _SKIPPABLE_MAGIC
    return True
