"""Sentences: where they end, and the lists that run on inside a paragraph."""

import json
import os
import pathlib

import pytest

from data_prep.build.sentences import split_lines, split_paragraphs, split_sentences


def test_sentences_end_at_paragraphs_but_not_at_line_ends():
    text = "A heading\n\nDr. Smith arrived\nlate. It rained! “Really?” she asked.\n\nno full stop"
    paragraphs = split_paragraphs(text)
    assert paragraphs == ["A heading", "Dr. Smith arrived\nlate. It rained! “Really?” she asked.", "no full stop"]
    assert [split_sentences(paragraph) for paragraph in paragraphs] == [
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
    assert split_sentences(paragraph) == sentences


@pytest.mark.parametrize("language", ["de", "fr", "hi", "zh", "xx"])
def test_no_text_is_lost_in_any_language(language):
    text = "Er kam z. B. um 5 Uhr. 他来了。你呢？ वह आया। क्या हुआ? 1. Eins 2. Zwei"
    assert "".join(split_sentences(text, language)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.skipif("BERT_JAX_SHARED_DATA" not in os.environ, reason="needs the golden pairs")
def test_golden_pairs():
    file = pathlib.Path(os.environ["BERT_JAX_SHARED_DATA"]) / "sentence_split" / "english_golden_rules.jsonl"
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    right = sum(
        [sentence for part in split_paragraphs(pair["text"]) for sentence in split_sentences(part)]
        == [sentence.strip() for sentence in pair["sentences"]]
        for pair in pairs
    )
    assert (right, len(pairs)) == (47, 48)
