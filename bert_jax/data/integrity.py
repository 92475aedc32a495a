"""Checks that the files of a corpus are those that corpus.json lists. Needs no jax."""

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from etils import epath

from bert_jax.command.progress import progress_bar
from bert_jax.data.corpus import Corpus
from bert_jax.data.manifest import (
    MANIFEST,
    SOURCE_FILES,
    SPLITS,
    TOKENIZER,
    Manifest,
    array_file,
    array_names,
    read_manifest,
    stored_files,
)
from bert_jax.data.shards import REMEDY, StoredFile, open_shard
from bert_jax.errors import UserError
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.files import COPY_THREADS
from bert_jax.storage.listing import file_sizes
from bert_jax.storage.paths import is_remote
from bert_jax.storage.ranges import read_blocks

DATASET_INFO = "dataset_info.json"
THREADS = 8
"""Files hashed at once; hashlib releases the GIL."""
BLOCK_BYTES = 1 << 22
PROGRESS_BYTES = 1 << 30
"""Total size from which a progress bar is shown; hashing less takes a few seconds at most."""


def require_all_files(directory: epath.Path, manifest: Manifest) -> dict[str, StoredFile]:
    """The files that corpus.json lists, by name.

    Raises:
      UserError: it lacks a file of the corpus.
    """
    files, splits = stored_files(directory, manifest), manifest["splits"]
    needed = [TOKENIZER, SOURCE_FILES, DATASET_INFO, "features.json"]
    needed += [array_file(split, array) for split in splits for array in array_names(splits[split])]
    needed += [shard["file"] for split in splits.values() for shard in split["shards"]]
    missing = [*(split for split in SPLITS if split not in splits), *(name for name in needed if name not in files)]
    if missing:
        raise UserError(f"{directory / MANIFEST}: damaged, it lacks {missing[0]!r}; rebuild the corpus")
    return files


def check_file_sizes(files: Collection[StoredFile]) -> None:
    """Checks that each file exists and has the recorded size; reads none. Directories are listed once.

    Raises:
      UserError: the first file for which this is not so.
    """
    sizes = {directory: file_sizes(directory) for directory in {file.path.parent for file in files}}
    for file in files:
        size = sizes[file.path.parent].get(file.path.name)
        if size is None:
            raise UserError(f"{file.path}: missing; {REMEDY}")
        if size != file.size:
            raise UserError(f"{file.path}: damaged, it has {size} bytes where {MANIFEST} lists {file.size}; {REMEDY}")


def check_checksums(
    files: Collection[StoredFile], caches: Collection[LocalCache], description: str, min_bytes: int = 0
) -> None:
    """Compares each file with its SHA-256, several at a time; shows progress if they have `min_bytes` together.

    Args:
      files: to compare.
      caches: of each file; one of a store that has no room there is read without keeping it.
      description: of the progress bar.
      min_bytes: size from which there is one.

    Raises:
      UserError: the first file that differs.
    """
    size, lock = sum(file.size for file in files), threading.Lock()
    bar = progress_bar(description, size, "B", shown=size >= min_bytes)

    def report_bytes(count: int) -> None:
        with lock:
            bar.update(count)

    with bar, ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checksums = [pool.submit(_sha256, *pair, report_bytes) for pair in zip(files, caches, strict=True)]
        try:
            for file, sha256 in zip(files, checksums, strict=True):
                if sha256.result() != file.sha256:
                    raise UserError(f"{file.path}: damaged, its SHA-256 is not the recorded one; {REMEDY}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sha256(stored: StoredFile, cache: LocalCache, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    local = cache.path_if_room(stored.path, stored.sha256, stored.size)
    for block in read_blocks(stored.path, stored.size) if local is None else _local_blocks(local):
        digest.update(block)
        on_bytes(len(block))
    return digest.hexdigest()


def _local_blocks(path: str) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def check_corpus_files(
    corpora: Sequence[Corpus],
    verify: Literal["checksums", "counts"],
    process_index: int = 0,
    process_count: int = 1,
    keep_open: bool = False,
) -> None:
    """Checks that the files of some corpora, of all their splits, agree with corpus.json.

    The processes of a run share the shards: process i mod `process_count` checks the i-th. Every process checks all
    other files, because each may read a copy of its own.

    Args:
      corpora: any split of each.
      verify: "checksums" reads every file and compares its SHA-256; "counts" reads none and compares sizes. Both
        compare the number of records of each shard. With "checksums", files of a store are copied to this host as far
        as the cache has room.
      process_index, process_count: of this process.
      keep_open: shards of the given splits stay open, for this process to read; to read the index of 200,000 records
        takes 11 ms, to keep it 1.7 MB.

    Raises:
      UserError: the first file of this process that is missing or differs, with the difference and a remedy.
    """
    files = [
        (file, one)
        for one in corpora
        for file in require_all_files(one.directory, read_manifest(one.directory)).values()
    ]
    shards = [pair for pair in files if pair[0].records is not None][process_index::process_count]
    own_files = [*(pair for pair in files if pair[0].records is None), *shards]
    check_file_sizes([file for file, _ in own_files])
    if verify == "checksums":
        caches = [one.cache for _, one in own_files]
        check_checksums(
            [file for file, _ in own_files], caches, "checksums (--data.verify counts skips them)", PROGRESS_BYTES
        )
    remote = any(is_remote(file.path) for file, _ in shards)
    with ThreadPoolExecutor(COPY_THREADS if remote else 1) as pool:
        for _ in pool.map(partial(_open, keep_open=keep_open), shards):
            pass


def _open(pair: tuple[StoredFile, Corpus], keep_open: bool) -> None:
    shard, corpus = pair
    if keep_open:
        corpus.open_shard(shard)
    else:
        open_shard(shard, corpus.cache).close()
