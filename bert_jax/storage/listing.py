"""Lists files on disk and in object stores, with their sizes, and what tells whether they have changed."""

import contextlib
import fnmatch
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from bert_jax.errors import UserError, require
from bert_jax.storage.failures import describe_unreachable
from bert_jax.storage.paths import StoredPath, file_system_and_name, is_remote, to_path

_WILDCARD = re.compile(r"[*?\[]")


def file_sizes(directory: StoredPath, *, recursive: bool = False) -> dict[str, int]:
    """Sizes in bytes of the files in a directory, by name; empty if there is no directory.

    A store is listed once, whatever the number of files.

    Args:
      directory: to list.
      recursive: whether files of directories inside it count, too; their names have slashes.

    Raises:
      UserError: the store denies listing.
    """
    if not is_remote(directory):
        return dict(_local_file_sizes(os.fspath(directory), "", recursive))
    filesystem, name = file_system_and_name(directory)
    try:
        entries = filesystem.find(name, detail=True).values() if recursive else filesystem.ls(name, detail=True)
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise UserError(describe_unreachable(directory, error)) from error
    prefix = f"{filesystem._strip_protocol(name)}/"
    return {entry["name"].removeprefix(prefix): entry["size"] for entry in entries if entry["type"] == "file"}


def matching_entries(directory: epath.Path, pattern: str) -> list[epath.Path]:
    """Entries of a directory whose names match a pattern, sorted; none if there is no directory.

    epath's `glob` would take a `[` in the name of the directory itself as a part of the pattern.
    """
    try:
        return sorted(path for path in directory.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
    except FileNotFoundError:
        return []


class FileVersion(NamedTuple):
    """What tells whether a file has changed, without its content."""

    size: int
    """in bytes"""
    version: str
    """the time of its last change, in ns; in a store the ETag, or the time if there is none"""


def file_version(path: StoredPath | str) -> FileVersion:
    """The present version of a file; OSError if it cannot be looked up."""
    if is_remote(path):
        filesystem, name = file_system_and_name(path)
        return _version(filesystem.info(name))
    status = os.stat(path)  # noqa: PTH116 (epath's has seconds only)
    return FileVersion(status.st_size, str(status.st_mtime_ns))


def find_files(pattern: str) -> dict[str, FileVersion]:
    """The files that a glob matches, sorted by path.

    A file with exactly this name that the glob does not match, as `[a].txt` does not match itself, is the only one:
    then the pattern is a name.

    Raises:
      ValueError: not a glob.
      UserError: the scheme is unsupported, a package is missing, the store denies listing, or a link that the glob
        matches leads nowhere (hidden ones, as editors make them, are left out).
    """
    if is_remote(pattern):
        return _find_in_store(pattern)
    path = pathlib.Path(to_path(pattern))
    try:
        found = _glob_disk(path)
    except ValueError:
        if not path.is_file():
            raise
        found = []
    if path not in found and path.is_file():
        found = [path]
    return {os.fspath(one): file_version(one) for one in sorted(found, key=os.fspath)}


def _glob_disk(pattern: pathlib.Path) -> list[pathlib.Path]:
    wild = next((i for i, part in enumerate(pattern.parts) if _WILDCARD.search(part)), None)
    if wild is None:
        return []
    root, parts = pathlib.Path(*pattern.parts[:wild]), [*pattern.parts[wild:]]
    # Python 3.13 takes "**" inside of a name for "*", and finds files with "**" at the end, others directories only.
    if any("**" in part and part != "**" for part in parts):
        raise ValueError("'**' can only be a whole part of a path")
    if parts[-1] == "**":
        parts.append("*")
    found = [root]
    for part in parts:
        if _WILDCARD.search(part):
            found = [*dict.fromkeys(child for path in found if path.is_dir() for child in path.glob(part))]
        else:
            found = [path / part for path in found if os.access(path, os.X_OK)]
        for path in found if part != "**" else ():
            if path.is_symlink() and not path.exists() and not path.name.startswith("."):
                raise UserError(f"{path}: a symbolic link to nothing: restore the file or folder, or remove the link")
    return [path for path in found if path.is_file()]


def _find_in_store(pattern: str) -> dict[str, FileVersion]:
    """As `find_files`; each folder of the store is listed once."""
    to_path(pattern)
    filesystem, name = file_system_and_name(pattern)
    try:
        try:
            found = filesystem.glob(name, detail=True)
        except ValueError as error:  # "**" inside of a name
            require(filesystem.isfile(name), f"{pattern}: {error}")
            found = {}
        if _WILDCARD.search(name) and name not in found and filesystem.isfile(name):
            found = {name: filesystem.info(name)}
    except PermissionError as error:
        raise UserError(describe_unreachable(pattern, error)) from error
    scheme = pattern.partition("://")[0]
    files = {name: info for name, info in sorted(found.items()) if info["type"] == "file"}
    return {f"{scheme}://{name}": _version(info) for name, info in files.items()}


def _version(info: Mapping[str, Any]) -> FileVersion:
    known = (info[key] for key in ("ETag", "etag", "LastModified", "updated", "mtime") if info.get(key))
    return FileVersion(info["size"], str(next(known, "")))


def _local_file_sizes(directory: str, prefix: str, recursive: bool) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_file():
                yield prefix + entry.name, entry.stat().st_size
            elif recursive and entry.is_dir():
                yield from _local_file_sizes(entry.path, f"{prefix}{entry.name}/", recursive)
