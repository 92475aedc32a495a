"""Files of a task's splits: where they lie, and the values of their rows (tables, Parquet, TFDS)."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.errors import UserError, install_command, require
from bert_jax.finetune.tables import Columns, check_columns, read_values
from bert_jax.storage.paths import StoredPath

ENDINGS = (".tsv", ".csv", ".jsonl", ".parquet")
SPLITS = ("train", "dev", "test")
_ALIASES = {"dev": ("dev", "validation", "valid", "val")}
"""What the files of a split are called."""

Values = tuple[str, Mapping[str, Any]]
"""``FILE:LINE``, for messages, and the values of a row by column."""


class Tables(NamedTuple):
    """The rows of all splits."""

    rows: dict[str, list[Values]]
    class_names: Mapping[str, tuple[str, ...]] = {}
    """By column: the names of its class indices, which Parquet files of Hugging Face datasets have."""


def find_splits(
    directory: StoredPath, endings: Sequence[str], splits: Sequence[str] = SPLITS
) -> dict[str, list[StoredPath]]:
    """The files of each split; a test split may be missing.

    Files are called ``train``, ``dev`` (or ``validation``, ``valid``, ``val``) and ``test``; or, as Hugging Face stores
    a dataset, ``train-00000-of-00002.parquet`` and so on. They lie in the directory, in ``data`` in it, or in its only
    other directory with a training split, which is a configuration of the dataset.

    Args:
      directory: of the task.
      endings: of its files.
      splits: their names here; "dev_matched" is also called "validation_matched".

    Raises:
      UserError: a split is missing, has files of two forms, or not all of its files are there.
    """
    folder = _folder(directory, endings)
    found = {}
    for split in splits:
        names = [path.name for path in _files(folder, split, endings)]
        forms = {_form(name) for name in names}
        if len(forms) > 1:
            raise UserError(f"{folder} has {' and '.join(sorted(names)[:2])}: remove or rename one of them")
        require(
            bool(names) or split.startswith("test"),
            f"{directory} has no {split} split: it needs a file {split} with ending {', '.join(endings)}",
        )
        count = re.search(r"-\d+-of-(\d+)", names[0]) if names else None
        parts = {name[: name.index("-of-")] for name in names} if count else {*names}
        require(
            count is None or int(count[1]) == len(parts),
            f"{folder} has {len(parts)} of the {count and int(count[1])} files of {split}: copy the others too",
        )
        require(len(parts) == len(names), f"{folder} has a part of {split} twice: remove or rename one of them")
        if names:
            found[split] = [folder / name for name in sorted(names)]
    return found


def has_splits(directory: StoredPath, ending: str) -> bool:
    """Whether a directory has a training split with this ending, where `find_splits` looks for it."""
    return bool(_files(_folder(directory, (ending,)), "train", (ending,)))


def hash_files(directory: StoredPath) -> str:
    """Hex SHA-256 of the names and contents of all files in a directory and in the directories in it."""
    digest = hashlib.sha256()
    for name, file in sorted(_walk(directory)):
        digest.update(name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _walk(directory: StoredPath, prefix: str = "") -> Iterator[tuple[str, StoredPath]]:
    for path in directory.iterdir():
        if path.is_dir():
            yield from _walk(path, f"{prefix}{path.name}/")
        else:
            yield prefix + path.name, path


def _folder(directory: StoredPath, endings: Sequence[str]) -> StoredPath:
    """The directory with the files of the splits."""
    for folder in (directory, directory / "data"):
        if _files(folder, "train", endings):
            return folder
    inside = sorted((path for path in directory.iterdir() if path.is_dir()), key=lambda path: path.name)
    configurations = [path for path in inside if _files(path, "train", endings)]
    names = ", ".join(path.name for path in configurations)
    require(len(configurations) < 2, f"{directory} has the configurations {names}: give one of them as --data")
    return configurations[0] if configurations else directory


def _files(folder: StoredPath, split: str, endings: Sequence[str]) -> list[StoredPath]:
    start, _, rest = split.partition("_")
    names = "|".join(re.escape(name) for name in _ALIASES.get(start, (start,)))
    shard, ending = r"(-\d{5}-of-\d{5}(-[0-9a-f]+)?)?", "|".join(map(re.escape, endings))
    pattern = re.compile(rf"({names}){re.escape(f'_{rest}') if rest else ''}{shard}({ending})")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []


def _form(name: str) -> str:
    """A file's name without the number of its part."""
    return re.sub(r"-\d{5}(-of-\d{5})(-[0-9a-f]+)?", r"\1", name)


def read_tables(directory: StoredPath, columns: Columns) -> Tables:
    """The rows of the user's own splits, in tables, Parquet files, or a TFDS dataset.

    Args:
      directory: of the files.
      columns: that must exist; a test split may lack the labels.

    Raises:
      UserError: a split is missing, or as `read_values` and `read_tfds`.
    """
    if is_tfds(directory):
        return Tables(read_tfds(directory, {"train": "train", "dev": "validation", "test": "test"}, columns))
    return read_files(find_splits(directory, ENDINGS), columns)


