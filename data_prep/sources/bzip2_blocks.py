"""The blocks of a range of a bzip2 file.

A block of bzip2 begins with a magic number of 48 bits, at any bit, and depends on no other: behind the header of a
stream, and before an end of its own with its checksum, Python's bz2 decompresses it and compares its CRC-32. So a range
of a file is read without the text before it, whether the file is one stream or many (Wikipedia's multistream dumps).
The format: J. Seward, bzip2 1.0.8, compress.c and decompress.c.

The magic number also occurs by chance: in 16 MiB about once in two million. A block that ends at such a place cannot be
decompressed, so its end is looked for further on; a range that begins at one is recognised by the block before it.

indexed_bzip2 1.7 and rapidgzip 0.16 also decompress blocks, in 0.75 of the time, but a place in a file is reached only
through an index, which takes a decompression of the whole file, and truncation is reported as `std::exception`.
"""

import bisect
import bz2
import re
from collections.abc import Callable, Iterator

from data_prep.sources import files

ReadAt = Callable[[int, int], bytes]
"""Bytes of a file, from an offset and a size; fewer only at its end"""

_KIND = ".bz2"
_BLOCK, _END = 0x314159265359, 0x177245385090
"""Magic numbers before a block, and at the end of a stream, where the stream's CRC-32 follows."""
_MAGIC_BITS, _CRC_BITS = 48, 32
_END_BITS = _MAGIC_BITS + _CRC_BITS
_RAW_BYTES = 1 << 20
_LONGEST_BLOCK = 4 << 20
"""Bytes of a compressed block: at most 900,000 symbols of 20 bits, and tables."""
# Between the last block of a stream and the next one: padding, and streams without text.
_BETWEEN_STREAMS = re.compile(rb"\0*+(?:BZh[1-9]\x17\x72\x45\x38\x50\x90\0\0\0\0\0*+)*+(BZh[1-9])?")


