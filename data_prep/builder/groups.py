"""The group of a document: its source, language and score, by which training can sample."""

import json
import math
import unicodedata
from typing import NamedTuple

import numpy as np

from bert_jax.errors import UserError, short_repr
from data_prep import languages
from data_prep.builder import scratch
from data_prep.sources.base import Document, Source, field_name

MAX_VALUES = 1000
"""Different values of a field with names or scores in a block of 4 MiB; with more, it is another kind of field."""
_NO_NAME = "unnamed"
_NAME_CHARACTERS = 200
_KEPT_VALUES = 10


class Group(NamedTuple):
    """What documents of a group have in common."""

    source: str
    language: str
    score: float | None


class GroupFinder:
    """Finds the groups of the documents of one block."""

    def __init__(self, source: Source, score_bounds: tuple[float, ...]):
        self._source, self._bounds = source, score_bounds
        self._name_field, self._score_field = field_name(source.source_name), field_name(source.score)
        self._names: set[str] = set()
        self._scores: set[float | None] = set()
        self.undetermined = {"parts": 0, "values": []}
        """parts of documents without a language, and some values of its field that are no codes; JSON values"""
        self.unscored = {"parts": 0, "values": []}
        """the same of scores"""

    def __call__(self, part: Document, text: str) -> Group:
        """The group of a document, or of a part of one; `text` is its cleaned text.

        Raises:
          UserError: a field has too many values.
        """
        name = self._source.source_name or self._source.spec
        if self._name_field is not None:
            name = _name(part.fields.get(self._name_field, ""))
            self._count(self._names, name, "--source-name", self._name_field)
        score = None
        if self._score_field is not None:
            value = part.fields.get(self._score_field, "")
            score = self._score(value)
            _add(self.unscored, score is None, value)
            self._count(self._scores, score, "--score", self._score_field)
        return Group(name, self._language(part, text), score)

    def _language(self, part: Document, text: str) -> str:
        setting, value = self._source.language, ""
        if setting == languages.AUTO:
            code = languages.identify(text)
        elif (field := field_name(setting)) is None:
            code = setting
        else:
            value = part.fields.get(field, "")
            code = languages.normalize(value)
        _add(self.undetermined, code == languages.UNDETERMINED, value)
        return code

    def _score(self, value: str) -> float | None:
        """The largest bound that is not above a number; None: no finite number, or one below all bounds."""
        try:
            number = float(value)
        except ValueError:
            return None
        if not math.isfinite(number):
            return None
        bounds = self._bounds or (math.floor(number),)
        return max((float(bound) for bound in bounds if bound <= number), default=None)

    def _count(self, known: set, value: str | float | None, flag: str, field: str) -> None:
        known.add(value)
        if len(known) > MAX_VALUES:
            remedy = "name a field of few values" if flag == "--source-name" else "add --score-bounds"
            raise UserError(
                f"{flag} @{field}: more than {MAX_VALUES:,} values in one block of source {self._source.spec}: {remedy}"
            )


def _name(value: str) -> str:
    """A name that people can type and terminals print: characters without a glyph are spaces, runs of spaces one."""
    shown = "".join(one if one.isprintable() else " " for one in unicodedata.normalize("NFC", value))
    return " ".join(shown.split())[:_NAME_CHARACTERS] or _NO_NAME


def _add(counts: dict, is_without: bool, value: str) -> None:
    counts["parts"] += is_without
    if is_without and value and len(counts["values"]) < _KEPT_VALUES:
        counts["values"].append(short_repr(value))


def unpack_groups(packed: np.ndarray) -> list[Group]:
    """The groups of a prepared block."""
    return [Group(*json.loads(text)) for text in scratch.unpack_texts(packed) if text]
