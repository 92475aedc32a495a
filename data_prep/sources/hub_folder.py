"""`hub:FOLDER[:CONFIG[:SPLIT]]@FIELD`: a folder that a download or a clone of a dataset of the Hugging Face Hub left.

The SPEC becomes a source of Parquet or JSON lines, whose files are found by hub_layout.py instead of by a glob.
"""

import collections
import dataclasses
import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage import listing
from bert_jax.storage.listing import FileVersion
from bert_jax.storage.paths import to_path
from data_prep.sources import files, hub_layout
from data_prep.sources.base import Source
from data_prep.sources.jsonl import JsonLinesSource
from data_prep.sources.parquet import ParquetSource

_ARGUMENT = re.compile(r"(?P<folder>(?:[a-z0-9]+://)?[^:]+)(?::(?P<config>[^:]+)(?::(?P<split>[^:]+))?)?")
_SOURCES = {".parquet": ParquetSource, ".jsonl": JsonLinesSource, ".json": JsonLinesSource, ".ndjson": JsonLinesSource}
_POINTER_BYTES = 1024
"""A file that Git LFS left in place of its content is shorter."""
_MAX_NAMES = 20
_SHARD = re.compile(r"(.*-)\d{5}-of-(\d{5})(.*)")


@dataclasses.dataclass(frozen=True)
class HubSplit:
    """The files of a split."""

    spec: str
    """for messages"""
    folder: str
    config: str
    split: str

    @classmethod
    def from_spec(cls, spec: str, argument: str, workers: int) -> Source:
        """The source of a split, `train` unless another is named.

        Raises:
          UserError: the SPEC, the folder, or a name in it is wrong, or the files have no format that is read.
        """
        place, _, field = argument.rpartition("@")
        match = _ARGUMENT.fullmatch(place)
        if not match or not field:
            raise UserError(f"source {spec}: write hub:FOLDER[:CONFIG[:SPLIT]]@FIELD, e.g. `hub:my_dataset@text`")
        folder = _Folder.read(spec, match["folder"])
        splits = folder.splits(match["config"])
        split = match["split"] or hub_layout.role_of(splits, "train")
        if split not in splits:
            there = f"there are: {_names(sorted(splits))}; name one as in hub:FOLDER:CONFIG:SPLIT@FIELD"
            raise UserError(f"source {spec}: no split {split or 'train'!r}; {there}")
        return _source(spec, cls(spec, match["folder"], match["config"] or folder.chosen, split), splits[split], field)

    def find(self) -> dict[str, FileVersion]:
        """The files, sorted by path.

        Raises:
          UserError: there are none, or they are pointers of Git LFS.
        """
        found, folder = _Folder.read(self.spec, self.folder), self.folder
        names = found.splits(self.config)[self.split]
        pointers = [name for name in names if _is_pointer(found.root + name, found.versions[name])]
        if pointers:
            raise UserError(
                f"source {self.spec}: {len(pointers)} of {len(names)} files are pointers of Git LFS without their"
                f" content, e.g. {pointers[0]}; run `git lfs pull` in {folder}"
            )
        return {found.root + name: found.versions[name] for name in names}


@dataclasses.dataclass(frozen=True)
class _Folder:
    """What is in a folder."""

    spec: str
    root: str
    """the prefix of its paths"""
    versions: dict[str, FileVersion]
    """of its data files, by relative path"""
    configs: dict[str, hub_layout.Splits]
    chosen: str | None
    """the configuration that is read unless another is named"""
    unfinished: int
    """files of which only a part was downloaded"""

    @classmethod
    def read(cls, spec: str, folder: str) -> "_Folder":
        path = to_path(folder)
        if not path.is_dir():
            raise UserError(
                f"source {spec}: there is no folder {folder}; `hf download REPOSITORY --repo-type dataset --local-dir"
                f" {folder}` makes one"
            )
        found = listing.find_files(f"{glob.escape(str(path).rstrip('/'))}/**/*")
        root = str(path).rstrip("/") + "/"
        versions = {name.removeprefix(root): version for name, version in found.items()}
        revisions = sorted({name.split("/")[1] for name in versions if name.startswith("snapshots/")})
        if revisions:
            raise UserError(
                f"source {spec}: {folder} is a cache of the Hub; write hub:{folder}/snapshots/REVISION, with the"
                f" REVISION {_names(revisions, ' or ')}"
            )
        names = hub_layout.data_files(versions)
        readme = None
        if "README.md" in versions:
            with files.readable(f"{root}README.md"):
                readme = epath.Path(f"{root}README.md").read_bytes().decode(errors="replace")
        try:
            configs, chosen = hub_layout.configurations(names, readme)
        except hub_layout.HeaderError as error:
            raise UserError(f"source {spec}: {folder}/README.md: {error}; read its files by their format") from error
        if not configs:
            kinds = collections.Counter(epath.Path(name).suffix or name for name in versions)
            there = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(5)) or "no file"
            raise UserError(f"source {spec}: {folder} has no data files; there is {there}")
        unfinished = sum(name.startswith(".cache/") and name.endswith(".incomplete") for name in versions)
        return cls(spec, root, {name: versions[name] for name in names}, configs, chosen, unfinished)

    def splits(self, config: str | None) -> hub_layout.Splits:
        """Of a configuration, or of that which is read unless one is named."""
        name = config or self.chosen
        if name in self.configs:
            return self.configs[name]
        there = _names(sorted(self.configs))
        if name:
            raise UserError(f"source {self.spec}: no configuration {name!r} with files; there are: {there}")
        example = f"hub:FOLDER:{min(self.configs)}@FIELD"
        raise UserError(f"source {self.spec}: has several configurations, {there}; name one, as in {example}")


