"""corpus.json: what a prepared corpus has, the files and their names, and its identity. docs/corpus.md specifies it."""

import hashlib
import json
import os
from typing import Annotated, TypedDict

import numpy as np
from etils import epath

from bert_jax.data.shards import StoredFile
from bert_jax.errors import UserError, require
from bert_jax.field_validation import FileName, Interval, Sha256
from bert_jax.storage.json_files import read_json_as
from bert_jax.storage.paths import check_reachable

FORMAT_VERSION = 4
MANIFEST = "corpus.json"
DATASHEET = "README.md"
"""What the corpus is, in words; people may edit it, so MANIFEST has no checksum of it."""
INCOMPLETE = "corpus.incomplete"
TOKENIZER = "tokenizer.json"
SOURCE_FILES = "source_files.jsonl.gz"
"""The files that a corpus was made of, an object in each line; too many for corpus.json (100 M: 15 GB)."""
SPLITS = ("train", "validation")
ARRAYS = ("sentence_lengths", "document_offsets", "record_offsets", "token_counts", "word_starts")
GROUPS = "document_groups"
MAX_GROUPS = 1 << 16
MAX_RECORD_TOKENS = 8192
REBUILD = "build the corpus again"
StoredCount = Annotated[int, Interval("[0, 281474976710656)")]
"""A number in corpus.json, in 48 bits."""


class ShardEntry(TypedDict):
    """A shard in corpus.json."""

    file: FileName
    records: StoredCount


class LanguageEntry(TypedDict):
    """A language in corpus.json; its counts are those of `SplitEntry`."""

    documents: StoredCount
    sentences: StoredCount
    tokens: StoredCount
    unknown_tokens: StoredCount
    text_bytes: StoredCount
    unknown_bytes: StoredCount


GROUP_COUNTS = tuple(LanguageEntry.__annotations__)
"""What is counted by group and by language."""


class GroupEntry(LanguageEntry):
    """Documents of one source, language and score, in corpus.json."""

    source: str
    language: str
    score: float | None


class _OptionalCounts(TypedDict, total=False):
    languages: dict[str, LanguageEntry]
    groups: list[GroupEntry]
    """In the order of their first documents. Corpora that were built before languages or groups lack them."""


class SplitEntry(_OptionalCounts):
    """A split in corpus.json."""

    documents: StoredCount
    sentences: StoredCount
    tokens: StoredCount
    records: StoredCount
    unknown_tokens: StoredCount
    text_bytes: StoredCount
    unknown_bytes: StoredCount
    """Bytes of text that became unknown ids."""
    word_start_bytes: StoredCount
    """Size of `Corpus.word_starts`."""
    shards: list[ShardEntry]


class TokenizerEntry(TypedDict):
    """The tokenizer in corpus.json."""

    fingerprint: str


class FileEntry(TypedDict):
    """A file in corpus.json."""

    sha256: Sha256
    bytes: StoredCount


class Manifest(TypedDict):
    """The part of corpus.json that this module and `integrity` read."""

    name: FileName
    tokenizer: TokenizerEntry
    vocab_size: StoredCount
    splits: dict[str, SplitEntry]
    files: dict[FileName, FileEntry]


def array_file(split: str, array: str) -> str:
    """File name of one of `array_names`."""
    return f"{split}.{array}.npy"


def array_names(counts: SplitEntry) -> tuple[str, ...]:
    """The arrays of a split: ARRAYS, and GROUPS if it has more than one group of documents."""
    return (*ARRAYS, GROUPS) if len(counts.get("groups", ())) > 1 else ARRAYS


def shard_file(name: str, split: str, index: int, count: int) -> str:
    """File name of a shard, in TFDS's naming scheme."""
    return f"{name}-{split}.array_record-{index:05d}-of-{count:05d}"


def token_dtype(vocab_size: int) -> np.dtype:
    """Little-endian type of token ids in records: uint16 if every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def read_manifest(directory: os.PathLike | str) -> dict:
    """The content of corpus.json; the values of `Manifest` are checked.

    Raises:
      UserError: the directory does not exist, holds no finished corpus or one of another format, its corpus.json is
        damaged, or its store cannot be reached.
    """
    directory = epath.Path(directory)
    check_reachable(directory)
    require(directory.is_dir(), f"{directory}: no such corpus; make one with `bert-data build`")
    path = directory / MANIFEST
    if not path.exists():
        if versions := sorted(os.fspath(version.parent) for version in directory.glob(f"*/{MANIFEST}")):
            raise UserError(f"{directory}: not a corpus, but it contains some: {', '.join(versions)}; name one of them")
        raise UserError(f"{directory}: not a finished corpus (it has no {MANIFEST}); build it with `bert-data build`")
    return read_json_as(path, Manifest, REBUILD, FORMAT_VERSION)


def stored_files(directory: epath.Path, manifest: Manifest) -> dict[str, StoredFile]:
    """The files that corpus.json lists, by name."""
    splits = manifest["splits"].values()
    records = {shard["file"]: shard["records"] for split in splits for shard in split["shards"]}
    return {
        name: StoredFile(directory / name, entry["sha256"], entry["bytes"], records.get(name))
        for name, entry in manifest["files"].items()
    }


def identity_of(directory: os.PathLike | str, manifest: dict) -> str:
    """SHA-256, in hex, of the content of a corpus: records, length arrays and tokenizer, in this format.

    Word starts are left out, because they follow from the records and the tokenizer. The identity does not depend on
    the name of the corpus, the paths and names of its sources, or the settings of the build.

    Args:
      directory: of the corpus, for the message.
      manifest: the content of corpus.json.

    Raises:
      UserError: the manifest lacks a file.
    """
    try:
        files = manifest["files"]
        content = {"format_version": manifest["format_version"], "tokenizer": manifest["tokenizer"]["fingerprint"]}
        for split, counts in manifest["splits"].items():
            names = [
                *(one["file"] for one in counts["shards"]),
                *(array_file(split, one) for one in array_names(counts)),
            ]
            sums = [(name, files[name]["sha256"]) for name in names]
            content[split] = [digest for name, digest in sums if name != array_file(split, "word_starts")]
    except KeyError as error:
        raise UserError(f"{epath.Path(directory) / MANIFEST}: damaged, it lacks {error}; rebuild the corpus") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
