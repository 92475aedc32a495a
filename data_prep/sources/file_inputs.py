"""Divides files into inputs."""

from collections.abc import Mapping

from bert_jax.storage.listing import FileVersion
from data_prep.sources import encodings, files
from data_prep.sources.base import DamagedFileError, Input
from data_prep.sources.gzip_members import has_short_members


def divide_files(
    found: Mapping[str, FileVersion], group_bytes: int, range_bytes: int | None, encoding: str = encodings.UTF_8
) -> list[Input]:
    """Divides files into inputs: groups of small files, files, ranges of large ones.

    The borders of ranges depend on the size of the file alone, so text that is added to a file changes only its last
    range. The first MiB of a .gz file decides whether it is split.

    Args:
      found: of `files.find_files`.
      group_bytes: consecutive files are one input up to this size together.
      range_bytes: size of a range, half of it in compressed files; None: files cannot be split.
      encoding: of the files, or `auto`; files in one whose line ends cannot be found in bytes are not split.
    """
    inputs: list[Input] = []
    for path, (size, version) in found.items():
        kind = files.compression(path)
        ranges = 1
        if range_bytes:
            length = range_bytes // 2 if kind else range_bytes
            ranges = -(-size // length)
            if ranges > 1 and not _can_be_split(path, kind, encoding):
                ranges = 1
        if ranges > 1:
            inputs.append(Input((path,), 0, (version,), hash_only=True))
            for start in range(0, size, length):
                stop = min(size, start + length)
                inputs.append(Input((path,), stop - start, (version,), start, stop))
        elif inputs and not inputs[-1].stop and inputs[-1].size + size <= group_bytes:
            last = inputs[-1]
            inputs[-1] = Input(
                (*last.paths, path), last.size + size, (*last.versions, version), sizes=(*last.sizes, size)
            )
        else:
            inputs.append(Input((path,), size, (version,), sizes=(size,)))
    return inputs


def _can_be_split(path: str, kind: str | None, encoding: str) -> bool:
    if kind == ".gz" and not has_short_members(path):
        return False
    return encodings.keeps_ascii(_encoding_of(path, encoding))


def _encoding_of(path: str, encoding: str) -> str:
    """The encoding of a file that can be read; `auto` is resolved."""
    if encoding != encodings.AUTO:
        return encoding
    try:
        with files.DecompressingReader(path, encoding=encoding) as file:
            return file.encoding
    except DamagedFileError:
        return encodings.UTF_8  # the reader of its text reports it
