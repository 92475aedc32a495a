"""Completes a corpus from its shards: length arrays, TFDS metadata, the datasheet and, last, corpus.json.

docs/corpus.md specifies the format.
"""

import gzip
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from bert_jax.data.manifest import (
    DATASHEET,
    FORMAT_VERSION,
    GROUP_COUNTS,
    GROUPS,
    INCOMPLETE,
    MANIFEST,
    MAX_GROUPS,
    SOURCE_FILES,
    SPLITS,
    TOKENIZER,
    array_file,
    array_names,
    token_dtype,
)
from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.builder import scratch
from data_prep.sources.files import file_entry

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_COUNTS = (
    "documents",
    "sentences",
    "tokens",
    "records",
    "unknown_tokens",
    "text_bytes",
    "unknown_bytes",
    "word_start_bytes",
)


def finish_corpus(
    directory: epath.Path,
    scratch_dir: epath.Path,
    name: str,
    tokenizer: Tokenizer,
    report: dict,
    source_files: Iterable[Mapping],
    format_datasheet: Callable[[dict], str],
) -> dict:
    """Completes a corpus in a directory whose shards are all written.

    Args:
      directory: of the shards.
      scratch_dir: the directory with the arrays and metadata of each shard, see `scratch.shard_marker_name`.
      name: of the corpus.
      tokenizer: that made the ids.
      report: further content of corpus.json; JSON values.
      source_files: the lines of SOURCE_FILES; JSON values.
      format_datasheet: returns the content of DATASHEET from that of corpus.json.

    Returns:
      the content of corpus.json.

    Raises:
      UserError: another build has completed a corpus in the directory.
    """
    check_not_finished(directory)
    splits, files, infos = {}, {}, []
    for split in SPLITS:
        shards = scratch.shard_markers(scratch_dir, split)
        facts = [scratch.read_metadata(path) for path in shards]
        splits[split] = {count: sum(shard[count] for shard in facts) for count in _COUNTS}
        splits[split]["groups"] = _sum_groups([shard["groups"] for shard in facts])
        splits[split]["languages"] = _sum_languages(splits[split]["groups"])
        splits[split]["shards"] = [{"file": shard["file"], "records": shard["records"]} for shard in facts]
        files |= {shard["file"]: {"sha256": shard["sha256"], "bytes": shard["bytes"]} for shard in facts}
        files |= _write_arrays(directory, split, shards, splits[split], tokenizer.vocab_size)
        sizes = [shard["records"] for shard in facts], sum(shard["record_bytes"] for shard in facts)
        infos.append(tfds.core.SplitInfo(name=split, shard_lengths=sizes[0], num_bytes=sizes[1]))
    saved = [path.name for path in tokenizer.save(directory / TOKENIZER)]
    _write_tfds_metadata(directory, name, tokenizer.vocab_size, infos)
    _write_source_files(directory / SOURCE_FILES, source_files)
    for file in (*saved, SOURCE_FILES, "dataset_info.json", "features.json"):
        files[file] = file_entry(directory / file)
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "tokenizer": {"file": TOKENIZER, "fingerprint": tokenizer.fingerprint},
        "vocab_size": tokenizer.vocab_size,
        "splits": splits,
        **report,
        "files": dict(sorted(files.items())),
    }
    write_atomic(directory / DATASHEET, format_datasheet(manifest).encode())
    scratch.write_json(directory / MANIFEST, manifest)
    return manifest


def _sum_groups(shards: list[list[dict]]) -> list[dict]:
    """Groups with their counts, in the order of their first documents.

    Raises:
      UserError: there are too many.
    """
    groups: dict[tuple, dict] = {}
    for entry in itertools.chain.from_iterable(shards):
        total = groups.setdefault(_group_key(entry), entry | dict.fromkeys(GROUP_COUNTS, 0))
        for count in GROUP_COUNTS:
            total[count] += entry[count]
    if len(groups) > MAX_GROUPS:
        raise UserError(
            f"the documents have {len(groups):,} combinations of source, language and score, and at most "
            f"{MAX_GROUPS:,} are possible: build with fewer values of --source-name or --score-bounds"
        )
    return [*groups.values()]


