"""The rules of C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2), and those of its code in TensorFlow Datasets.

A line should be a paragraph: of text with line ends inside sentences, most lines do not end with a terminal mark. The
list of bad words is not included; a function of the user can apply one. Differences to the code: curly brackets and
"lorem ipsum" count in lines that other rules remove as well, as the paper says; the end of a sentence is a terminal
mark before white space.
"""

import dataclasses
import re
from typing import Annotated

from bert_jax.field_validation import Count, Interval, check
from data_prep.filters.rules import Verdict

_END_MARKS = (".", "?", "!", '"', "”")
_POLICY = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.?!][\"'”’)\]]*(?=\s|$)")


@dataclasses.dataclass(frozen=True)
class C4:
    """Rules for lines, then rules for what is left of the document; None or false switches a rule off."""

    without_end_mark: bool = True
    """remove lines that do not end with . ? ! or a quotation mark, or that end with an ellipsis"""
    min_line_words: Count | None = 3
    """remove lines with fewer words"""
    max_word_length: Count | None = 1000
    """remove lines with a longer word, in characters"""
    javascript: bool = True
    """remove lines with this word"""
    policy: bool = True
    """remove lines about cookies, privacy policies and terms of use"""
    citations: bool = True
    """remove the marks [1], [edit] and [citation needed]"""
    lorem_ipsum: bool = True
    """remove documents with this phrase"""
    curly_bracket: bool = True
    """remove documents with {"""
    min_sentences: Annotated[int, Interval("[1, 1e6]")] | None = 5
    """of what is left"""

    def __post_init__(self):
        check(self, "c4.")

    def judge(self, text: str, _language: str) -> Verdict:
        """The verdict on a text, and the text without the lines that break a rule."""
        if self.curly_bracket and "{" in text:
            return Verdict(text, "curly_bracket")
        if self.lorem_ipsum and "lorem ipsum" in text.lower():
            return Verdict(text, "lorem_ipsum")
        verdict, kept = Verdict(text), []
        for line in text.split("\n"):
            unmarked = _CITATION.sub("", line) if self.citations and "[" in line else line
            if line and (rule := self._broken_by_line(unmarked.rstrip())):
                verdict.lines.append((rule, line))
            else:
                kept.append(unmarked)
        verdict.text = "\n".join(kept)
        if self.min_sentences is not None and len(_SENTENCE_END.findall(verdict.text)) < self.min_sentences:
            verdict.rule = "min_sentences"
        return verdict

    def _broken_by_line(self, line: str) -> str | None:
        if self.without_end_mark and (not line.endswith(_END_MARKS) or line.endswith("...")):
            return "without_end_mark"
        words = line.split()
        if self.min_line_words is not None and len(words) < self.min_line_words:
            return "min_line_words"
        if self.max_word_length is not None and len(max(words, key=len, default="")) > self.max_word_length:
            return "max_word_length"
        lower = line.lower()
        if self.javascript and "javascript" in lower:
            return "javascript"
        if self.policy and _POLICY.search(lower):
            return "policy"
        return None
