"""Whether the files of a corpus are those that corpus.json lists. Needs no jax."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from array_record.python import array_record_module
from etils import epath

from bert_jax.data.corpus import ARRAYS, MANIFEST, SPLITS, TOKENIZER, Corpus, array_file, read_manifest
from bert_jax.errors import UserError
from bert_jax.progress import progress
from bert_jax.storage import local_path

DATASET_INFO = "dataset_info.json"
THREADS = 8
"""Files hashed at once; hashlib lets other threads run meanwhile."""
BLOCK_BYTES = 1 << 22
SHOWN_BYTES = 1 << 30
"""From so many on a bar is shown; below, hashing takes a breath or two."""
REMEDY = "copy the corpus again or rebuild it"


class Listed(NamedTuple):
    """A file, and what corpus.json says of it."""

    path: epath.Path
    sha256: str
    """in hex"""
    size: int
    """bytes"""


def listed_files(directory: epath.Path, manifest: Mapping) -> list[Listed]:
    """All files that corpus.json lists; `manifest` is its content.

    Raises:
      UserError: it lacks a file of the corpus.
    """
    files, splits = manifest["files"], manifest["splits"]
    needed = [TOKENIZER, DATASET_INFO, "features.json"]
    needed += [array_file(split, array) for split in SPLITS for array in ARRAYS]
    needed += [shard["file"] for split in splits.values() for shard in split["shards"]]
    missing = [*(split for split in SPLITS if split not in splits), *(name for name in needed if name not in files)]
    if missing:
        raise UserError(f"{directory / MANIFEST}: damaged, it lacks {missing[0]!r}; rebuild the corpus")
    return [Listed(directory / name, facts["sha256"], facts["bytes"]) for name, facts in files.items()]


def check_sizes(files: Sequence[Listed]) -> None:
    """See that each file is there and as long as it was; reads none.

    Raises:
      UserError: the first of them that is not.
    """
    for file in files:
        if not file.path.exists():
            raise UserError(f"{file.path}: missing; {REMEDY}")
        if (size := file.path.stat().length) != file.size:
            raise UserError(f"{file.path}: damaged, it has {size} bytes where {MANIFEST} says {file.size}; {REMEDY}")


def check_checksums(files: Sequence[Listed], on_bytes: Callable[[int], object] | None = None) -> None:
    """Compare each file with its SHA-256, several at a time; `on_bytes` hears how much was read, for progress.

    Raises:
      UserError: the first of them that differs.
    """
    lock = threading.Lock()

    def heard(size: int) -> None:
        with lock:
            if on_bytes:
                on_bytes(size)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        found = [pool.submit(_sha256, file, heard) for file in files]
        try:
            for file, sha256 in zip(files, found, strict=True):
                if sha256.result() != file.sha256:
                    raise UserError(f"{file.path}: damaged, its SHA-256 is not the recorded one; {REMEDY}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sha256(listed: Listed, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with Path(local_path(listed.path, listed.sha256)).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def check_records(file: Listed, count: int) -> None:
    """See that a shard holds as many records as corpus.json says; reads none.

    Raises:
      UserError: it does not, or is no shard.
    """
    try:
        local = local_path(file.path, file.sha256)
        reader = array_record_module.ArrayRecordReader(local, options="readahead_buffer_size:0")
        found = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{file.path}: damaged, it cannot be read as ArrayRecord ({reason}); {REMEDY}") from error
    if found != count:
        raise UserError(f"{file.path}: holds {found} records where {MANIFEST} says {count}; {REMEDY}")


def check_shards(
    corpora: Sequence[Corpus],
    verify: Literal["checksums", "counts"],
    process: int = 0,
    processes: int = 1,
) -> None:
    """See that the files of some corpora, of all their splits, are what corpus.json says.

    The processes of a run share the shards: the i-th of all is checked by process i mod `processes`. What a plan
    is made of, every process checks for itself, because it may have a copy of its own.

    Args:
      corpora: any split of each.
      verify: "checksums" reads every file and compares its SHA-256; "counts" reads none and compares sizes and,
        as "checksums" does too, the number of records of each shard. A file from an object store is copied to this
        host in either case, and its checksum compared then.
      process, processes: who of how many this is.

    Raises:
      UserError: the first file of this process that is missing or differs, how, and what to do.
    """
    shards: list[tuple[Listed, int]] = []  # with their records
    plain: list[Listed] = []
    for corpus in corpora:
        manifest = read_manifest(corpus.directory)
        splits = manifest["splits"].values()
        records = {shard["file"]: shard["records"] for split in splits for shard in split["shards"]}
        for file in listed_files(corpus.directory, manifest):
            if file.path.name in records:
                shards.append((file, records[file.path.name]))
            else:
                plain.append(file)
    mine = shards[process::processes]
    files = plain + [file for file, _ in mine]
    check_sizes(files)
    if verify == "checksums":
        _check_contents(files)
    for file, count in mine:
        check_records(file, count)


def _check_contents(files: Sequence[Listed]) -> None:
    size = sum(file.size for file in files)
    if size < SHOWN_BYTES:
        check_checksums(files)
        return
    # The way out stands where somebody waits.
    with progress("checksums (--data.verify counts skips them)", size, "B") as bar:
        check_checksums(files, bar.update)
