"""Golden decisions: for each rule a document that it removes, and one just on the other side that it keeps."""

import dataclasses
import re
import zlib
from collections import Counter
from types import NoneType
from typing import get_args

import numpy as np
import pytest

from bert_jax.errors import UserError
from data_prep.filters import gopher
from data_prep.filters.c4 import C4
from data_prep.filters.chain import DocumentFilter, Filters, merge_examples
from data_prep.filters.fineweb import FineWeb
from data_prep.filters.gopher import GopherQuality, GopherRepetition
from data_prep.filters.language import Language
from data_prep.filters.personal_data import mask

PLAIN = """The harbour was quiet when the first boat came back, and nobody on the pier had expected it to be so early.

Its captain said that they have seen a storm to the north, with clouds of a colour that no old sailor knew.

By noon the wind turned, and everyone who had laughed at him carried their nets into the houses. It rained.

The next morning was bright again! Would the sea forgive them? It did, for a week."""
"""Kept by all families."""
WORDS = [f"word{i}" for i in range(1000)]
"""All different."""


def words(number, first=0):
    return " ".join(WORDS[first : first + number])


def only(family, rule):
    """The family with this rule alone; switches keep their other fields."""
    none = {field.name: None for field in dataclasses.fields(family) if NoneType in get_args(field.type)}
    return dataclasses.replace(family(), **{**none, rule: getattr(family(), rule)})


@pytest.mark.parametrize("family", [GopherQuality(), GopherRepetition(), C4(), FineWeb()])
def test_plain_text_is_kept(family):
    verdict = family.judge(PLAIN, "en")
    assert verdict.rule is None and verdict.text == PLAIN and not verdict.lines


GOLDEN = [
    (GopherQuality, "min_words", words(49), words(50)),
    (GopherQuality, "max_words", "a " * 100_001, "a " * 100_000),
    (GopherQuality, "min_mean_word_length", "ab abc", "abc abc"),
    (GopherQuality, "max_mean_word_length", "abcdefghijk", "abcdefghij"),
    (GopherQuality, "max_hashes", f"# # {words(8)}", f"# {words(9)}"),
    (GopherQuality, "max_ellipses", f"{words(7)} one… two... three", f"{words(9)} one…"),
    (GopherQuality, "max_bullet_lines", "- one\n* two\n• three", "- one\n" * 9 + "none"),
    (GopherQuality, "max_ellipsis_lines", "one...\ntwo\nthree …\nfour", "one...\ntwo\nthree\nfour"),
    (GopherQuality, "min_words_with_letters", "1 2 . a b c", "1 a b3 c 4d"),
    (GopherQuality, "min_stop_words", "The river and-so the stone", "The river AND the stone"),
    (GopherRepetition, "repeated_lines", "a\nb\nc\na\na", "a\nb\nc\nd\ne\na"),
    (GopherRepetition, "repeated_paragraphs", "a\n\nb\n\na", "a\n\nb\na\n\nc\nb\n\nd"),
    (GopherRepetition, "repeated_line_characters", "xxxxxxxxx\nxxxxxxxxx\ny\nz", "xxxxxxxxx\nxx\nxx\ny"),
    (GopherRepetition, "repeated_paragraph_characters", "xxxxxxxxx\n\nxxxxxxxxx\n\ny\n\nz", "xxxxxxxxx\nxxxxxxxxx"),
    (GopherRepetition, "top_2_gram", f"a bc {words(2)} a bc {words(2)} a bc", f"a bc {words(20)} a bc"),
    (GopherRepetition, "top_3_gram", f"a b c {words(3)} a b c", f"a b {words(3)} a b {words(3, 9)}"),
    (GopherRepetition, "top_4_gram", f"a b c d {words(5)} a b c d", "a b c d e f g a b c e f g"),
    *(
        (
            GopherRepetition,
            f"repeated_{size}_grams",
            f"{words(size)} {words(2 * size, 50)} {words(size)}",
            f"{words(size)} {words(2 * size, 50)} {words(size - 1)}",
        )
        for size in range(5, 11)
    ),
    (C4, "lorem_ipsum", f"{PLAIN}\nLorem Ipsum dolor sit amet.", f"{PLAIN}\nLorem dolor ipsum."),
    (C4, "curly_bracket", f"{PLAIN} if (a) {{", f"{PLAIN} if (a) ("),
    (C4, "min_sentences", "One. Two. Is it 3.5? No! And 6.7", "One. Two. Is it 3.5? No! \"Five five.\""),
    (FineWeb, "min_lines_with_end_mark", "one\n" * 9 + "ten.", "one\n" * 7 + "eight."),
    (FineWeb, "max_short_lines", f"{'x' * 30}\n" * 7 + f"{'x' * 31}\n" * 3, f"{'x' * 30}\n" * 6 + f"{'x' * 31}\n" * 4),
    (FineWeb, "max_repeated_line_characters", f"{words(20)}\nab\nab", f"{words(40)}\nab\nab"),
    (FineWeb, "max_line_ends", "one two three\nfour\nfive", "one two\nthree four\nfive six seven"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "rule", "removed", "kept"), GOLDEN, ids=[f"{f.__name__}-{r}" for f, r, *_ in GOLDEN]
)
def test_golden_decisions(family, rule, removed, kept):
    alone = only(family, rule)
    if family is C4:
        alone = dataclasses.replace(alone, min_sentences=5 if rule == "min_sentences" else None)
    assert alone.judge(removed, "en").rule == rule
    assert alone.judge(kept, "en").rule is None
    off = dataclasses.replace(alone, **{rule: False if isinstance(getattr(alone, rule), bool) else None})
    assert off.judge(removed, "en").rule is None


