"""Reads byte ranges of objects in a store, many at a time; what fails is tried again."""

import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bert_jax.errors import OutageError
from bert_jax.storage.failures import describe_unreachable
from bert_jax.storage.paths import StoredPath, file_system_and_name

ATTEMPTS = 3
"""Tries for a range, each of which the store's library repeats about five times within seconds."""
FIRST_PAUSE_SECONDS = 5.0
"""Before the second try; each further pause is twice as long."""
CONCURRENT_REQUESTS = 64
BLOCK_BYTES = 1 << 22
BLOCKS_AT_ONCE = 4
"""Blocks of a whole object that are requested and held together."""
FINAL_ERRORS = (FileNotFoundError, PermissionError, ImportError)
"""Answers of a store that another try would not change."""


class ByteRange(NamedTuple):
    """Bytes [start, end) of an object."""

    path: StoredPath
    start: int
    end: int
    at_most: bool = False
    """the object may end before `end`"""


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """The content of each range; all are in stores of one scheme.

    Raises:
      FileNotFoundError: there is no such object.
      PermissionError: the store denies access.
      OutageError: after `ATTEMPTS` tries at least one range could not be read completely; the message names the object.
    """
    results: dict[int, bytes] = {}
    error: Exception | None = None
    for attempt in range(ATTEMPTS):
        left = [index for index in range(len(ranges)) if index not in results]
        if not left:
            break
        if attempt:
            time.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        for index, outcome in zip(left, _request([ranges[index] for index in left]), strict=True):
            if isinstance(outcome, FINAL_ERRORS):
                raise outcome
            wanted = ranges[index].end - ranges[index].start
            if isinstance(outcome, Exception):
                error = outcome
            elif len(outcome) != wanted and not (ranges[index].at_most and 0 < len(outcome) < wanted):
                error = EOFError(f"{len(outcome)} of {wanted} bytes were received")
            else:
                results[index] = outcome
    for index, one in enumerate(ranges):
        if index not in results:
            assert error is not None
            raise OutageError(describe_unreachable(one.path, error)) from error
    return [results[index] for index in range(len(ranges))]


def read_blocks(path: StoredPath, size: int) -> Iterator[bytes]:
    """The content of an object of `size` bytes, in blocks; raises as `read_ranges` does."""
    starts = range(0, size, BLOCK_BYTES)
    for first in range(0, len(starts), BLOCKS_AT_ONCE):
        group = starts[first : first + BLOCKS_AT_ONCE]
        yield from read_ranges([ByteRange(path, start, min(start + BLOCK_BYTES, size)) for start in group])


def _request(ranges: Sequence[ByteRange]) -> list[bytes | Exception]:
    """One request per range: its content, or the exception that it ended with."""
    filesystem, _ = file_system_and_name(ranges[0].path)
    options = {"batch_size": CONCURRENT_REQUESTS} if filesystem.async_impl else {}
    paths, starts, ends = ([os.fspath(one.path) for one in ranges], *zip(*(one[1:3] for one in ranges), strict=True))
    try:
        return filesystem.cat_ranges(paths, list(starts), list(ends), on_error="return", **options)
    except Exception as error:  # of any library, e.g. while it connects
        return [error] * len(ranges)