def _source(spec: str, split: HubSplit, names: list[str], field: str) -> Source:
    formats = sorted({hub_layout.format_of(name) for name in names})
    kinds = {_SOURCES.get(one) for one in formats}
    if len(kinds) > 1 or None in kinds:
        what = f"its files are {' and '.join(formats)}, e.g. {names[0]}"
        remedy = f"read one format by its kind, e.g. `jsonl:{split.folder}/*.jsonl@{field}`"
        raise UserError(f"source {spec}: {what}, not .parquet or .jsonl alone; {remedy}")
    return kinds.pop()(spec, pattern=split, field=field)


def validation_splits(sources: Sequence[Source]) -> list[Source]:
    """Sources of the validation splits that belong to training splits among `sources`, and are not among them."""
    given = {(one.folder, one.config, one.split) for one in _splits(sources).values()}
    found = []
    for source, split in ((sources[index], split) for index, split in _splits(sources).items()):
        splits = _Folder.read(source.spec, split.folder).splits(split.config)
        name = hub_layout.role_of(splits, "validation")
        if name and split.split in hub_layout.KEYWORDS["train"] and (split.folder, split.config, name) not in given:
            spec = f"hub:{split.folder}:{split.config}:{name}@{source.field}"
            read = _source(spec, dataclasses.replace(split, spec=spec, split=name), splits[name], source.field)
            same = {name: getattr(source, name) for name in ("language", "encoding", "license", "source_name", "score")}
            found.append(dataclasses.replace(read, **same))
    return found


def notes(sources: Sequence[Source]) -> Iterator[str]:
    """What is read of each folder and what is not, for messages."""
    read: dict[tuple[str, str], set[str]] = {}
    for split in _splits(sources).values():
        read.setdefault((split.folder, split.config), set()).add(split.split)
    for (place, config), names in read.items():
        folder = _Folder.read(f"hub:{place}", place)
        splits = folder.splits(config)
        among = f" (of {len(folder.configs)} configurations, {config})" if len(folder.configs) > 1 else ""
        note = f"hub:{place}{among}: reads {_counts({name: splits[name] for name in sorted(names)})}"
        if left := {name: found for name, found in splits.items() if name not in names}:
            note += f"; leaves out {_counts(left)}"
        in_splits = {name for one in folder.configs.values() for found in one.values() for name in found}
        if others := len(folder.versions) - len(in_splits):
            note += f"; {others:,} data files belong to no split"
        for name in sorted(names):
            if absent := _absent_shards(splits[name]):
                note += f"; {absent:,} shards of {name} are not here"
        if folder.unfinished:
            note += f"; the download was interrupted ({folder.unfinished} .incomplete in .cache)"
        yield note


def _splits(sources: Sequence[Source]) -> Mapping[int, HubSplit]:
    patterns: dict[int, Any] = {index: getattr(source, "pattern", None) for index, source in enumerate(sources)}
    return {index: pattern for index, pattern in patterns.items() if isinstance(pattern, HubSplit)}


def _counts(splits: hub_layout.Splits) -> str:
    return ", ".join(
        f"{name} ({len(found):,} {'file' if len(found) == 1 else 'files'})" for name, found in splits.items()
    )


def _names(names: Sequence[str], separator: str = ", ") -> str:
    return separator.join([*names[:_MAX_NAMES], *(["..."] if len(names) > _MAX_NAMES else [])])


def _absent_shards(names: Sequence[str]) -> int:
    """How many files are missing of sets whose names end in "-00000-of-00002"."""
    present = collections.Counter(
        (match[1], match[3], int(match[2])) for name in names if (match := _SHARD.fullmatch(name))
    )
    return sum(max(0, shards - count) for (_, _, shards), count in present.items())


def _is_pointer(path: str, version: FileVersion) -> bool:
    if version.size >= _POINTER_BYTES:
        return False
    with files.readable(path), epath.Path(path).open("rb") as file:
        return file.read(len(files.POINTER)) == files.POINTER
