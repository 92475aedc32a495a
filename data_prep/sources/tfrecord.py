"""Reads TFRecord files without TensorFlow, and checks every checksum.

A record is its length (uint64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data, all
little-endian (tensorflow/core/lib/io/record_writer.h). Grain's `TFRecordIterDataset` reads the same files, from local
disks only and without checking checksums.
"""

import struct
from collections.abc import Iterator

import google_crc32c
from etils import epath

from data_prep.sources import files
from data_prep.sources.base import DamagedFileError

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8


def read_records(path: str, start: int, stop: int) -> Iterator[bytes]:
    """The records [start, stop) of a file; the ones before are read, too.

    Raises:
      DamagedFileError: the file cannot be read, is cut off, or a checksum is wrong.
    """
    with files.readable(path), epath.Path(path).open("rb") as file:
        for index in range(stop):
            (size,) = _LENGTH.unpack(_checked(file, _LENGTH.size, path, index))
            record = _checked(file, size, path, index)
            if index >= start:
                yield record


def _checked(file, size: int, path: str, index: int) -> bytes:
    """The next `size` bytes, which their checksum follows."""
    data = file.read(size)
    checksum = file.read(_CHECKSUM.size)
    if len(data) < size or len(checksum) < _CHECKSUM.size or _masked_crc(data) != _CHECKSUM.unpack(checksum)[0]:
        raise DamagedFileError(f"{path}: record {index} is damaged or cut off; prepare the dataset again")
    return data


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