def test_every_rule_has_a_golden_decision():
    fields = {(f, field.name) for f in (GopherQuality, GopherRepetition, FineWeb) for field in dataclasses.fields(f)}
    assert fields - {(family, rule) for family, rule, *_ in GOLDEN} == {(FineWeb, "short_line")}


def test_stop_words_are_those_of_english():
    german = "Der Hafen war still, und niemand sprach."
    assert only(GopherQuality, "min_stop_words").judge(german, "de").rule is None
    assert only(GopherQuality, "min_stop_words").judge(german, "en-GB").rule == "min_stop_words"


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("without_end_mark", "Home page of it"),
        ("without_end_mark", "To be continued..."),
        ("min_line_words", "Click here."),
        ("max_word_length", f"It is {'x' * 1001} here."),
        ("javascript", "Please enable JavaScript for this."),
        ("policy", "This page uses cookies for you."),
    ],
)
def test_golden_lines(rule, line):
    verdict = C4().judge(f"{PLAIN}\n{line}", "en")
    assert verdict.lines == [(rule, line)] and verdict.rule is None and verdict.text == PLAIN
    off = {"min_line_words": None, "max_word_length": None}.get(rule, False)
    assert not dataclasses.replace(C4(), **{rule: off}).judge(f"{PLAIN}\n{line}", "en").lines


def test_citations():
    text = f"{PLAIN} It is said so.[12] And so.[citation needed]"
    assert C4().judge(text, "en").text == f"{PLAIN} It is said so. And so."
    assert dataclasses.replace(C4(), citations=False, without_end_mark=False).judge(text, "en").text == text


def slow_top(tokens, size):
    counts = Counter(tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1))
    most = max(counts.values(), default=0)
    return most * len(" ".join(next(g for g in counts if counts[g] == most))) if most > 1 else 0


def slow_repeated(tokens, size):
    known, covered, i = set(), 0, 0
    while i + size <= len(tokens):
        ngram = tuple(tokens[i : i + size])
        covered += len("".join(ngram)) if ngram in known else 0
        i += size if ngram in known else 1
        known.add(ngram)
    return covered


