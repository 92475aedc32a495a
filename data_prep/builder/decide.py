"""Phase 2: decides which documents and paragraphs are kept, in which split and in which shard.

Uses the metadata of the prepared blocks, without reading any token, and writes one plan per shard. The result depends
on the prepared blocks and the options alone.
"""

import collections
import dataclasses
import itertools
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np
from etils import epath

from bert_jax.command.progress import progress_bar
from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions
from data_prep.builder import filtered, scratch
from data_prep.builder.duplicate_finder import DuplicateFinder
from data_prep.builder.prepare import FIRST_PLACES
from data_prep.builder.tables import BLOCK_ARRAYS, DocumentTables
from data_prep.duplicates import text_keys

SPLIT_DECISIONS = {"train": 0, "validation": 1}
# Reasons to remove a document, in the order in which the filters are applied.
_FILTERED, _EMPTY, _SHORT, _CONTAMINATED, _DUPLICATE, _NEAR_DUPLICATE, _EMPTIED = range(2, 9)


@dataclasses.dataclass(frozen=True)
class PreparedBlock:
    """A block that phase 1 has prepared."""

    name: str
    source: int
    """index of its source"""
    metadata: dict
    """see `prepare`"""


def decide(
    directory: epath.Path,
    blocks: list[PreparedBlock],
    options: BuildOptions,
    decontaminates: bool,
    token_bytes: int,
    local: pathlib.Path,
    finder: DuplicateFinder,
) -> tuple[list[str], dict]:
    """Decides on every document.

    Args:
      directory: the scratch directory, where the plans of the shards are written.
      blocks: in the order of the text.
      options: of the build.
      decontaminates: whether documents were compared with evaluation texts.
      token_bytes: size of a token id.
      local: a local directory for temporary columns.
      finder: of duplicates.

    Returns:
      names of the plans, and the report for corpus.json.

    Raises:
      UserError: one of the splits would have no documents.
    """
    metadata = [block.metadata for block in blocks]
    tables = DocumentTables(local, metadata, options)
    filters = filtered.FilterTables(tables, local, metadata) if options.has_filters else None
    read, sources = collections.defaultdict(collections.Counter), []
    paths, names = [directory / block.name for block in blocks], filtered.BLOCK_ARRAYS if filters else BLOCK_ARRAYS
    with progress_bar("deciding", len(blocks), "block") as bar:
        for index, (block, arrays) in enumerate(zip(blocks, scratch.iterate_arrays(paths, names), strict=True)):
            before = tables.num_documents
            documents = tables.add_block(index, arrays)
            if filters:
                filters.add_block(index, block.source, documents, arrays)
            added = tables.num_documents - before
            sources.append(np.full(added, block.source, np.int32))
            read[block.source]["documents"] += added
            read[block.source]["text_bytes"] += int(arrays["part_bytes"].sum())
            bar.update()
    source_of = np.concatenate([np.zeros(0, np.int32), *sources])
    decisions, paragraph_repeats, dropped = _decide_documents(
        tables, filters, blocks, options, decontaminates, finder, source_of < options.validation_sources
    )
    plans = []
    for split in SPLIT_DECISIONS:
        plans += _plan_split(directory, blocks, tables, split, decisions, paragraph_repeats, options, token_bytes)
    report = {
        "dropped": dropped,
        "cleaned": sum_counts(entry["cleaned"] for entry in metadata),
        "skipped": merge_skipped(metadata),
        "read": {
            str(i): counts | {"kept": _count_kept(decisions, tables, source_of == i)} for i, counts in read.items()
        },
    }
    report |= {"filters": filters.report()} if filters else {}
    scratch.write_json(directory / scratch.PLANS, {"plans": plans, "report": report})
    return plans, report


def _count_kept(decisions: np.ndarray, tables: DocumentTables, of_source: np.ndarray) -> dict[str, dict[str, int]]:
    """Documents and tokens of a source that are kept, by split."""
    kept = {split: np.flatnonzero(of_source & (decisions == code)) for split, code in SPLIT_DECISIONS.items()}
    return {
        split: {"documents": len(documents), "tokens": int(tables.tokens[documents].sum())}
        for split, documents in kept.items()
    }


