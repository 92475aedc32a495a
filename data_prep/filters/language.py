"""Keeps documents, and lines, in given languages, by the shares of their text that CLD2 identifies (Sites 2013).

CLD2 gives no probability. Its confidence is that it names no language if it does not take its guess as reliable, and
the share of the text that is in a language. 0.65 is FineWeb's threshold for the probability of fastText's model.
"""

import dataclasses
from typing import Annotated

from bert_jax.errors import UserError
from bert_jax.field_validation import Count, Interval, check
from data_prep import languages
from data_prep.filters.rules import Threshold, Verdict


@dataclasses.dataclass(frozen=True)
class Language:
    """Which languages are kept; None or false switches a rule off."""

    keep: tuple[str, ...] = ()
    """ISO 639 codes"""
    min_share: Threshold | None = 0.65
    """of the text that is in languages of `keep`, together"""
    unidentified: bool = True
    """remove documents in which no language is identified with confidence, or nothing is left"""
    other_lines: bool = False
    """remove lines of at least `min_line_characters` of which at least `min_share` is in other languages"""
    min_line_characters: Count = 40
    """shorter lines are kept, because their language is often wrong"""
    mixed_share: Annotated[float, Interval("(0, 0.5]")] = 0.2
    """documents are mixed, and counted, if at least this share is in a second language"""
    mixed: bool = False
    """remove mixed documents"""

    def __post_init__(self):
        check(self, "language.")
        if not self.keep:
            raise UserError("language.keep is empty: give the ISO 639 codes of the languages to keep, such as en")
        if self.other_lines and self.min_share is None:
            raise UserError("language.other_lines is true and language.min_share is None: lines have no threshold")
        for code in self.keep:
            languages.identified_code(code)

    def judge(self, text: str, _language: str) -> Verdict:
        """The verdict on a text that is not empty, and the text without lines in other languages."""
        shares = languages.identified_shares(text)
        second = sorted(shares.values())[-2:-1]
        verdict = Verdict(text, mixed=bool(second) and second[0] >= self.mixed_share)
        if verdict.mixed and self.mixed:
            verdict.rule = "mixed"
            return verdict
        if self.other_lines:
            self._remove_lines(verdict)
            if verdict.lines:
                shares = languages.identified_shares(verdict.text)
        if not shares and self.unidentified:
            verdict.rule = "unidentified"
        elif shares and self.min_share is not None and self._kept_share(shares) < self.min_share:
            verdict.rule = "min_share"
        return verdict

    def _kept_share(self, shares: dict[str, float]) -> float:
        main_codes = frozenset(map(languages.identified_code, self.keep))
        return sum(share for code, share in shares.items() if languages.is_language(code, main_codes))

    def _remove_lines(self, verdict: Verdict) -> None:
        kept = []
        for line in verdict.text.split("\n"):
            shares = languages.identified_shares(line) if len(line) >= self.min_line_characters else {}
            if shares and sum(shares.values()) - self._kept_share(shares) >= self.min_share:
                verdict.lines.append(("other_lines", line))
            else:
                kept.append(line)
        verdict.text = "\n".join(kept)
