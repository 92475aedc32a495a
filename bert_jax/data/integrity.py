"""Checks that the files of a corpus are those that corpus.json lists. Needs no jax."""

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from etils import epath

from bert_jax.data.corpus import (
    ARRAYS,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Corpus,
    Manifest,
    array_file,
    read_manifest,
    stored_files,
)
from bert_jax.data.record import REMEDY, StoredFile, open_shard
from bert_jax.errors import UserError
from bert_jax.progress import progress_bar
from bert_jax.storage import cached_path

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
    needed = [TOKENIZER, DATASET_INFO, "features.json"]
    needed += [array_file(split, array) for split in SPLITS for array in ARRAYS]
    needed += [shard["file"] for split in splits.values() for shard in split["shards"]]
    missing = [*(split for split in SPLITS if split not in splits), *(name for name in needed if name not in files)]
    if missing:
        raise UserError(f"{directory / MANIFEST}: damaged, it lacks {missing[0]!r}; rebuild the corpus")
    return files


def check_file_sizes(files: Iterable[StoredFile]) -> None:
    """Checks that each file exists and has the recorded size; reads none.

    Raises:
      UserError: the first file for which this is not so.
    """
    for file in files:
        if not file.path.exists():
            raise UserError(f"{file.path}: missing; {REMEDY}")
        if (size := file.path.stat().length) != file.size:
            raise UserError(f"{file.path}: damaged, it has {size} bytes where {MANIFEST} lists {file.size}; {REMEDY}")


def check_checksums(files: Collection[StoredFile], description: str, min_bytes: int = 0) -> None:
    """Compares each file with its SHA-256, several at a time; shows progress if they have `min_bytes` together.

    Raises:
      UserError: the first file that differs.
    """
    size, lock = sum(file.size for file in files), threading.Lock()
    bar = progress_bar(description, size, "B", shown=size >= min_bytes)

    def report_bytes(count: int) -> None:
        with lock:
            bar.update(count)

    with bar, ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        checksums = [pool.submit(_sha256, file, report_bytes) for file in files]
        try:
            for file, sha256 in zip(files, checksums, strict=True):
                if sha256.result() != file.sha256:
                    raise UserError(f"{file.path}: damaged, its SHA-256 is not the recorded one; {REMEDY}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _sha256(stored: StoredFile, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with Path(cached_path(stored.path, stored.sha256)).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


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
    files = [
        file for one in corpora for file in require_all_files(one.directory, read_manifest(one.directory)).values()
    ]
    shards = [file for file in files if file.records is not None][process_index::process_count]
    own_files = [*(file for file in files if file.records is None), *shards]
    check_file_sizes(own_files)
    if verify == "checksums":
        check_checksums(own_files, "checksums (--data.verify counts skips them)", PROGRESS_BYTES)
    for shard in shards:
        open_shard(shard).close()
