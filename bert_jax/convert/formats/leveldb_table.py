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
from bert_jax.storage.varints import decode_varint, encode_varint

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES = 48
RESTART_INTERVAL = 16
"""Entries between restarts; TensorFlow's default."""


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
        if not content.endswith(MAGIC):
            raise ValueError("its end is missing")
        footer = content[-FOOTER_BYTES:]
        _, _, position = _handle(footer, 0)
        for _, value in _entries(_block(content, footer, position)):
            yield from _entries(_block(content, value, 0))
    except (ValueError, IndexError) as error:
        raise UserError(f"{source}: truncated, damaged or compressed ({error}); copy or download it again") from error


def _handle(content: bytes, position: int) -> tuple[int, int, int]:
    """Offset and size of a block, and the position after the handle."""
    offset, position = decode_varint(content, position)
    return offset, *decode_varint(content, position)


def _block(content: bytes, handle: bytes, position: int) -> bytes:
    """The block that a handle names, without its trailer, with its checksum verified."""
    offset, size, _ = _handle(handle, position)
    checked = content[offset : offset + size + 1]
    stored = int.from_bytes(content[offset + size + 1 : offset + size + 5], "little")
    if mask(google_crc32c.value(checked)) != stored:
        raise ValueError(f"the block at byte {offset} does not match its CRC-32C")
    if checked[-1]:
        raise ValueError(f"the block at byte {offset} is compressed")
    return checked[:-1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    key, position = b"", 0
    while position < end:
        shared, position = decode_varint(block, position)
        unshared, position = decode_varint(block, position)
        size, position = decode_varint(block, position)
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + size]
        position += size


def make_table(items: list[tuple[bytes, bytes]]) -> bytes:
    """The whole file of a table, with all entries in one block.

    Args:
      items: keys and values, the keys ascending; at least one.
    """
    file = bytearray()

    def append(block: bytes) -> bytes:
        """Write a block and its trailer; returns its handle."""
        handle = encode_varint(len(file)) + encode_varint(len(block))
        checked = block + b"\0"
        file.extend(checked + struct.pack("<I", mask(google_crc32c.value(checked))))
        return handle

    data = append(_encode(items, RESTART_INTERVAL))
    footer = append(_encode([], 1)) + append(_encode([(items[-1][0], data)], 1))
    return bytes(file + footer.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC)


def _encode(items: Iterable[tuple[bytes, bytes]], interval: int) -> bytes:
    """A block, with a restart every `interval` entries."""
    content, restarts, previous = bytearray(), [], b""
    for number, (key, value) in enumerate(items):
        shared = 0
        if number % interval == 0:
            restarts.append(len(content))
        else:
            while shared < len(previous) and key.startswith(previous[: shared + 1]):
                shared += 1
        content += (
            encode_varint(shared) + encode_varint(len(key) - shared) + encode_varint(len(value)) + key[shared:] + value
        )
        previous = key
    restarts = restarts or [0]
    return bytes(content) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