def read_files(paths: Mapping[str, Sequence[StoredPath]], columns: Columns) -> Tables:
    """The rows of splits with these files; arguments and errors as of `read_tables`."""
    rows: dict[str, list[Values]] = {}
    class_names: dict[str, tuple[str, ...]] = {}
    for split, files in paths.items():
        of_split = columns._replace(label_optional=split.startswith("test"))
        rows[split] = []
        for path in files:
            if path.suffix != ".parquet":
                rows[split] += read_values(path, of_split)
                continue
            values, names = _read_parquet(path, of_split)
            rows[split] += values
            for column, of_column in names.items():
                known = class_names.setdefault(column, of_column)
                require(
                    known == of_column,
                    f"{path} numbers the classes of '{column}' differently from the other files: write all files with "
                    "the same features",
                )
        require(bool(rows[split]), f"{files[0]} has no examples")
    return Tables(rows, class_names)


def _read_parquet(path: StoredPath, columns: Columns) -> tuple[list[Values], dict[str, tuple[str, ...]]]:
    """The rows of a Parquet file, and `Tables.class_names`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{path} needs pyarrow, which is missing: {install_command('formats')}") from error
    try:
        with path.open("rb") as file:
            table = parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as Parquet ({reason}): copy it again") from error
    check_columns(path, table.column_names, columns)
    values = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        try:
            values[name] = column.to_pylist()
        except Exception as error:  # of Arrow, of time zones, of a date that Python does not have
            reason = " ".join(str(error).split())[:80]
            raise UserError(f"{path}: column {name!r} cannot be read ({reason}): leave it out of the file") from error
    rows = [(f"{path}, row {i}", {name: of[i] for name, of in values.items()}) for i in range(table.num_rows)]
    return rows, _class_names((table.schema.metadata or {}).get(b"huggingface", b"{}"))


def _class_names(metadata: bytes) -> dict[str, tuple[str, ...]]:
    """The names of class indices that Hugging Face's datasets writes into a schema, of a column or of its lists."""
    try:
        features = dict(json.loads(metadata)["info"]["features"])
    except (KeyError, RecursionError, TypeError, ValueError):
        return {}  # of another program, or of a dataset without features
    found = {}
    for column, feature in features.items():
        with contextlib.suppress(AttributeError, IndexError, TypeError):  # another kind of feature
            feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)
            if feature.get("_type") == "ClassLabel" and feature.get("names"):
                found[str(column)] = tuple(map(str, feature["names"]))
    return found


def is_tfds(directory: StoredPath) -> bool:
    """Whether a directory is that of a TFDS dataset."""
    return (directory / "dataset_info.json").exists()


def read_tfds(directory: StoredPath, names: Mapping[str, str], columns: Columns) -> dict[str, list[Values]]:
    """Rows of the splits of a TFDS dataset in ArrayRecord files.

    Args:
      directory: of the dataset.
      names: of the splits in it; one that begins with "test" may be missing.
      columns: to read.

    Raises:
      UserError: damaged files, another file format, a missing split or feature.
    """
    import tensorflow_datasets as tfds

    with _tfds_errors(directory):
        builder = tfds.builder_from_directory(str(directory))
        features, splits = builder.info.features or {}, builder.info.splits
    needed = (*columns.texts, *filter(None, [columns.label]))
    missing = sorted(set(needed) - set(features))
    if missing:
        raise UserError(f"{directory} has no feature '{missing[0]}': it has {', '.join(features)}{columns.advice}")
    rows: dict[str, list[Values]] = {}
    for split, name in names.items():
        if name not in splits:
            require(split.startswith("test"), f"{directory} has no split '{name}'")
            continue
        with _tfds_errors(directory):
            items = list(builder.as_data_source(split=name))
            if items and "idx" in items[0]:  # TFDS stores examples in the order of a hash
                items.sort(key=lambda item: int(item["idx"]))
            examples = [{one: _decoded(item[one]) for one in needed} for item in items]
        rows[split] = [(f"{directory}, {name} {i}", example) for i, example in enumerate(examples)]
    return rows


@contextlib.contextmanager
def _tfds_errors(directory: StoredPath) -> Iterator[None]:
    """Raise UserError for the errors of TFDS and of the libraries that it reads with, which have no common class."""
    try:
        yield
    except NotImplementedError as error:
        raise UserError(f"{directory} is not in ArrayRecord files: prepare it with file_format array_record") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(
            f"{directory} has a dataset_info.json, but TFDS cannot read the dataset ({reason}): prepare it again, or "
            "remove that file if the directory has tables"
        ) from error


def _decoded(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.integer):
        value = value.tolist()
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value
