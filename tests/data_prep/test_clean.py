"""Cleaning, against equivalent regular expressions."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.clean import CleaningCounts, CleaningOptions, clean

INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffd\ud800-\udfff]"
)


def reference(text, form="NFC"):
    text = re.sub("\r\n?|[\x0b\x0c\x85\u2028\u2029]", "\n", text)
    text = unicodedata.normalize(form, INVISIBLE.sub("", text))
    text = re.sub(r" ?\n ?", "\n", re.sub(r"[^\S\n]+", " ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("  a\t b \r\n c\r", "a b\nc"),
        ("a\n\n \n\n\nb", "a\n\nb"),
        ("a\n\n\nb", "a\n\nb"),
        ("a\n b", "a\nb"),
        ("a \nb", "a\nb"),
        ("a  b", "a b"),
        ("e\u0301te\u0301", "été"),
        ("x²", "x²"),
        ("a\x00b\ufeffc\u200bd\u00ade\ufffd", "abcde"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("a\u00a0\u3000b", "a b"),
        ("a\u2028b\x0bc", "a\nb\nc"),
        ("\x00 \n", ""),
        ("a \u00ad b", "a b"),
        ("e\u200b\u0301", "é"),
    ],
)
def test_clean(dirty, expected):
    assert clean(dirty) == expected == reference(dirty)


# Characters that require each step, and a few that require none.
LIVELY = [c for c in map(chr, range(0x3100)) if c.isspace() or unicodedata.category(c)[0] == "C"]
LIVELY += ["\ufeff", "\ufffd", "\ud800", *"\u0301\u0323eaé’\uac00\u1161\u11a8ﬁ\U0001f600"]


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from(LIVELY) | st.sampled_from(" \n ab") | st.characters(), max_size=12))
def test_equals_the_regular_expressions_and_is_idempotent(text):
    assert clean(text) == reference(text)
    assert clean(clean(text)) == clean(text)
    compatible = CleaningOptions(normalization="nfkc")
    assert clean(text, compatible) == reference(reference(text, "NFKC"), "NFKC")


def test_every_character_by_itself():
    for first in range(0, 0x110000, 0x400):
        text = "".join(f"a{chr(code)}b {chr(code)}{chr(code)}\n" for code in range(first, first + 0x400))
        assert clean(text) == reference(text), hex(first)


def test_each_step_can_be_switched_off_and_is_counted():
    text = "a\u00ad  e\u0301\t\n\n\n\nx² \r\nb"
    counts = CleaningCounts()
    assert clean(text, counts=counts) == "a é\n\nx²\nb"
    assert counts == CleaningCounts(control_characters=1, normalized_documents=1, whitespace_characters=5)
    assert clean(text, CleaningOptions(control_characters=False)) == "a\u00ad é\n\nx²\nb"
    assert clean(text, CleaningOptions(normalization="none")) == "a e\u0301\n\nx²\nb"
    assert clean(text, CleaningOptions(normalization="nfkc")) == "a é\n\nx2\nb"
    assert clean(text, CleaningOptions(whitespace=False)) == "a  é\t\n\n\n\nx² \nb"
    untouched = CleaningCounts()
    assert clean("Nothing to do.\n\nHere’s more.", counts=untouched) and untouched == CleaningCounts()
