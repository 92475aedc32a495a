"""Checks that the files of a corpus are those that corpus.json lists. Needs no jax."""

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
"""Files hashed at once; hashlib releases the GIL."""
BLOCK_BYTES = 1 << 22
PROGRESS_BYTES = 1 << 30
"""Total size from which a progress bar is shown; hashing less takes a few seconds at most."""
REMEDY = "copy the corpus again or rebuild it"


class ManifestFile(NamedTuple):
    """A file, with its checksum and size in corpus.json."""

    path: epath.Path
    sha256: str
    """in hex"""
    size: int
    """bytes"""


def manifest_files(directory: epath.Path, manifest: Mapping) -> list[ManifestFile]:
    """All files that corpus.json lists; `manifest` is its content.

    Raises:
      UserError: corpus.json lacks a file of the corpus.
    """
    files, splits = manifest["files"], manifest["splits"]
    needed = [TOKENIZER, DATASET_INFO, "features.json"]
    needed += [array_file(split, array) for split in SPLITS for array in ARRAYS]
    needed += [shard["file"] for split in splits.values() for shard in split["shards"]]
    missing = [*(split for split in SPLITS if split not in splits), *(name for name in needed if name not in files)]
    if missing:
        raise UserError(f"{directory / MANIFEST}: damaged, it lacks {missing[0]!r}; rebuild the corpus")
    return [ManifestFile(directory / name, entry["sha256"], entry["bytes"]) for name, entry in files.items()]


def check_file_sizes(files: Sequence[ManifestFile]) -> None:
    """Checks that each file exists and has the recorded size; reads none.

    Raises:
      UserError: the first file for which this is not so.
    """
    for file in files:
        if not file.path.exists():
            raise UserError(f"{file.path}: missing; {REMEDY}")
        if (size := file.path.stat().length) != file.size:
            raise UserError(f"{file.path}: damaged, it has {size} bytes where {MANIFEST} lists {file.size}; {REMEDY}")


def check_checksums(files: Sequence[ManifestFile], on_bytes: Callable[[int], object] | None = None) -> None:
    """Compares each file with its SHA-256, several at a time; `on_bytes` is called with the bytes of each read.

    Raises:
      UserError: the first file that differs.
    """
    lock = threading.Lock()

    def report_bytes(size: int) -> None:
        with lock:
            if on_bytes:
                on_bytes(size)

    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checksums = [pool.submit(_sha256, file, report_bytes) for file in files]
        try:
            for file, sha256 in zip(files, checksums, strict=True):
                if sha256.result() != file.sha256:
                    raise UserError(f"{file.path}: damaged, its SHA-256 is not the recorded one; {REMEDY}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sha256(manifest_file: ManifestFile, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with Path(local_path(manifest_file.path, manifest_file.sha256)).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def check_record_count(file: ManifestFile, count: int) -> None:
    """Checks that a shard has the number of records in corpus.json; reads none.

    Raises:
      UserError: it has another number, or is not an ArrayRecord file.
    """
    try:
        local = local_path(file.path, file.sha256)
        reader = array_record_module.ArrayRecordReader(local, options="readahead_buffer_size:0")
        num_records = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{file.path}: damaged, it cannot be read as ArrayRecord ({reason}); {REMEDY}") from error
    if num_records != count:
        raise UserError(f"{file.path}: holds {num_records} records where {MANIFEST} lists {count}; {REMEDY}")


def check_corpus_files(
    corpora: Sequence[Corpus],
    verify: Literal["checksums", "counts"],
    process_index: int = 0,
    process_count: int = 1,
) -> None:
    """Checks that the files of some corpora, of all their splits, agree with corpus.json.

    The processes of a run share the shards: process i mod `process_count` checks the i-th. Every process checks all
    other files, because each may read a copy of its own.

    Args:
      corpora: any split of each.
      verify: "checksums" reads every file and compares its SHA-256; "counts" reads none and compares sizes. Both
        compare the number of records of each shard. A file from an object store is copied to this host in either
        case, and its checksum is compared then.
      process_index, process_count: of this process.

    Raises:
      UserError: the first file of this process that is missing or differs, with the difference and a remedy.
    """
    shards: list[tuple[ManifestFile, int]] = []  # with their number of records
    other_files: list[ManifestFile] = []
    for corpus in corpora:
        manifest = read_manifest(corpus.directory)
        splits = manifest["splits"].values()
        records = {shard["file"]: shard["records"] for split in splits for shard in split["shards"]}
        for file in manifest_files(corpus.directory, manifest):
            if file.path.name in records:
                shards.append((file, records[file.path.name]))
            else:
                other_files.append(file)
    own_shards = shards[process_index::process_count]
    files = other_files + [file for file, _ in own_shards]
    check_file_sizes(files)
    if verify == "checksums":
        _check_all_checksums(files)
    for file, count in own_shards:
        check_record_count(file, count)


def _check_all_checksums(files: Sequence[ManifestFile]) -> None:
    size = sum(file.size for file in files)
    if size < PROGRESS_BYTES:
        check_checksums(files)
        return
    with progress("checksums (--data.verify counts skips them)", size, "B") as bar:
        check_checksums(files, bar.update)
