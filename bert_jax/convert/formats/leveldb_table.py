"""LevelDB's table format, which TensorFlow uses for the index of a checkpoint: sorted keys and values, with checksums.

    block, trailer; block, trailer; ...; metaindex block (empty), trailer; index block, trailer; footer

A block is a sequence of entries (varints: bytes shared with the previous key, other bytes of the key, bytes of the
value; then the two byte strings), followed by the offsets of the entries that share nothing ("restarts") and their
count, uint32 each. A trailer is one byte for the compression and the masked CRC-32C of block and byte. The index block
has one entry per block: a key not below the block's last, and a handle (varint: offset, size). The footer is two
handles, padded to 40 bytes, and a magic number.

Source: LevelDB's doc/table_format.md; tensorflow v2.21, xla/tsl/lib/io/{format.h,table_options.h}.
"""

import struct
from collections.abc import Iterable, Iterator

import google_crc32c

from bert_jax.errors import UserError

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES = 48
TRAILER_BYTES = 5
RESTART_INTERVAL = 16
"""Entries between restarts; TensorFlow's default."""
BLOCK_BYTES = 1 << 18
"""Size at which a block is closed; TensorFlow's default."""


class _DamagedError(Exception):
    """Damaged bytes; `read_table` adds the file's name."""


class _UnsupportedError(Exception):
    """An unsupported feature; `read_table` adds the file's name."""


def mask(crc: int) -> int:
    """The stored form of a CRC-32C, because a CRC of bytes that contain CRCs is weak (LevelDB's util/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_table(content: bytes, source: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a table, in order.

    Args:
      content: of the whole file.
      source: name of the file, for messages.

    Raises:
      UserError: the file is truncated or damaged, or its blocks are compressed.
    """
    try:
        if len(content) < FOOTER_BYTES or not content.endswith(MAGIC):
            raise _DamagedError("the end of a checkpoint's index is missing")
        footer = content[-FOOTER_BYTES:]
        _, position = _handle(footer, 0)
        index, _ = _handle(footer, position)
        for _, value in _entries(_block(content, index)):
            yield from _entries(_block(content, _handle(value, 0)[0]))
    except _DamagedError as error:
        raise UserError(f"{source}: truncated or damaged ({error}); copy or download it again") from error
    except _UnsupportedError as error:
        raise UserError(f"{source}: {error}; save it again with TensorFlow's tf.train.Saver") from error


def _handle(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    """(offset, size) of a block, and the position after the handle."""
    offset, position = _varint(content, position)
    size, position = _varint(content, position)
    return (offset, size), position


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """A number in groups of 7 bits, the lowest first, and the position after it."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(content):
            break
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise _DamagedError("a number has no end")


def _block(content: bytes, handle: tuple[int, int]) -> bytes:
    """A block without its trailer, with its checksum verified."""
    offset, size = handle
    if offset + size + TRAILER_BYTES > len(content):
        raise _DamagedError(f"a block ends at byte {offset + size}, the file at {len(content)}")
    checked = content[offset : offset + size + 1]
    (stored,) = struct.unpack_from("<I", content, offset + size + 1)
    if mask(google_crc32c.value(checked)) != stored:
        raise _DamagedError(f"the block at byte {offset} does not match its CRC-32C")
    if checked[-1]:
        raise _UnsupportedError(f"the block at byte {offset} is compressed, which is not supported")
    return checked[:-1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 8:
        raise _DamagedError("a block has no restarts")
    (restarts,) = struct.unpack_from("<I", block, len(block) - 4)
    end = len(block) - 4 * (restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = _varint(block, position)
        unshared, position = _varint(block, position)
        size, position = _varint(block, position)
        if shared > len(key) or position + unshared + size > end:
            raise _DamagedError("an entry is longer than its block")
        key = key[:shared] + block[position : position + unshared]
        yield key, block[position + unshared : position + unshared + size]
        position += unshared + size


def make_table(items: Iterable[tuple[bytes, bytes]], block_bytes: int = BLOCK_BYTES) -> bytes:
    """The whole file of a table.

    Args:
      items: keys and values, the keys ascending.
      block_bytes: size at which a block is closed.
    """
    file, index, builder = bytearray(), _Builder(1), _Builder(RESTART_INTERVAL)

    def close(block: _Builder) -> bytes:
        content = block.finish() + b"\0"
        handle = _number(len(file)) + _number(len(content) - 1)
        file.extend(content + struct.pack("<I", mask(google_crc32c.value(content))))
        return handle

    for key, value in items:
        builder.add(key, value)
        if builder.size >= block_bytes:
            index.add(key, close(builder))
            builder = _Builder(RESTART_INTERVAL)
    if builder.size:
        index.add(builder.last, close(builder))
    footer = close(_Builder(1)) + close(index)
    return bytes(file + footer.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC)


def _number(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)


class _Builder:
    """A block under construction."""

    def __init__(self, interval: int):
        self._interval, self._content, self._restarts, self._count = interval, bytearray(), [0], 0
        self.last = b""

    @property
    def size(self) -> int:
        return len(self._content)

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self._count and self._count % self._interval == 0:
            self._restarts.append(len(self._content))
        elif self._count:
            while shared < min(len(key), len(self.last)) and key[shared] == self.last[shared]:
                shared += 1
        self._content += _number(shared) + _number(len(key) - shared) + _number(len(value)) + key[shared:] + value
        self.last = key
        self._count += 1

    def finish(self) -> bytes:
        return bytes(self._content) + struct.pack(f"<{len(self._restarts) + 1}I", *self._restarts, len(self._restarts))
