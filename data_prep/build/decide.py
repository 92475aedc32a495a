"""Phase 2: which documents and paragraphs stay, in which split, and in which shard.

Decides from what the units say about their documents, without reading any token, and writes one plan
per shard. A function of the units and the options alone.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
import sys

import numpy as np
from etils import epath

from bert_jax.errors import UserError
from bert_jax.progress import progress
from data_prep.build import scratch
from data_prep.build.prepare import FIRST_PLACES
from data_prep.build.tables import UNIT_ARRAYS, Tables
from data_prep.duplicates import near_duplicates, text_keys
from data_prep.options import Options

SPLIT_FATES = {"train": 0, "validation": 1}
# Why a document is left out; in the order in which the filters are applied.
_EMPTY, _SHORT, _LEAKED, _DUPLICATE, _NEAR_DUPLICATE, _EMPTIED = range(2, 8)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A prepared block."""

    name: str
    source: int
    """index of the source it came from"""
    facts: dict
    """what `prepare` says of it"""


def decide(
    directory: epath.Path, units: list[Unit], options: Options, has_leaks: bool, token_bytes: int, local: pathlib.Path
) -> tuple[list[str], dict]:
    """Decides on every document.

    Args:
      directory: the scratch directory; gets the plans of the shards.
      units: in the order of the text.
      options: of the build.
      has_leaks: documents were compared with evaluation texts.
      token_bytes: size of a token id.
      local: a local directory for what this takes note of.

    Returns:
      names of the plans, and the report that goes into corpus.json.

    Raises:
      UserError: one of the splits would have no documents.
    """
    surveys = [unit.facts for unit in units]
    tables = Tables(local, surveys, options)
    read = collections.defaultdict(collections.Counter)
    with progress("deciding", len(units), "unit") as bar:
        for index, unit in enumerate(units):
            arrays = scratch.read_arrays(directory / unit.name, UNIT_ARRAYS)
            before = tables.num_documents
            tables.add(index, arrays)
            read[unit.source]["documents"] += tables.num_documents - before
            read[unit.source]["text_bytes"] += int(arrays["part_bytes"].sum())
            bar.update()
    tables.finish()
    fates, paragraph_repeats, dropped = _fates(tables, options, has_leaks)
    if options.drop_repeated_lines:
        dropped["repeated_lines"] = _sum_counts(survey["repeated_lines"] for survey in surveys)
    plans = []
    for split in SPLIT_FATES:
        plans += _plan_split(directory, units, tables, split, fates, paragraph_repeats, options, token_bytes)
    report = {
        "dropped": dropped,
        "cleaned": _sum_counts(survey["cleaned"] for survey in surveys),
        "skipped": _skipped(surveys),
        "read": {str(source): dict(counts) for source, counts in read.items()},
    }
    scratch.write_json(directory / scratch.PLANS, {"plans": plans, "report": report})
    return plans, report


def _fates(tables: Tables, options: Options, has_leaks: bool) -> tuple[np.ndarray, np.ndarray | None, dict]:
    """What becomes of each document [num_documents], which paragraphs go, and what each filter removed."""
    count = tables.num_documents
    fates = np.zeros(count, np.uint8)
    tokens, text_bytes = tables.tokens[:count], tables.text_bytes[:count]
    dropped = {}

    def drop(filter_name: str, fate: int, which: np.ndarray) -> None:
        which = which & (fates == 0)
        fates[which] = fate
        dropped[filter_name] = {"documents": int(which.sum()), "text_bytes": int(text_bytes[which].sum())}

    drop("empty_documents", _EMPTY, tokens == 0)
    if options.min_characters > 1:
        drop("short_documents", _SHORT, tables.characters[:count] < options.min_characters)
    if has_leaks:
        drop("leaked_documents", _LEAKED, tables.leaks[:count])
    if options.drop_duplicate_documents:
        drop("duplicate_documents", _DUPLICATE, near_duplicates.repeats(tables.keys[:count, :2], fates == 0))
    if near := options.near_duplicates:
        similar = near_duplicates.near_duplicates(tables.signatures[:count], fates == 0, near.threshold)
        drop("near_duplicates", _NEAR_DUPLICATE, similar)
    # Last: what a paragraph repeats must stay itself.
    paragraph_repeats = None
    if tables.paragraph_keys is not None:
        long_enough = tables.paragraph_bytes >= options.drop_duplicate_paragraphs
        active = long_enough & (fates[tables.paragraph_document] == 0)
        paragraph_repeats = near_duplicates.repeats(tables.paragraph_keys, active)
        document = tables.paragraph_document[paragraph_repeats]
        np.subtract.at(tables.tokens, document, tables.paragraph_tokens[paragraph_repeats].astype(np.int64))
        drop("duplicate_paragraphs", _EMPTIED, tokens == 0)
        dropped["duplicate_paragraphs"] |= {
            "paragraphs": int(paragraph_repeats.sum()),
            "text_bytes": int(tables.paragraph_bytes[paragraph_repeats].sum(dtype=np.int64)),
        }
    places = text_keys.place(tables.keys[:count, :2])
    fates[(fates == 0) & (places < options.validation_fraction)] = SPLIT_FATES["validation"]
    _check_splits(fates, places)
    return fates, paragraph_repeats, dropped


