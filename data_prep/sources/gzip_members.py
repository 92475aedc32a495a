"""The members of a gzip file (RFC 1952): `bgzip`, archives of the web and concatenated files have many.

A place with the magic number is the beginning of a member if what follows can be decompressed: 128 KiB, or the member
with its checksum if it is shorter. A header takes at most half of that, so the rest, at random, is almost never deflate
data. `gzip` writes one member per file, so a file is read by ranges only if its first member is short.
"""

import zlib

from etils import epath

from data_prep.sources import files
from data_prep.sources.base import DamagedFileError
from data_prep.sources.frame_ranges import FrameFormat, ReadAt

_MAGIC = b"\x1f\x8b\x08"
"""with the method, deflate"""
_FLAGS, _RESERVED_FLAGS = 3, 0b11100000
_CHECKED_BYTES = 1 << 17
_FIRST_MEMBER_BYTES = 1 << 20
"""On disk, of the first member of a file that is read by ranges"""


def _begins_member(read_at: ReadAt, offset: int) -> bool:
    data = read_at(offset, _CHECKED_BYTES)
    if len(data) > _FLAGS and data[_FLAGS] & _RESERVED_FLAGS:
        return False
    try:
        decompressor, has_text = _decompress(data)
    except zlib.error:
        return False
    return decompressor.eof or has_text or len(data) == _CHECKED_BYTES


def _decompress(data: bytes) -> tuple["zlib._Decompress", bool]:
    """A decompressor at the end of the first member or of the data, and whether there was text."""
    decompressor, has_text = zlib.decompressobj(wbits=31), False
    while data and not decompressor.eof:
        has_text |= bool(decompressor.decompress(data, _CHECKED_BYTES))
        data = decompressor.unconsumed_tail
    return decompressor, has_text


GZIP = FrameFormat(".gz", _MAGIC, _begins_member, searched_to_end=True)


def has_short_members(path: str) -> bool:
    """Whether a file begins with a short member, after which another one begins."""
    try:
        with files.readable(path), epath.Path(path).open("rb") as file:
            data = file.read(_FIRST_MEMBER_BYTES)
    except DamagedFileError:
        return False  # the reader of its text reports it
    try:
        return _decompress(data)[0].unused_data.startswith(_MAGIC)
    except zlib.error:
        return False
