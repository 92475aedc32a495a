"""Token tagging: sentences with a tag per word, in CoNLL columns; named entities and parts of speech."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.errors import require
from bert_jax.finetune.tables import read_text
from bert_jax.storage.paths import StoredPath

NO_TAG = -1
"""Label of positions without a tag: special tokens, padding, and all tokens of a word but the first."""


CONLL_U = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_GLOBAL_COLUMNS = "# global.columns ="
_FIRST_INDEX = re.compile("[01]([-.][0-9]+)?")
"""Of a file whose first column counts the words of a sentence; 1-2 is a multiword token, 1.1 an empty node."""
_NUMBER, _BETWEEN_NUMBERS = re.compile("[0-9]{1,9}"), re.compile("[0-9]+[-.][0-9]+")


class TaggedSentence(NamedTuple):
    """The words of a sentence and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class _Layout(NamedTuple):
    """How the lines of a file are read."""

    width: int
    """Columns."""
    has_tabs: bool
    word: int
    """Column of the words."""
    tag: int
    """Column of the tags."""
    index: int | None
    """Column that counts the words of a sentence: 1-2 in it is a multiword token, 1.1 an empty node."""


def read_conll(path: StoredPath, tag_column: int = -1, word_column: int | None = None) -> list[TaggedSentence]:
    """Sentences of a file with a word per line and its columns, and an empty line between sentences.

    Columns are separated by tabs if the line has any, else by spaces (U+0020). Lines of comments, multiword tokens
    (``1-2``) and empty nodes (``1.1``) are skipped, and the ``-DOCSTART-`` lines of CoNLL 2003. A comment stands before
    the words of a sentence, begins with "#" and has another number of columns than the lines of words.

    Args:
      path: the file, UTF-8.
      tag_column: from 0; negative numbers count from the last one, but -1 is UPOS in the ten columns of CoNLL-U.
      word_column: from 0; None: FORM in CoNLL-U and in the columns that ``# global.columns`` names (CoNLL-U Plus),
        else 0.

    Raises:
      UserError: no file, invalid UTF-8, a line with too few columns or another number than the first, no sentence, or
        words that are the numbers 1, 2, 3 and so on in every sentence.
    """
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    layout = _layout(path, lines, tag_column, word_column)
    sentences, words, tags = [], [], []
    for number, line in enumerate([*lines, ""], 1):
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(tuple(words), tuple(tags)))
            words, tags = [], []
            continue
        fields = _fields(line)
        if (not words and _is_comment(line, layout)) or fields[0] == "-DOCSTART-":
            continue
        require(
            len(fields) == layout.width, f"{path}:{number} has {len(fields)} columns, the first line {layout.width}"
        )
        if layout.index is not None and not fields[layout.index].isdecimal():
            continue
        words.append(fields[layout.word])
        tags.append(fields[layout.tag])
    require(bool(sentences), f"{path} has no sentences")
    longest = max(len(sentence.words) for sentence in sentences)
    require(
        longest < 2 or not _count_up(sentences),
        f"{path}: the words in column {layout.word} are the numbers 1, 2, 3 and so on: give the "
        "column of the words, from 0, with --word-column",
    )
    return sentences


def _layout(path: StoredPath, lines: Sequence[str], tag_column: int, word_column: int | None) -> _Layout:
    """The layout of a file, from its first line of a word and its first line.

    Raises:
      UserError: a column does not exist.
    """
    lines_of_words = [line for line in lines if line.strip() and not line.startswith("-DOCSTART-")]
    has_tabs = any("\t" in line for line in lines_of_words if not line.startswith("#"))
    first = next((line for line in lines_of_words if not line.startswith("#")), next(iter(lines_of_words), ""))
    fields = _fields(first)
    names: Sequence[str] = ()
    if lines[0].startswith(_GLOBAL_COLUMNS):
        names = lines[0].removeprefix(_GLOBAL_COLUMNS).split()
    elif len(fields) == len(CONLL_U) and has_tabs:
        names = CONLL_U
    width = len(fields)
    word = word_column if word_column is not None else names.index("FORM") if "FORM" in names else 0
    tag = CONLL_U.index("UPOS") if tuple(names) == CONLL_U and tag_column == -1 else tag_column
    require(not fields or word < width, f"{path} has {width} columns: there is no column {word} of words")
    require(
        not fields or (-width <= tag < width and tag % width != word),
        f"{path} has {width} columns: there is no column {tag_column} of tags beside the words",
    )
    index = names.index("ID") if "ID" in names else 0 if word and _FIRST_INDEX.fullmatch(fields[0]) else None
    return _Layout(width, has_tabs, word, tag, None if index == word else index)


def _fields(line: str) -> list[str]:
    # Not str.split, for which a no-break space inside a word separates columns.
    return line.split("\t") if "\t" in line else [field for field in line.split(" ") if field]


def _is_comment(line: str, layout: _Layout) -> bool:
    return line.startswith("#") and (len(_fields(line)) != layout.width or (layout.has_tabs and "\t" not in line))


def _count_up(sentences: Sequence[TaggedSentence]) -> bool:
    """Whether the words are numbers that count the words of each sentence, or of all of them."""
    last = 0
    for sentence in sentences:
        words = [word for word in sentence.words if not _BETWEEN_NUMBERS.fullmatch(word)]
        if not words:
            continue
        first = int(words[0]) if _NUMBER.fullmatch(words[0]) else -1
        if first not in (0, 1, last + 1) or words != [str(i) for i in range(first, first + len(words))]:
            return False
        last = first + len(words) - 1
    return True


def tag_names(sentences: Sequence[TaggedSentence]) -> tuple[str, ...]:
    """The tags of a training split, sorted, "O" first: the order of the class indices."""
    names = {tag for sentence in sentences for tag in sentence.tags}
    return tuple(sorted(names, key=lambda name: (name != "O", name)))