def _check_splits(fates: np.ndarray, places: np.ndarray) -> None:
    kept = places[fates <= 1]
    train, validation = (int((fates == fate).sum()) for fate in SPLIT_FATES.values())
    if validation == 1 and train > 2:
        print(
            "note: 1 document is held out, and random segments of next-sentence prediction need 2;"
            f" --validation-fraction {_just_above(np.partition(kept, 1)[1])} would hold 2 out",
            file=sys.stderr,
        )
    if train and validation:
        return
    if len(kept) < 2:
        raise UserError(
            f"{len(kept)} different documents with text are left after the filters; a corpus needs at least 2, one to"
            " train on and one held out (a blank line divides documents of `text:` and `lines:`; a file is one of"
            " `text-files:`)"
        )
    if not validation:
        raise UserError(
            f"none of the {len(kept)} documents fell into the validation split;"
            f" --validation-fraction {_just_above(kept.min())} would hold one out, or give more text"
        )
    less = math.floor((kept.max() - 1e-4) * 1e4) / 1e4
    raise UserError(
        f"all of the {len(kept)} documents fell into the validation split;"
        f" --validation-fraction {less:.4f} would leave one to train on"
    )


def _just_above(place: float) -> str:
    """A fraction, with four digits, that takes the document at this place."""
    return f"{math.ceil((place + 1e-4) * 1e4) / 1e4:.4f}"


def _plan_split(
    directory: epath.Path,
    units: list[Unit],
    tables: Tables,
    split: str,
    fates: np.ndarray,
    paragraph_repeats: np.ndarray | None,
    options: Options,
    token_bytes: int,
) -> list[str]:
    """Writes the plan of each shard of a split; their names."""
    belongs = fates == SPLIT_FATES[split]
    sizes = np.cumsum(np.where(belongs, tables.tokens[: len(fates)], 0) * token_bytes)
    bounds = [0]
    while bounds[-1] < len(fates):
        begun = sizes[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(min(len(fates), int(np.searchsorted(sizes, begun + options.max_shard_bytes)) + 1))
        if sizes[bounds[-1] - 1] == sizes[-1]:
            bounds[-1] = len(fates)  # what is left has no token for this split
    plans, before = [], 0
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        part, behind = int(tables.first_part[first]), int(tables.first_part[last])
        from_unit = int(np.searchsorted(tables.part_offsets, part, "right")) - 1
        to_unit = int(np.searchsorted(tables.part_offsets, behind, "left"))
        parts = slice(int(tables.part_offsets[from_unit]), int(tables.part_offsets[to_unit]))
        wanted = np.zeros(parts.stop - parts.start, np.bool_)
        wanted[part - parts.start : behind - parts.start] = np.repeat(
            belongs[first:last], np.diff(tables.first_part[first : last + 1])
        )
        arrays = {"wanted": wanted, "starts": tables.starts[parts]}
        if paragraph_repeats is not None:
            paragraphs = slice(*tables.paragraph_offsets[[from_unit, to_unit]])
            arrays["paragraph_repeats"] = paragraph_repeats[paragraphs]
        facts = {
            "split": split,
            "index": index,
            "count": len(bounds) - 1,
            "document": before,
            "units": [unit.name for unit in units[from_unit:to_unit]],
        }
        plans.append(scratch.plan_name(split, index))
        scratch.write_arrays(directory / plans[-1], arrays, facts)
        before += int(belongs[first:last].sum())
    return plans


def _sum_counts(counts) -> dict[str, int]:
    total = collections.Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _skipped(surveys: list[dict]) -> dict:
    skipped: dict[str, dict] = {}
    for survey in surveys:
        for reason, about in survey["skipped"].items():
            entry = skipped.setdefault(reason, {"count": 0, "first": []})
            entry["count"] += about["count"]
            places = [f"{origin}: {detail}" for origin, detail in about["first"]]
            entry["first"] = (entry["first"] + places)[:FIRST_PLACES]
    return skipped
