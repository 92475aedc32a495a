"""The filters of a build, in their order, and what they removed: counts, and examples chosen by a hash of the text."""

import collections
import dataclasses
import heapq
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from data_prep.filters.c4 import C4
from data_prep.filters.fineweb import FineWeb
from data_prep.filters.function import FilterFunction
from data_prep.filters.gopher import GopherQuality, GopherRepetition
from data_prep.filters.language import Language
from data_prep.filters.personal_data import Kind, mask
from data_prep.filters.rules import Verdict

EXAMPLES = 3
"""of what each rule removed"""
_EXAMPLE_CHARACTERS = 300


class Family(Protocol):
    """Rules that are applied together."""

    def judge(self, text: str, language: str) -> Verdict:
        """The verdict on a text that is not empty, of a document in a language."""


@dataclasses.dataclass(frozen=True)
class Filters:
    """The families of a build, applied in this order: that of FineWeb. None: not applied."""

    language: Language | None = None
    gopher_repetition: GopherRepetition | None = None
    gopher_quality: GopherQuality | None = None
    c4: C4 | None = None
    fineweb: FineWeb | None = None

    @classmethod
    def families(cls) -> dict[str, type]:
        """The classes by name."""
        return {
            "language": Language,
            "gopher_repetition": GopherRepetition,
            "gopher_quality": GopherQuality,
            "c4": C4,
            "fineweb": FineWeb,
        }

    def given(self) -> dict[str, Family]:
        """Those that are applied."""
        return {name: family for name in self.families() if (family := getattr(self, name))}


Examples = dict[str, list[list]]
"""By rule, [CRC-32 of the text, origin, beginning of the text], at most EXAMPLES, the smallest ones in order"""


class DocumentFilter:
    """Applies filters to the documents of a block, and counts."""

    def __init__(self, filters: Filters, functions: Iterable[FilterFunction], masks: tuple[Kind, ...]):
        """`masks` are applied to examples, which are in corpus.json."""
        self._families = {**filters.given(), **{function.name: function for function in functions}}
        self._lines: collections.Counter[str] = collections.Counter()
        self._line_bytes: collections.Counter[str] = collections.Counter()
        self._masks = masks
        self._mixed = 0
        self._examples: Examples = {}

    def __call__(self, text: str, language: str, origin: str) -> tuple[str, str | None]:
        """What is left of a text, and the rule that removes it; the text itself if one does.

        Args:
          text: cleaned, of a document or a part of a long one.
          language: its code.
          origin: for examples.

        Raises:
          FilterFunctionError: a function of the user failed.
        """
        rest, removed_lines, mixed = text, [], False
        for name, family in self._families.items():
            if not rest.strip():
                break
            verdict = family.judge(rest, language)
            mixed |= verdict.mixed
            if verdict.rule is not None:
                rule = name if isinstance(family, FilterFunction) else f"{name}.{verdict.rule}"
                self._mixed += mixed
                self._add_example(rule, text, text.encode(), origin)
                return text, rule
            removed_lines += [(f"{name}.{rule}", line) for rule, line in verdict.lines]
            rest = verdict.text
        self._mixed += mixed
        for rule, line in removed_lines:
            data = line.encode()
            self._lines[rule] += 1
            self._line_bytes[rule] += len(data) + 1
            self._add_example(rule, line, data, origin)
        return rest, None

    def _add_example(self, rule: str, text: str, data: bytes, origin: str) -> None:
        place, kept = zlib.crc32(data), self._examples.setdefault(rule, [])
        if len(kept) < EXAMPLES or place < kept[-1][0]:
            shown = mask(text[: 2 * _EXAMPLE_CHARACTERS], self._masks)[0][:_EXAMPLE_CHARACTERS]
            self._examples[rule] = _smallest([*kept, [place, origin, shown]])

    def metadata(self) -> dict[str, Any]:
        """Counts and examples as JSON values."""
        lines = {rule: {"lines": count, "text_bytes": self._line_bytes[rule]} for rule, count in self._lines.items()}
        return {"lines": lines, "mixed_documents": self._mixed, "examples": self._examples}


def merge_examples(blocks: Iterable[Mapping[str, list]]) -> dict[str, list[dict[str, str]]]:
    """The examples of all blocks, in the order of the text, by rule: origin, and the beginning of the text."""
    merged = collections.defaultdict(list)
    for examples in blocks:
        for rule, found in examples.items():
            merged[rule] = _smallest([*merged[rule], *found])
    return {rule: [{"origin": origin, "text": text} for _, origin, text in merged[rule]] for rule in sorted(merged)}


def _smallest(examples: list[list]) -> list[list]:
    """At most EXAMPLES different texts, in the order of their hashes; of equal ones, the first."""
    different = {place: [place, origin, text] for place, origin, text in reversed(examples)}
    return [different[place] for place in heapq.nsmallest(EXAMPLES, different)]
