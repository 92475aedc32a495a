"""Integers in groups of 7 bits, the lowest first: of protobuf messages, LevelDB's tables and riegeli's chunks."""


def decode_varint(data: bytes, position: int) -> tuple[int, int]:
    """The integer at a position, and the position of what follows.

    Raises:
      IndexError: the data ends in it.
      ValueError: it has more than 64 bits.
    """
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError("a number has no end")


def encode_varint(value: int) -> bytes:
    """The inverse of `decode_varint`."""
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    groups.append(value)
    return bytes(groups)