def test_ngrams_against_plain_python():
    rng = np.random.default_rng(0)
    found = set()
    for number in [0, 1, 2, 5, *rng.integers(3, 120, 60)]:
        tokens = [f"w{'x' * int(i)}" for i in rng.integers(0, 4, number)]
        arrays = gopher._number_words(tokens)
        for size in range(2, 11):
            assert gopher._top(*arrays, size) == slow_top(tokens, size)
            assert gopher._repeated_characters(*arrays, size) == slow_repeated(tokens, size)
            found.add((bool(slow_top(tokens, size)), bool(slow_repeated(tokens, size))))
    assert (True, True) in found and (False, False) in found


ENGLISH = "The letter arrived in the winter and nobody has read it so far, because it was very cold in the town."
GERMAN = "Der Brief kam im Winter an, und niemand hat ihn bisher gelesen, weil es in der Stadt sehr kalt war."


class TestLanguage:
    @pytest.fixture(autouse=True)
    def needs_the_library(self):
        pytest.importorskip("pycld2")

    @pytest.mark.parametrize(
        ("text", "rule", "mixed"),
        [
            (ENGLISH, None, False),
            (GERMAN, "min_share", False),
            ("12 34", "unidentified", False),
            (f"{ENGLISH * 4}\n\n{GERMAN * 9}", "min_share", True),
            (f"{ENGLISH * 9}\n\n{GERMAN * 4}", None, True),
        ],
    )
    def test_documents(self, text, rule, mixed):
        verdict = Language(keep=("en-GB",)).judge(text, "de")
        assert (verdict.rule, verdict.mixed, verdict.text) == (rule, mixed, text)
        assert Language(keep=("en", "de")).judge(text, "de").rule == ("unidentified" if text == "12 34" else None)
        assert Language(keep=("en",), min_share=None, unidentified=False).judge(text, "de").rule is None
        strict = Language(keep=("en", "de"), mixed=True)
        assert strict.judge(text, "").rule == ("mixed" if mixed else "unidentified" if text == "12 34" else None)

    def test_lines(self):
        text = f"{ENGLISH}\n{GERMAN}\n\nKurz.\n{GERMAN}\n{ENGLISH}"
        verdict = Language(keep=("en",), other_lines=True).judge(text, "en")
        assert verdict.lines == [("other_lines", GERMAN)] * 2 and verdict.rule is None
        assert verdict.text == f"{ENGLISH}\n\nKurz.\n{ENGLISH}" and verdict.mixed
        assert Language(keep=("en",), other_lines=True).judge(GERMAN, "en").rule == "unidentified", "nothing is left"

    def test_scripts_and_regions_are_one_language(self):
        chinese = "這是一個用繁體中文寫成的句子，內容很長，沒有人讀過這封信。"
        assert Language(keep=("zh",)).judge(chinese, "").rule is None
        assert Language(keep=("cmn-Hans",)).judge(chinese, "").rule is None
        assert Language(keep=("en",)).judge(chinese, "").rule == "min_share"

    @pytest.mark.parametrize("code", ["xx", "english", "", "ang"])
    def test_unknown_codes(self, code):
        with pytest.raises(UserError, match=f"language {code}: it is not the ISO 639 code of a language that CLD2"):
            Language(keep=("en", code))

    def test_contradictions(self):
        with pytest.raises(UserError, match=r"language\.keep is empty"):
            Language()
        with pytest.raises(UserError, match=r"language\.min_share is None: lines have no threshold"):
            Language(keep=("en",), other_lines=True, min_share=None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GopherQuality(min_words=2, max_words=1), "min_words is 2 and gopher_quality.max_words is 1: no doc"),
        (lambda: GopherQuality(min_mean_word_length=4.5, max_mean_word_length=4), "no document satisfies both"),
        (lambda: GopherQuality(max_hashes=1.5), "gopher_quality.max_hashes is 1.5: it must be a number in [0, 1]"),
        (lambda: GopherRepetition(top_2_gram=-1), "gopher_repetition.top_2_gram is -1: it must be"),
        (lambda: C4(min_sentences=0), "c4.min_sentences is 0"),
        (lambda: FineWeb(short_line=0), "fineweb.short_line is 0"),
    ],
)  # fmt: skip
def test_contradicting_thresholds(make, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jane.doe+news@mail.example.co.uk.", "Write to email@example.com."),
        ("<a@b.org>, mailto:a_b@c-d.net", "<email@example.com>, mailto:email@example.com"),
        ("user@host and @name and a@b.c1 stay", None),
        ("From 8.8.8.8 to 2001:4860:4860::8888.", "From 192.0.2.1 to 2001:db8::1."),
        ("192.168.0.1, 127.0.0.1, 300.1.1.1, version 1.2.3, 1.2.3.4.5 and at 12:30:45 stay", None),
        ("Call +44 20 7946 0958.", "Call +1 212 555 0100."),
        ("(415) 867-5309, 1-800-555-0199.", "212-555-0100, 212-555-0100."),
        ("+49 (0)30 1234567!", "+1 212 555 0100!"),
        ("In 1848-1851, pp. 123-456, ISBN 978-3-16-148410-0, 1,000,000,000 and 555-0199 stay", None),
        ("2024-11-28 12:30, $1234567890, A+1234567890", None),
    ],
)  # fmt: skip
def test_masks(text, masked):
    kinds = ("email", "ip", "phone")
    expected = text if masked is None else masked
    result, counts = mask(text, kinds)
    assert result == expected and [*counts] == [*kinds] and (sum(counts.values()) > 0) == (masked is not None)
    assert mask(result, kinds) == (result, dict.fromkeys(kinds, 0)), "masks are not masked"
    assert mask(text, ()) == (text, {})


