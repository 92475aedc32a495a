"""Sentences: where they end, and the lists that run on inside a paragraph."""

import json
import os
import pathlib

import pytest
import sentencex
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.builder import sentences as sentences_module
from data_prep.builder.sentences import split_lines, split_paragraphs, split_sentences


def test_sentences_end_at_paragraphs_but_not_at_line_ends():
    text = "A heading\n\nDr. Smith arrived\nlate. It rained! “Really?” she asked.\n\nno full stop"
    paragraphs = split_paragraphs(text)
    assert paragraphs == ["A heading", "Dr. Smith arrived\nlate. It rained! “Really?” she asked.", "no full stop"]
    assert split_sentences(paragraphs) == [
        ["A heading"],
        ["Dr. Smith arrived late.", "It rained!", "“Really?” she asked."],
        ["no full stop"],
    ]
    assert split_paragraphs("") == [] and split_paragraphs("\n\n\na\n\n\n\nb\n") == ["a", "b"]
    assert split_lines("One. Two.\nThree\n\nFour") == ["One. Two.", "Three", "Four"]


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("1. The river 2. The stone", ["1. The river", "2. The stone"]),
        ("1) The river. It sings. 2) The stone.", ["1) The river.", "It sings.", "2) The stone."]),
        ("⁃9. The river ⁃10. The stone", ["⁃9. The river", "⁃10. The stone"]),
        ("a. The river b. The stone c. The wind", ["a. The river", "b. The stone", "c. The wind"]),
        ("z. The river a. The stone", ["z. The river a. The stone"]),
        ("1. The river 3. The stone", ["1. The river 3.", "The stone"]),
        ("1. ", ["1."]),
        ("1. 2. x", ["1.", "2. x"]),
        ("2 rivers. 3 stones.", ["2 rivers.", "3 stones."]),
    ],
)
def test_run_in_lists(paragraph, sentences):
    assert split_sentences([paragraph]) == [sentences]
    assert split_sentences(["Before. It.", paragraph, "After."]) == [["Before.", "It."], sentences, ["After."]]


@pytest.mark.parametrize("language", ["de", "fr", "hi", "zh", "xx"])
def test_no_text_is_lost_in_any_language(language):
    text = "Er kam z. B. um 5 Uhr. 他来了。你呢？ वह आया। क्या हुआ? 1. Eins 2. Zwei"
    [sentences] = split_sentences([text], language)
    assert "".join(sentences).replace(" ", "") == text.replace(" ", "")


def by_paragraph(paragraphs, language):
    """The slow twin: one call of the library for each paragraph, of any length."""
    return [
        [sentence for piece in sentencex.segment(language, paragraph) if (sentence := piece.strip())]
        for paragraph in paragraphs
    ]


WORDS = [
    "He came",
    "said",
    "Dr.",
    "e.g.",
    "U.S.",
    "etc.",
    "Yahoo!",
    "end.",
    "What?",
    "他来了。",
    "क्या।",
    "“No.”",
    "'Tis",
]
WORDS += ['"Go on."', "(see p. 3)", "‘Oh!’", "«Ja.»", "a@b.com", "3.5", "...", "–", "Ü.", "I.", "[1]", '"']
WORDS += ["“", "(", "”", "«", "\u00a0"]
PARAGRAPHS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join), max_size=6)


@settings(max_examples=200, deadline=None)
@given(
    PARAGRAPHS,
    st.sampled_from(["en", "de", "hi", "zh", "am", "el", "hy", "my", "ja", "kk", "fr", "xx"]),
    st.integers(1, 300),
)
def test_one_call_for_all_paragraphs_equals_one_call_for_each(paragraphs, language, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences_module, "_BATCH_BYTES", batch)
        assert split_sentences(paragraphs, language) == by_paragraph(paragraphs, language)


