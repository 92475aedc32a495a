"""Which files of a folder of the Hugging Face Hub are which split of which configuration.

README.md says so in its YAML header, or names do; the rules are those of `datasets` 5.2 (`datasets/data_files.py` and
huggingface.co/docs/hub/datasets-file-names-and-splits). One thing is added: without a header, `datasets` takes
`en/train.jsonl` and `de/train.jsonl` for one split; here they are the configurations `en` and `de`.
"""

import fnmatch
import functools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

DEFAULT = "default"
"""Name of the configuration of a folder that names none."""
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and directories, by split."""
Splits = dict[str, list[str]]
"""Paths by name of the split"""

_SEPARATOR = r"[-._ 0-9]"
_WORDS = {
    split: re.compile(rf"(?:^|.*{_SEPARATOR})(?:{'|'.join(words)})(?:{_SEPARATOR}.*|$)")
    for split, words in KEYWORDS.items()
}
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_NOT_DATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
_COMPRESSIONS = (".gz", ".bz2", ".zst", ".xz")
_FORMATS = {".parquet", ".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".txt", ".arrow", ".xml", ".zip"}
_MAX_MERGED = 10_000
_HEADER = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.M | re.S)


class _Loader(yaml.SafeLoader):
    """Limits merge keys (`<<: [*a, *a]`), whose entries are copied: ten levels of ten would be 10^10 entries."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_MERGED:
            raise yaml.YAMLError(f"a mapping has more than {_MAX_MERGED:,} entries")


class HeaderError(ValueError):
    """The header of README.md has not the form of a dataset's; the message says what is wrong."""


def format_of(path: str) -> str | None:
    """The suffix of a data file without that of its compression, such as ".jsonl"; None: it is none."""
    name = pathlib.PurePosixPath(path)
    if name.suffix.lower() in _COMPRESSIONS:
        name = name.with_suffix("")
    return name.suffix.lower() if name.suffix.lower() in _FORMATS else None


def data_files(paths: Iterable[str]) -> list[str]:
    """Those relative paths that are data files, sorted: not hidden, nor a description of the dataset."""
    return sorted(
        path
        for path in paths
        if not re.search(r"(?:^|/)(?:\.|__)", path)
        and path.rpartition("/")[2] not in _NOT_DATA
        and format_of(path) is not None
    )


def configurations(paths: list[str], readme: str | None) -> tuple[dict[str, Splits], str | None]:
    """The splits of each configuration that has files, and the one that is read unless another is named.

    Args:
      paths: of `data_files`.
      readme: the text of README.md, if there is one.

    Raises:
      HeaderError: its header is malformed, or a name belongs to two splits.
    """
    entries = _header(readme or "").get("configs")
    if entries is None:
        found = _by_names(paths)
        marked = None
    else:
        found, marked = {}, None
        for entry in _checked(entries, list, "configs", "a list"):
            name, splits = _configuration(paths, _checked(entry, dict, "configs", "a list of mappings"))
            if splits:
                found[name] = splits
            if splits and entry.get("default") is True:
                marked = name
    single = next(iter(found)) if len(found) == 1 else None
    return found, marked or single or (DEFAULT if DEFAULT in found else None)


def role_of(splits: Mapping[str, Any], role: str) -> str | None:
    """The name of the split with a role of KEYWORDS, e.g. "dev" for "validation"; None if there is none."""
    return next((name for name in KEYWORDS[role] if name in splits), None)


@functools.lru_cache(8)
def _header(readme: str) -> dict:
    """Read once, because a header of 600 kB, with a configuration for each file, takes six seconds."""
    match = _HEADER.match(readme.removeprefix("\ufeff"))
    if not match:
        return {}
    try:
        header = yaml.load(match[1], _Loader)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML 6.0: LookupError for `!!bool x` and `!!int ""`, AttributeError for `!!timestamp x`
        raise HeaderError(f"its header is not YAML ({str(error).splitlines()[0]})") from error
    return header if isinstance(header, dict) else {}


