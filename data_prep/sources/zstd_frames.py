"""The frames of a zstd file: pzstd, the seekable format and concatenated files have many.

`zstd` writes one frame per file. That is read by the first range, and the others are empty: they search it for the
beginning of a frame. A frame begins with a magic number of 32 bits, which also occurs by chance, once in 4 GiB. It
counts if the headers of the first blocks (RFC 8878, section 3.1.1) are possible; by chance one block in 20 has one.
"""

from data_prep.sources.frame_ranges import FrameFormat, ReadAt

_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"
"""after a byte 0x50 to 0x5f"""
_MAX_BLOCK_BYTES = 1 << 17
_BLOCKS_TO_CHECK = 8
_LONGEST_HEADER = 18


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


ZSTD = FrameFormat(".zst", _MAGIC, _begins_frame, searched_to_end=False)
