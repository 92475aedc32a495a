"""Cleaning and sentences: text in, text out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.clean import clean
from data_prep.sentences import split_lines, split_sentences


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("  a\t b \r\n c\r", "a b\nc"),
        ("a\n\n \n\n\nb", "a\n\nb"),
        ("e\u0301te\u0301", "été"),
        ("x²", "x²"),
        ("a\x00b\ufeffc\u200bd\u00ade\ufffd", "abcde"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("a\u00a0\u3000b", "a b"),
        ("a\u2028b\x0bc", "a\nb\nc"),
        ("\x00 \n", ""),
    ],
)
def test_clean(dirty, expected):
    assert clean(dirty) == expected


@given(st.text())
def test_clean_twice_is_clean_once(text):
    assert clean(clean(text)) == clean(text)


def test_sentences_end_at_paragraphs_but_not_at_line_ends():
    text = "A heading\n\nDr. Smith arrived\nlate. It rained! “Really?” she asked.\n\nno full stop"
    assert split_sentences(text) == [
        "A heading",
        "Dr. Smith arrived late.",
        "It rained!",
        "“Really?” she asked.",
        "no full stop",
    ]
    assert split_sentences("") == []
    assert split_lines("One. Two.\nThree\n\nFour") == ["One. Two.", "Three", "Four"]