def decompress_range(path: str, read_at: ReadAt, start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    """The text of the blocks that begin in a range of a file, and of those after it.

    Args:
      path: for messages.
      read_at: reads the file.
      start: first byte of the range.
      stop: the byte after its last.

    Yields:
      text of a block, and whether the block begins in the range.

    Raises:
      DamagedFileError: a block is damaged or has no end, or there is other data between blocks.
    """
    found = _Magics(read_at, start)
    begin = found.first_block(8 * start, 8 * stop) if start else _next_stream(path, found, 0)
    is_known = not start
    while begin is not None:
        try:
            text, end, ends_stream = _read_block(path, found, begin)
        except files.DamagedFileError:
            after = None if is_known else _end_of_block_around(path, read_at, begin)
            if after is None:
                raise
            begin = found.first_block(after, after + 1)
        else:
            yield text, begin < 8 * stop
            if ends_stream:
                begin = _next_stream(path, found, -(-(end + _END_BITS) // 8))
            else:
                begin = found.first_block(end, end + 1)
        is_known = True


def _end_of_block_around(path: str, read_at: ReadAt, bit: int) -> int | None:
    """The end of the block in which a magic number occurs by chance at a bit; None if it does not."""
    found = _Magics(read_at, max(0, bit // 8 - _LONGEST_BLOCK))
    found.read_to(bit)
    candidates = found.blocks[: bisect.bisect_left(found.blocks, bit)]
    if not candidates:
        return None
    try:
        _, end, ends_stream = _read_block(path, found, candidates[-1])
        if ends_stream:
            return _next_stream(path, found, -(-(end + _END_BITS) // 8)) if end > bit else None
    except files.DamagedFileError:
        return None
    return end if end > bit else None


class _Magics:
    """Finds magic numbers in a file, from a byte on."""

    def __init__(self, read_at: ReadAt, start: int):
        self._read_at = read_at
        self._start = start
        self._data = b""
        self._searched = 0
        self.complete = False
        """the file was read to its end"""
        self.blocks: list[int] = []
        """bits at which magic numbers of blocks begin, as far as the file was read"""
        self.ends: list[int] = []
        """those of ends of streams"""

    @property
    def end(self) -> int:
        """The byte up to which the file was read."""
        return self._start + len(self._data)

    def more(self) -> None:
        """Reads on."""
        more = self._read_at(self.end, _RAW_BYTES)
        self.complete = not more
        self._data += more
        for magic, places in ((_BLOCK, self.blocks), (_END, self.ends)):
            bits = _find(self._data, magic, self._searched, self.complete)
            places += sorted(8 * self._start + bit for bit in bits)
        self._searched = max(0, len(self._data) - _MAGIC_BITS // 8)

    def read_to(self, bit: int) -> None:
        """Reads until all magic numbers before a bit are found."""
        while not self.complete and 8 * (self._start + self._searched) < bit:
            self.more()

    def first_block(self, bit: int, stop: int) -> int | None:
        """The first magic number of a block in [bit, stop); forgets what is before it."""
        while True:
            place = bisect.bisect_left(self.blocks, bit)
            if place < len(self.blocks):
                found = self.blocks[place] if self.blocks[place] < stop else None
                break
            if self.complete or 8 * (self._start + self._searched) >= stop:
                found = None
                break
            self.more()
        self._forget(min(bit // 8, self.end))
        return found

    def magics_after(self, bit: int) -> list[int]:
        """Magic numbers of both kinds, in order."""
        return sorted(place for places in (self.blocks, self.ends) for place in places if place > bit)

    def bits(self, begin: int, end: int) -> int:
        """Bits of the file as a number."""
        data = self.bytes(begin // 8, -(-end // 8))
        return (int.from_bytes(data) >> (-end % 8)) & ((1 << (end - begin)) - 1)

    def bytes(self, begin: int, end: int) -> bytes:
        """Bytes of the file that were read."""
        return self._data[begin - self._start : end - self._start]

    def _forget(self, byte: int) -> None:
        self._data = self._data[byte - self._start :]
        self._searched = max(0, self._searched - (byte - self._start))
        self._start = byte
        for places in (self.blocks, self.ends):
            del places[: bisect.bisect_left(places, 8 * byte)]


def _find(data: bytes, magic: int, start: int, complete: bool) -> Iterator[int]:
    """Bits at which a magic number begins in bytes, from byte `start` on; in the last 6 bytes only if `complete`."""
    last = len(data) if complete else len(data) - _MAGIC_BITS // 8
    for shift in range(8):
        # The magic is in 7 bytes, of which 5 have no other bits.
        middle = (magic << (8 - shift)).to_bytes(7)[1:6]
        place = data.find(middle, start + 1)
        while 0 < place <= last:
            bits = int.from_bytes(data[place - 1 : place + 6].ljust(7, b"\0"))
            if (bits >> (8 - shift)) & ((1 << _MAGIC_BITS) - 1) == magic:
                yield 8 * (place - 1) + shift
            place = data.find(middle, place + 1)


def _read_block(path: str, found: _Magics, begin: int) -> tuple[bytes, int, bool]:
    """Text of the block at bit `begin`, the bit after it, and whether its stream ends there."""
    tried = begin
    while True:
        for end in found.magics_after(tried):
            text = _decompress(found.bits(begin, end), end - begin)
            if text is not None:
                return text, end, end in found.ends
            tried = end
        if found.complete or found.end - begin // 8 > _LONGEST_BLOCK:
            break
        found.more()
    if tried == begin and found.complete:
        raise files.truncated(path, _KIND)
    raise files.damaged(path, _KIND, f"in the block at byte {begin // 8}")


def _decompress(block: int, bits: int) -> bytes | None:
    """Text of a block; None if the bits are not exactly a block."""
    if bits < _END_BITS:
        return None
    crc = (block >> (bits - _END_BITS)) & ((1 << _CRC_BITS) - 1)
    stream = (((block << _MAGIC_BITS) | _END) << _CRC_BITS) | crc
    padding = -(bits + _END_BITS) % 8
    decompressor = bz2.BZ2Decompressor()
    try:
        text = decompressor.decompress(b"BZh9" + (stream << padding).to_bytes((bits + _END_BITS + padding) // 8))
    except OSError:
        return None
    return text if decompressor.eof and not decompressor.unused_data else None


def _next_stream(path: str, found: _Magics, byte: int) -> int | None:
    """The place of the next block, from the first byte after a stream on; None at the end of the file."""
    while found.end < byte and not found.complete:
        found.more()
    if found.end < byte:
        raise files.truncated(path, _KIND)
    block = found.first_block(8 * byte, 8 * (byte + _LONGEST_BLOCK))
    between = found.bytes(byte, found.end if block is None else block // 8)
    match = _BETWEEN_STREAMS.fullmatch(between)
    if match and bool(match[1]) == (block is not None) and (block or 0) % 8 == 0:
        return block
    if block is None and found.complete and between.lstrip(b"\0").startswith(b"BZh"):
        raise files.truncated(path, _KIND)
    raise files.damaged(path, _KIND, f"at byte {byte}, no stream begins there")
