"""Files of an unfinished build: prepared blocks (`units/*/unit-*`), plans, and markers of finished steps.

Prepared blocks and inputs are named by a key: a hash of their source and of all settings that affect a prepared block.
So a build with other arguments reuses the blocks of an earlier one that would be identical.

Every file is written atomically (`files.write_atomic`), so a build that was killed can continue from these files.
"""

import bisect
import functools
import hashlib
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.storage.listing import file_sizes, matching_entries
from bert_jax.storage.paths import is_remote
from bert_jax.storage.ranges import CONCURRENT_REQUESTS, ByteRange, read_ranges

FORMAT_VERSION = 5
"""Of these files; work of an unfinished build in another version is not used."""
UNITS = "units"
"""Directory of the prepared blocks, which are in 256 directories inside it."""
BLOCKS_TOGETHER = 1024
"""Consecutive blocks of an input in one directory, so that one listing shows which of them are there."""

_HEAD_BYTES = 1 << 14
"""Of a file in a store, requested first: most headers are shorter."""
_MOST_HEADER_BYTES = 100_000_000
"""As safetensors permits; more is damage."""
_MERGED_GAP = 1 << 16
"""Bytes between two arrays that are requested together: they take less time than another request."""


def block_file_name(key: str, part: int, block: int) -> str:
    """File of a prepared block, relative to the scratch directory."""
    return f"{UNITS}/{(part + block // BLOCKS_TOGETHER) % 256:02x}/unit-{key}-{part:08d}-{block:08d}.safetensors"


def prepared_blocks(directory: epath.Path) -> dict[str, int]:
    """Sizes in bytes of all prepared blocks, by `block_file_name`; a store is listed once.

    Raises:
      UserError: the store denies it.
    """
    names = file_sizes(directory / UNITS, recursive=True)
    return {f"{UNITS}/{name}": size for name, size in names.items() if name.endswith(".safetensors")}


def source_key(name: str) -> str:
    """The key in a `block_file_name`."""
    return name.split("-")[1]


def input_marker_name(key: str, part: int) -> str:
    """File that records that all blocks of an input were read, with their metadata."""
    return f"input-{key}-{part:08d}.json"


def files_of_source(directory: epath.Path, key: str) -> list[epath.Path]:
    """Files of the inputs and prepared blocks with a key."""
    blocks = [directory / name for name in prepared_blocks(directory) if source_key(name) == key]
    return [*matching_entries(directory, f"input-{key}-*"), *blocks]


def fingerprint(value: object) -> str:
    """SHA-256 of a value's repr, for values such as names and sizes of files."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def row_range_name(index: int) -> str:
    """File that describes a range of documents or paragraphs while duplicates are found."""
    return f"rows-{index:08d}.safetensors"


def ngrams_name(digest: str, ngram_words: int) -> str:
    """File with the n-grams of this many words of the evaluation texts that have this digest."""
    return f"ngrams-{digest[:16]}-{ngram_words}.npy"


PLANS = "plans.json"
"""File that marks the end of phase 2; lists the plans of the shards."""


def shard_plan_file_name(split: str, index: int) -> str:
    """File with the plan of a shard."""
    return f"plan-{split}-{index:05d}.safetensors"


def shard_marker_name(split: str, index: int) -> str:
    """File that marks a shard as written, with its arrays."""
    return f"shard-{split}-{index:05d}.safetensors"


def shard_markers(directory: epath.Path, split: str) -> list[epath.Path]:
    """The `shard_marker_name` files of a split, in order."""
    return matching_entries(directory, f"shard-{split}-*.safetensors")


def write_json(path: epath.Path, content: Any) -> None:
    """Writes JSON atomically."""
    write_atomic(path, json.dumps(content, indent=1).encode() + b"\n")


def read_json(path: epath.Path) -> Any:
    """Reads a file of `write_json`."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise _damaged(path) from error


def read_json_files(directory: epath.Path, sizes_by_name: Mapping[str, int]) -> dict[str, Any]:
    """Reads files of `write_json`, by name; those of a store, of these sizes in bytes, are requested together."""
    if is_remote(directory):
        texts = read_ranges([ByteRange(directory / name, 0, size) for name, size in sizes_by_name.items()])
    else:
        texts = [(directory / name).read_bytes() for name in sizes_by_name]
    contents = {}
    for name, text in zip(sizes_by_name, texts, strict=True):
        try:
            contents[name] = json.loads(text)
        except ValueError as error:
            raise _damaged(directory / name) from error
    return contents