def _group_key(entry: Mapping) -> tuple:
    """What distinguishes groups."""
    return entry["source"], entry["language"], entry["score"]


def _sum_languages(groups: list[dict]) -> dict[str, dict[str, int]]:
    """Counts by language, in the order of the codes."""
    languages = {code: dict.fromkeys(GROUP_COUNTS, 0) for code in sorted({group["language"] for group in groups})}
    for group in groups:
        for count in GROUP_COUNTS:
            languages[group["language"]][count] += group[count]
    return languages


def _write_arrays(directory: epath.Path, split: str, shards: list[epath.Path], counts: dict, vocab_size: int) -> dict:
    """Joins the arrays of the shards, one shard at a time; returns checksums and sizes of the files."""

    def read(array: str) -> Iterator[np.ndarray]:
        for path in shards:
            yield scratch.read_arrays(path, (array,))[array]

    def offsets(array: str) -> Iterator[np.ndarray]:
        before = 0
        yield np.zeros(1, "<i8")
        for sizes in read(array):
            ends = before + np.cumsum(sizes, dtype="<i8")
            before = int(ends[-1])
            yield ends

    token_counts = np.zeros(vocab_size, "<i8")
    for shard_counts in read("token_counts"):
        token_counts += shard_counts
    contents = {
        "sentence_lengths": ("<u2", counts["sentences"], read("sentence_lengths")),
        "document_offsets": ("<i8", counts["documents"] + 1, offsets("document_sentences")),
        "record_offsets": ("<i8", counts["records"] + 1, offsets("record_sentences")),
        "token_counts": ("<i8", vocab_size, iter([token_counts])),
        "word_starts": ("|u1", counts["word_start_bytes"], read("word_starts")),
        GROUPS: ("<u2", counts["documents"], _document_groups(shards, counts["groups"])),
    }
    files = {}
    for array in array_names(counts):
        dtype, length, chunks = contents[array]
        path = directory / array_file(split, array)
        with path.open("wb") as file:
            header = {"descr": dtype, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            for chunk in chunks:
                file.write(chunk.astype(dtype).tobytes())
        files[path.name] = file_entry(path)
    return files


def _document_groups(shards: list[epath.Path], groups: list[dict]) -> Iterator[np.ndarray]:
    """Of each shard, the index in `groups` of the group of each document."""
    indices = {_group_key(group): index for index, group in enumerate(groups)}
    for path in shards:
        own = np.array([indices[_group_key(group)] for group in scratch.read_metadata(path)["groups"]], np.uint16)
        yield own[scratch.read_arrays(path, (GROUPS,))[GROUPS]]


def _write_source_files(path: epath.Path, source_files: Iterable[Mapping]) -> None:
    """Writes one line at a time; the bytes depend on the content only."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as lines:
        for entry in source_files:
            lines.write(json.dumps(entry).encode() + b"\n")


def _write_tfds_metadata(directory: epath.Path, name: str, vocab_size: int, infos: list) -> None:
    def raw(dtype):
        return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding="bytes")

    features = tfds.features.FeaturesDict(
        {
            "document": np.int64,
            "part": np.int32,
            "tokens": raw(token_dtype(vocab_size).type),
            "sentence_ends": raw(np.uint16),
        }
    )
    template = tfds.core.ShardedFileTemplate(data_dir=directory, dataset_name=name, filetype_suffix="array_record")
    tfds.folder_dataset.write_metadata(
        data_dir=os.fspath(directory),
        features=features,
        split_infos=infos,
        filename_template=template,
        check_data=False,
    )


def check_not_finished(directory: epath.Path) -> None:
    """Raises UserError if the directory contains a corpus, after removing a scratch directory that is left in it."""
    if (directory / MANIFEST).exists():
        (directory / INCOMPLETE).rmtree(missing_ok=True)  # its build was killed while it removed this
        raise UserError(f"{directory}: already holds a corpus; choose another --out or remove it first")


def check_name(name: str) -> None:
    """Raises UserError unless TFDS accepts the name for a dataset."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--name {name!r}: must be lower-case letters, digits and _, a letter first")
