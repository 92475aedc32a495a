"""Token tagging: sentences with a tag per word, in CoNLL columns; named entities and parts of speech."""

from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.errors import require
from bert_jax.finetune.tables import read_text
from bert_jax.storage import StoredPath

NO_TAG = -1
"""Label of positions without a tag: special tokens, padding, and all tokens of a word but the first."""


CONLL_U_UPOS = 3


class TaggedSentence(NamedTuple):
    """The words of a sentence and their tags."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_conll(path: StoredPath, column: int = -1) -> list[TaggedSentence]:
    """Sentences of a file with a word per line and its columns, and an empty line between sentences.

    Columns are separated by tabs if the line has any, else by spaces. The word is in column 0; in the ten columns of
    CoNLL-U it is in column 1, and lines of comments, of multiword tokens (``1-2``) and of empty nodes (``1.1``) are
    skipped. ``-DOCSTART-`` lines of CoNLL 2003 are skipped too.

    Args:
      path: the file, UTF-8.
      column: of the tags, from 0; negative numbers count from the last one, but -1 is UPOS in CoNLL-U.

    Raises:
      UserError: no file, invalid UTF-8, a line with too few columns or another number than the first, or no sentence.
    """
    text = read_text(path)
    sentences, words, tags = [], [], []
    width, has_tabs = 0, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        line = line.rstrip("\r")
        fields = line.split("\t") if "\t" in line else line.split()
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(tuple(words), tuple(tags)))
            words, tags = [], []
            continue
        is_conll_u = len(fields) == 10 and "\t" in line
        has_tabs |= "\t" in line
        is_comment = line.startswith("#") and "\t" not in line and not words and (has_tabs or len(fields) != width)
        if is_comment or fields[0] == "-DOCSTART-" or (is_conll_u and not fields[0].isdecimal()):
            continue
        width = width or len(fields)
        require(len(fields) == width, f"{path}:{number} has {len(fields)} columns, the first line {width}")
        require(
            width >= 2 and -width <= column < width,
            f"{path}:{number} has {width} columns: there is no column {column} of tags beside the words",
        )
        words.append(fields[1] if is_conll_u else fields[0])
        tags.append(fields[CONLL_U_UPOS if is_conll_u and column == -1 else column])
    require(bool(sentences), f"{path} has no sentences")
    return sentences


def tag_names(sentences: Sequence[TaggedSentence]) -> tuple[str, ...]:
    """The tags of a training split, sorted, "O" first: the order of the class indices."""
    names = {tag for sentence in sentences for tag in sentence.tags}
    return tuple(sorted(names, key=lambda name: (name != "O", name)))
