"""Sentences of Universal Dependencies, from CoNLL-U files."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.errors import UserError, install_command, require
from bert_jax.storage.paths import StoredPath

SPLITS = ("train", "dev", "test")


class Sentence(NamedTuple):
    """The syntactic words of a sentence and their dependency tree.

    Ranges (``1-2``, the orthographic word of two syntactic ones) and empty nodes (``8.1``, of enhanced dependencies)
    are dropped.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    """Universal part of speech of each word; ``_`` where the file has none."""
    heads: tuple[int, ...]
    """Head of each word, counted from 1; 0 is the root."""
    deprels: tuple[str, ...]
    """Relation of each word to its head, with its subtype, e.g. ``nsubj:pass``."""


def read_splits(files: Sequence[StoredPath]) -> dict[str, list[Sentence]]:
    """The sentences of a treebank by split; a split may have several files.

    Args:
      files: ``.conllu`` files whose names contain train, dev or test.

    Raises:
      UserError: as `read_conllu`, or a name that tells no split, or two.
    """
    splits: dict[str, list[Sentence]] = {}
    for path in files:
        splits.setdefault(split_of(path), []).extend(read_conllu(path))
    return splits


def split_of(path: StoredPath) -> str:
    """The split that the name of a file tells.

    Raises:
      UserError: the name tells none, or two.
    """
    names = [split for split in SPLITS if split in path.name]
    require(len(names) == 1, f"{path}: the name of the file must contain one of train, dev and test")
    return names[0]


def read_conllu(path: StoredPath) -> list[Sentence]:
    """The sentences of a file (https://universaldependencies.org/format.html).

    Raises:
      UserError: the package conllu is missing, or the file has no sentence, a line that is not CoNLL-U, or a sentence
        that is not a tree with one root.
    """
    try:
        import conllu
    except ImportError as error:
        message = f"{path}: treebanks need the package conllu, which is missing: {install_command('analyse')}"
        raise UserError(message) from error
    # The fields that nobody reads take most of the time of parsing.
    parsers = {name: lambda line, i: line[i] for name in ("xpos", "feats", "deps", "misc")}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start:,}") from error
    sentences, name = [], str(path)
    for first, lines in _blocks(text.split("\n")):
        tokens = []
        for number, line in enumerate(lines, first):
            try:
                tokens += [(number, token) for token in conllu.parse(line, field_parsers=parsers)[0]]
            except conllu.exceptions.ParseException as error:
                raise UserError(f"{path}, line {number}: not CoNLL-U: {error}") from error
        if tokens:
            sentences.append(_to_sentence(tokens, name))
    require(bool(sentences), f"{path}: the file has no sentence")
    return sentences


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Runs of lines that are not blank, each with the number of its first line, from 1."""
    start = 0
    for i, line in enumerate([*lines, ""]):
        if not line.strip():
            if i > start:
                yield start + 1, list(lines[start:i])
            start = i + 1


def _to_sentence(tokens: Iterable[tuple[int, dict]], path: str) -> Sentence:
    """Check and convert the parsed lines (number of the line, fields) of one sentence."""
    rows, line = [], 0
    for line, token in tokens:
        index = token["id"]
        if isinstance(index, tuple):  # a range or an empty node
            continue
        where = f"{path}, line {line}"
        require(index == len(rows) + 1, f"{where}: the id is {index}, expected {len(rows) + 1}")
        require(len(token) == 10, f"{where}: {len(token)} columns, CoNLL-U has 10")
        require(token["head"] is not None, f"{where}: the word has no head")
        rows.append((line, token["form"], token["upos"], token["head"], token["deprel"]))
    require(bool(rows), f"{path}, line {line}: the sentence has no words")
    numbers, words, upos, heads, deprels = zip(*rows, strict=True)
    for number, head in zip(numbers, heads, strict=True):
        where = f"{path}, line {number}"
        require(0 <= head <= len(words), f"{where}: the head is {head}, the sentence has {len(words)} words")
    roots = heads.count(0)
    where = f"{path}, lines {numbers[0]} to {numbers[-1]}"
    require(roots == 1, f"{where}: the sentence has {roots} roots, a dependency tree has one")
    require(_is_tree(heads), f"{where}: the heads form a cycle")
    return Sentence(words, upos, heads, deprels)


def _is_tree(heads: Sequence[int]) -> bool:
    """Whether every word reaches the root."""
    parents = ancestors = np.array([0, *heads])
    for _ in heads:
        ancestors = parents[ancestors]
    return not ancestors.any()