def write_arrays(path: epath.Path, arrays: Mapping[str, np.ndarray], metadata: dict) -> None:
    """Writes arrays and, as JSON, metadata."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomic(path, safetensors.numpy.save(contiguous, {"facts": json.dumps(metadata)}))


def write_array(path: epath.Path, array: np.ndarray) -> None:
    """Writes one array atomically."""
    file = io.BytesIO()
    np.save(file, array)
    write_atomic(path, file.getvalue())


@functools.lru_cache(1)
def open_array(path: epath.Path) -> np.ndarray:
    """The array of a file of `write_array`, read-only; processes of one machine share the memory of a local file.

    Raises:
      UserError: the file is damaged.
    """
    try:
        return np.load(io.BytesIO(path.read_bytes())) if is_remote(path) else np.asarray(np.load(path, mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise _damaged(path) from error


def pack_texts(texts: Iterable[str]) -> np.ndarray:
    """Texts without NUL characters as one array, uint8 [num_bytes]."""
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def unpack_texts(packed: np.ndarray) -> list[str]:
    """Inverse of `pack_texts`."""
    return packed.tobytes().decode("utf-8", "surrogateescape").split("\0")


def read_metadata(path: epath.Path) -> dict:
    """The metadata of a file of `write_arrays`; reads only the header."""
    with path.open("rb") as file:
        raw = file.read(int.from_bytes(file.read(8), "little"))
    try:
        return json.loads(json.loads(raw)["__metadata__"]["facts"])
    except (ValueError, KeyError) as error:
        raise _damaged(path) from error


def read_arrays(path: epath.Path, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of a file of `write_arrays`: all, or those of `names` that it contains."""
    if not is_remote(path):
        try:
            with safetensors.safe_open(path, "np") as file:
                available = file.keys()
                return {name: file.get_tensor(name) for name in available if names is None or name in names}
        except safetensors.SafetensorError as error:
            raise _damaged(path) from error
    return _load(path, path.read_bytes()) if names is None else next(iterate_arrays([path], names))


def iterate_arrays(paths: Sequence[epath.Path], names: Collection[str]) -> Iterator[dict[str, np.ndarray]]:
    """The arrays of `names` of each file; of files in a store, only these are requested, of several files together."""
    if not paths or not is_remote(paths[0]):
        yield from (read_arrays(path, names) for path in paths)
        return
    for first in range(0, len(paths), CONCURRENT_REQUESTS):
        group = paths[first : first + CONCURRENT_REQUESTS]
        heads = read_ranges([ByteRange(path, 0, _HEAD_BYTES, at_most=True) for path in group])
        sizes = [8 + int.from_bytes(head[:8], "little") for head in heads]
        long = [index for index, size in enumerate(sizes) if size > len(heads[index])]
        for index in long:
            if sizes[index] > _MOST_HEADER_BYTES:
                raise _damaged(group[index])
        rests = read_ranges([ByteRange(group[index], len(heads[index]), sizes[index]) for index in long])
        for index, rest in zip(long, rests, strict=True):
            heads[index] += rest
        headers = [_header(path, head[8:size]) for path, head, size in zip(group, heads, sizes, strict=True)]
        spans = [_spans(header, names, size) for header, size in zip(headers, sizes, strict=True)]
        contents = iter(
            read_ranges([ByteRange(path, *span) for path, own in zip(group, spans, strict=True) for span in own])
        )
        for path, header, size, own in zip(group, headers, sizes, spans, strict=True):
            yield _load(path, _selected(header, names, size, [(span[0], next(contents)) for span in own]))


def _header(path: epath.Path, content: bytes) -> dict[str, dict]:
    """The arrays in a header of safetensors: {"dtype", "shape", "data_offsets" after the header}."""
    try:
        header = json.loads(content)
        del header["__metadata__"]
        for entry in header.values():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end:
                raise ValueError(f"an array from byte {begin} to byte {end}")
        return header
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _damaged(path) from error


def _spans(header: Mapping[str, dict], names: Collection[str], offset: int) -> list[tuple[int, int]]:
    """Where the arrays of `names` are in a file whose data begins at `offset`; neighbours share a span."""
    places = sorted(header[name]["data_offsets"] for name in header if name in names)
    spans: list[tuple[int, int]] = []
    for begin, end in places:
        if begin == end:
            continue
        if spans and begin + offset - spans[-1][1] <= _MERGED_GAP:
            spans[-1] = spans[-1][0], end + offset
        else:
            spans.append((begin + offset, end + offset))
    return spans


def _selected(
    header: Mapping[str, dict], names: Collection[str], offset: int, contents: Sequence[tuple[int, bytes]]
) -> bytes:
    """A file of safetensors with the arrays of `names` only, from the content of their spans and its first bytes."""
    starts = [start for start, _ in contents]
    entries, data, at = {}, [], 0
    for name in sorted(header.keys() & set(names), key=lambda name: header[name]["data_offsets"]):
        begin, end = header[name]["data_offsets"]
        if begin < end:
            start, content = contents[bisect.bisect_right(starts, begin + offset) - 1]
            data.append(content[begin + offset - start : end + offset - start])
        entries[name] = header[name] | {"data_offsets": [at, at + end - begin]}
        at += end - begin
    raw = json.dumps(entries).encode()
    return b"".join([len(raw).to_bytes(8, "little"), raw, *data])


def _load(path: epath.Path, content: bytes) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load(content)
    except safetensors.SafetensorError as error:
        raise _damaged(path) from error


def _damaged(path: epath.Path) -> UserError:
    return UserError(f"{path}: damaged, perhaps by a crash of the machine; remove this file and start again")