@pytest.mark.parametrize(
    ("language", "clause", "end", "kept"),
    [
        ("th", "บุคคลมีสิทธิในชีวิตเสรีภาพและความมั่นคงแห่งบุคคล", "", "ใด ๆ 2560 ปี"),
        ("lo", "ບຸກຄົນທຸກຄົນມີສິດໃນຊີວິດເສລີພາບແລະຄວາມປອດໄພ", "", "ໃດ ໆ 2560 ປີ"),
        ("km", "មនុស្សទាំងអស់កើតមកមានសេរីភាពនិងសមភាពក្នុងសេចក្ដី", "។", "ខ្មែរ ៗ ២៥៦០ ឆ្នាំ"),
        ("my", "လူတိုင်းသည်တူညီလွတ်လပ်သောဂုဏ်သိက္ခာဖြင့်လည်းကောင်း", "။", "မြန်မာ"),
    ],
)
def test_scripts_without_spaces_between_words(language, clause, end, kept):
    """Long texts without marks are split at spaces and line ends, not at those beside digits and marks."""
    assert len(clause) >= sentences_module.CLAUSE_CHARACTERS
    clauses = [clause + kept] * 6
    for separator in (" ", "\n"):
        assert split_sentences([separator.join(clauses)], language) == [clauses]
    if end:
        marked = [f"{clause} {clause}{end}"] * 2
        assert split_sentences(["".join(marked)], language) == [marked] == split_sentences([" ".join(marked)], language)
    short = f"{kept} {kept}"
    assert split_sentences([short], language) == [[short]]


def test_the_end_of_no_paragraph_is_lost_in_long_documents():
    """`sentencex` 1.0.32 omits the ends of some paragraphs in texts above 10 KiB."""
    cold = "It was cold. “What?” she said so, and the wind blew."
    for paragraph in (cold, "他来了很多次但是没有人知道为什么。你呢？", "x"):
        paragraphs = [paragraph] * (14_000 // len(paragraph))
        assert split_sentences(paragraphs) == by_paragraph(paragraphs, "en")
    long = "One. Two! " * 3000
    assert split_sentences(["a.", long, "Be. Go."]) == [["a."], *by_paragraph([long], "en"), ["Be.", "Go."]]


class Library:
    """`sentencex`, and how many characters it was given."""

    def __init__(self, monkeypatch):
        self.lengths = []
        segment = sentencex.segment

        def counting(language, text):
            self.lengths.append(len(text))
            return segment(language, text)

        monkeypatch.setattr(sentencex, "segment", counting)


SENTENCES = [
    "“Why? Because. I said so.”",
    "Mr. Smith (b. 1950. In York) left.",
    '"No. Never!" he said.',
    "It rained, e.g. in May.",
]
SENTENCES += ["«Ja. Nein.»", "他来了。", "[Ed. Note. Two.]", "“" + "It rained again. " * 14 + "Yes.”"]


def test_long_paragraphs_are_split_in_windows(monkeypatch):
    """With quotations that end, the windows have no effect; the library gets less than twice the text."""
    paragraph = " ".join(SENTENCES[i * i % 7 + i % 2] for i in range(400))
    [expected] = by_paragraph([paragraph], "en")
    library = Library(monkeypatch)
    monkeypatch.setattr(sentences_module, "LONG_CHARACTERS", 1000)
    monkeypatch.setattr(sentences_module, "WINDOW", 600)
    assert split_sentences([paragraph]) == [expected]
    assert len(library.lengths) > 10 and max(library.lengths) <= 600
    assert sum(library.lengths) < 2 * len(paragraph)


@pytest.mark.parametrize(
    "unit",
    ["word ", "a", "“", "“No. ", '"', "(a. B ", "... ", ".", "他", "他。", "'x ", "1. 2. ", "<a. ", "a. " + "b" * 999],
)
def test_what_never_ends_costs_no_time_and_loses_no_text(unit, monkeypatch):
    library = Library(monkeypatch)
    paragraph = (unit * (60_000 // len(unit))).strip()
    [sentences] = split_sentences([paragraph])
    assert "".join(sentences).replace(" ", "") == paragraph.replace(" ", "")
    assert len(library.lengths) > 10 and max(library.lengths) <= sentences_module.WINDOW
    assert sum(library.lengths) < 5 * len(paragraph)


@pytest.mark.skipif("BERT_JAX_SHARED_DATA" not in os.environ, reason="needs the golden pairs")
def test_golden_pairs():
    file = pathlib.Path(os.environ["BERT_JAX_SHARED_DATA"]) / "sentence_split" / "english_golden_rules.jsonl"
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    right = sum(
        [sentence for part in split_sentences(split_paragraphs(pair["text"])) for sentence in part]
        == [sentence.strip() for sentence in pair["sentences"]]
        for pair in pairs
    )
    assert (right, len(pairs)) == (47, 48)