def test_the_chain():
    chain = DocumentFilter(Filters(gopher_quality=GopherQuality(), c4=C4()), (), ("email",))
    line = "Write to jane@mail.org"
    assert chain(f"{PLAIN}\n{line}", "en", "a:1") == (PLAIN, None)
    short = "Too short, write to jane@mail.org."
    for index, text in enumerate([short, short, *(f"{short}{i}" for i in range(9))]):
        assert chain(text, "en", f"a:{index}") == (text, "gopher_quality.min_words")
    code = f"{PLAIN}\n{line}\n{{"
    assert chain(code, "en", "b") == (code, "c4.curly_bracket")
    found = chain.metadata()
    assert found["lines"] == {"c4.without_end_mark": {"lines": 1, "text_bytes": len(line) + 1}}, (
        "not of the removed one"
    )
    examples = merge_examples([found["examples"], found["examples"]])
    assert [len(examples[rule]) for rule in sorted(examples)] == [1, 1, 3]
    assert examples["c4.without_end_mark"] == [{"origin": "a:1", "text": "Write to email@example.com"}]
    assert all("email@example.com" in example["text"] for example in examples["gopher_quality.min_words"])
    assert len({example["text"] for example in examples["gopher_quality.min_words"]}) == 3


@pytest.mark.parametrize("text", ["", " ", "\n \n", "\t", "x", "\u3000", "{", "." * 5000, "a\n" * 3000])
def test_odd_texts(text):
    everything = Filters(None, GopherRepetition(), GopherQuality(), C4(), FineWeb())
    for name in everything.given():
        rest, rule = DocumentFilter(Filters(**{name: everything.given()[name]}), (), ())(text, "en", "a")
        assert rule is None or rest == text


@pytest.mark.parametrize("step", [1, 7, 40])
def test_examples_do_not_depend_on_blocks(step):
    """Those with the smallest hashes of all documents, in any order and any division into blocks."""
    documents = [f"{words(3, i)}." for i in range(40)]
    smallest = sorted(documents, key=lambda text: zlib.crc32(text.encode()))[:3]
    for order in (documents, documents[::-1]):
        blocks = []
        for start in range(0, len(order), step):
            chain = DocumentFilter(Filters(gopher_quality=GopherQuality()), (), ())
            for text in order[start : start + step]:
                chain(text, "en", text)
            blocks.append(chain.metadata()["examples"])
        (examples,) = merge_examples(blocks).values()
        assert [example["text"] for example in examples] == smallest