def _checked(value: Any, kind: type, name: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise HeaderError(f"{name} in its header must be {expected}")
    return value


def _configuration(paths: list[str], entry: dict) -> tuple[str, Splits]:
    """Name and splits of an entry of `configs`."""
    name = _checked(entry.get("config_name", DEFAULT), str, "config_name", "text")
    directory = _checked(entry.get("data_dir") or "", str, "data_dir", "text").strip("/")
    inside = {path.removeprefix(f"{directory}/"): path for path in paths if path.startswith(f"{directory}/")}
    inside = inside if directory else {path: path for path in paths}
    if "data_files" not in entry:
        splits: Splits = {}
        for one in _by_names(list(inside)).values():
            for split, found in one.items():
                splits.setdefault(split, []).extend(found)
    else:
        splits = {}
        for split, patterns in _patterns(entry["data_files"]):
            if split in splits:
                raise HeaderError(f"data_files in its header has the split {split} twice")
            splits[split] = _matching(inside, patterns)
    return name, {split: sorted(inside[path] for path in found) for split, found in splits.items() if found}


def _patterns(value: Any) -> Iterator[tuple[str, list[str]]]:
    """Split and globs of `data_files`: text, a list of texts, a mapping, or a list of {split, path}."""
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        entries = [(one.get("split"), one.get("path")) if isinstance(one, dict) else (None, None) for one in value]
    else:
        entries = [("train", value)]
    for split, globs in entries:
        texts = globs if isinstance(globs, list) else [globs]
        if not isinstance(split, str) or not all(isinstance(text, str) for text in texts):
            raise HeaderError("data_files in its header must be globs, by split if there are several")
        yield split, texts


def _matching(paths: Iterable[str], globs: list[str]) -> list[str]:
    patterns = [_pattern(text.removeprefix("./")) for text in globs]
    return [path for path in paths if any(_matches(pattern, path.split("/")) for pattern in patterns)]


def _pattern(text: str) -> list[re.Pattern | None]:
    """One for each part of a path; None: `**`, any number of parts."""
    parts = text.split("/")
    if any("**" in part and part != "**" for part in parts):
        raise HeaderError("data_files in its header has a glob that is none ('**' is not alone between slashes)")
    return [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]


def _matches(pattern: list[re.Pattern | None], parts: list[str]) -> bool:
    """Whether a path matches, in time proportional to the product of both lengths; one expression may need 2^length."""
    places = {0}
    for index, part in enumerate(pattern):
        if not places:
            return False
        if part is None:
            is_last = index == len(pattern) - 1
            places = set(range(min(places) + is_last, len(parts) + 1))
        else:
            places = {place + 1 for place in places if place < len(parts) and part.match(parts[place])}
    return len(parts) in places


def _by_names(paths: list[str]) -> dict[str, Splits]:
    """Splits by configuration: of `data/SPLIT-00000-of-00001.*`, else by directories, else by names of files."""
    if shards := [(match[1], path) for path in paths if (match := _SHARD.fullmatch(path))]:
        return _grouped((DEFAULT, *shard) for shard in shards)
    for in_names in (False, True):
        if named := [place for path in paths if (place := _place(path, in_names))]:
            found = _grouped(named)
            return found if len(found) > 1 else {DEFAULT: next(iter(found.values()))}
    return _grouped((DEFAULT, "train", path) for path in paths)


def _grouped(places: Iterable[tuple[str, str, str]]) -> dict[str, Splits]:
    found: dict[str, Splits] = {}
    for config, split, path in places:
        found.setdefault(config, {}).setdefault(split, []).append(path)
    return found


def _place(path: str, in_name: bool) -> tuple[str, str, str] | None:
    """Configuration, split and path, if the path names a split, in the name of the file or in a directory."""
    *directories, name = path.split("/")
    for depth, part in [(len(directories), name)] if in_name else reversed([*enumerate(directories)]):
        splits = [split for split, pattern in _WORDS.items() if pattern.fullmatch(part)]
        if len(splits) > 1:
            raise HeaderError(f"{path} names the splits {' and '.join(splits)}, and its header has no configs")
        if splits:
            above = directories[:depth]
            return "/".join(above[above[:1] == ["data"] :]) or DEFAULT, splits[0], path
    return None