def _decide_documents(
    tables: DocumentTables,
    filters: filtered.FilterTables | None,
    blocks: list[PreparedBlock],
    options: BuildOptions,
    decontaminates: bool,
    finder: DuplicateFinder,
    from_validation_source: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None, dict]:
    """The decision on each document [num_documents], which paragraphs are removed, and what each filter removed."""
    count, names = tables.num_documents, [block.name for block in blocks]
    decisions = np.zeros(count, np.uint8)
    tokens, text_bytes = tables.tokens[:count], tables.text_bytes[:count]
    dropped = {}

    def drop(filter_name: str, decision: int, which: np.ndarray) -> None:
        which = which & (decisions == 0)
        decisions[which] = decision
        dropped[filter_name] = {"documents": int(which.sum()), "text_bytes": int(text_bytes[which].sum())}

    if filters:
        drop("filtered_documents", _FILTERED, filters.removed())
        dropped["filtered_lines"] = filters.removed_lines()
    drop("empty_documents", _EMPTY, tokens == 0)
    if options.min_characters > 1:
        drop("short_documents", _SHORT, tables.characters[:count] < options.min_characters)
    if decontaminates:
        drop("leaked_documents", _CONTAMINATED, tables.contaminated[:count])
    if options.drop_duplicate_documents:
        drop("duplicate_documents", _DUPLICATE, finder.documents(tables, names, decisions == 0))
    if near := options.near_duplicates:
        drop("near_duplicates", _NEAR_DUPLICATE, finder.near(tables, names, decisions == 0, near))
    # Last, because the earlier one of two equal paragraphs must be kept.
    paragraph_repeats = None
    if options.drop_duplicate_paragraphs is not None:
        paragraph_repeats = finder.paragraphs(tables, names, decisions == 0, options.drop_duplicate_paragraphs)
        document = tables.paragraph_document[paragraph_repeats]
        np.subtract.at(tables.tokens, document, tables.paragraph_tokens[paragraph_repeats].astype(np.int64))
        drop("duplicate_paragraphs", _EMPTIED, tokens == 0)
        dropped["duplicate_paragraphs"] |= {
            "paragraphs": int(paragraph_repeats.sum()),
            "text_bytes": int(tables.paragraph_bytes[paragraph_repeats].sum(dtype=np.int64)),
        }
    if options.drop_repeated_lines:
        dropped["repeated_lines"] = sum_counts(block.metadata["repeated_lines"] for block in blocks)
    kept = np.flatnonzero(decisions == 0)
    places = text_keys.unit_interval_hash(tables.keys[kept, :2])
    decisions[kept[_held_out(places, from_validation_source[kept], options)]] = SPLIT_DECISIONS["validation"]
    return decisions, paragraph_repeats, dropped


def _held_out(places: np.ndarray, from_validation_source: np.ndarray, options: BuildOptions) -> np.ndarray:
    """Indices of the documents in the validation split.

    Args:
      places: a hash in [0, 1) of the text of each document that is kept.
      from_validation_source: whether it is from one of `options.validation_sources`.
      options: of the build.

    Raises:
      UserError: one of the splits would have no documents.
    """
    count = len(places)
    if count < 2:
        raise UserError(
            f"{'one document' if count else 'no document'} with text is left after the filters; a corpus needs two"
            " different ones, to train on and to hold out (a blank line divides documents of `text:` and `lines:`; a"
            " file is one of `text-files:`)"
        )
    if options.validation_sources:
        if from_validation_source.all() or not from_validation_source.any():
            flag = "--source" if from_validation_source.all() else "--validation-source"
            raise UserError(f"no document of {flag} with text is left after the filters: give more text")
        return np.flatnonzero(from_validation_source)
    wanted = options.validation_documents
    if wanted is not None and wanted >= count:
        raise UserError(f"--validation-documents {wanted} leaves none of the {count} documents to train on: give fewer")
    if wanted is None:
        wanted = int((places < options.validation_fraction).sum())
        # Two in each split where possible: random segments of next-sentence prediction come from another document.
        wanted = max(1, min(max(2, wanted), count - 2))
    return np.argsort(places, kind="stable")[:wanted]


def _plan_split(
    directory: epath.Path,
    blocks: list[PreparedBlock],
    tables: DocumentTables,
    split: str,
    decisions: np.ndarray,
    paragraph_repeats: np.ndarray | None,
    options: BuildOptions,
    token_bytes: int,
) -> list[str]:
    """Writes the plan of each shard of a split; returns their names."""
    belongs = decisions == SPLIT_DECISIONS[split]
    sizes = np.cumsum(np.where(belongs, tables.tokens[: len(decisions)], 0) * token_bytes)
    bounds = [0]
    while bounds[-1] < len(decisions):
        begun = sizes[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(min(len(decisions), int(np.searchsorted(sizes, begun + options.max_shard_bytes)) + 1))
        if sizes[bounds[-1] - 1] == sizes[-1]:
            bounds[-1] = len(decisions)  # the remaining documents have no token in this split
    plans, before = [], 0
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        part, end_part = int(tables.first_part[first]), int(tables.first_part[last])
        first_block = int(np.searchsorted(tables.part_offsets, part, "right")) - 1
        end_block = int(np.searchsorted(tables.part_offsets, end_part, "left"))
        parts = slice(int(tables.part_offsets[first_block]), int(tables.part_offsets[end_block]))
        is_kept = np.zeros(parts.stop - parts.start, np.bool_)
        is_kept[part - parts.start : end_part - parts.start] = np.repeat(
            belongs[first:last], np.diff(tables.first_part[first : last + 1])
        )
        arrays = {"wanted": is_kept, "starts": tables.starts[parts]}
        if paragraph_repeats is not None:
            paragraphs = slice(*tables.paragraph_offsets[[first_block, end_block]])
            arrays["paragraph_repeats"] = paragraph_repeats[paragraphs]
        metadata = {
            "split": split,
            "index": index,
            "count": len(bounds) - 1,
            "document": before,
            "units": [block.name for block in blocks[first_block:end_block]],
        }
        plans.append(scratch.shard_plan_file_name(split, index))
        scratch.write_arrays(directory / plans[-1], arrays, metadata)
        before += int(belongs[first:last].sum())
    return plans


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums of counts, by their names."""
    total = collections.Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def merge_skipped(metadata: list[dict]) -> dict[str, dict]:
    """What was skipped in some blocks by reason: its count, its bytes and its first places."""
    skipped: dict[str, dict] = {}
    for block in metadata:
        for reason, counted in block["skipped"].items():
            entry = skipped.setdefault(reason, {"count": 0, "bytes": 0, "first": []})
            entry["count"] += counted["count"]
            entry["bytes"] += counted["bytes"]
            entry["first"] = (entry["first"] + counted["first"])[:FIRST_PLACES]
    return skipped
