"""Inputs from bug reports of other projects and of our own users, in tests/cases: each gives the stated result.

A directory is named after the public report or the observation; the docstrings below say which.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bert_jax.errors import UserError
from bert_jax.finetune import squad, tagging
from bert_jax.finetune.options import FileOptions
from bert_jax.finetune.sentence_data import read_glue
from bert_jax.finetune.squad_data import read_squad_splits
from bert_jax.finetune.tagging import TaggedSentence
from bert_jax.finetune.tagging_data import TaggingData, read_tagging
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer, sentencepiece, wordpiece
from data_prep.cli.main import main
from data_prep.sources.mediawiki_markup import plain_text
from tests.building import run
from tests.data_prep.test_sources_reading import read
from tests.tokenizers.test_offsets import small_model

CASES = Path(__file__).parent / "cases"
LETTERS = [chr(97 + i) for i in range(26)]
TOKENIZER = wordpiece(
    [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), *".0123456789"], True, "the test's vocabulary"
)
SENTENCE = (("Anna", "Berg", "works", "in", "Oslo", "."), ("B-PER", "I-PER", "O", "O", "B-LOC", "O"))


def tagged(case: str) -> TaggingData:
    return TaggingData(read_tagging(CASES / case, FileOptions()), TOKENIZER, 64)


# Sources


def test_json_lines_with_a_byte_order_mark():
    """huggingface/datasets#8241: 12 records."""
    found = read(f"jsonl:{CASES}/a01_jsonl_bom/docs.jsonl@text")
    assert len(found.texts) == 12 and not found.skipped and found.texts[0].startswith("Document number 0 ")


def test_json_lines_with_separators_of_unicode_in_strings():
    """huggingface/datasets#3910: records end at LF alone; the one with half of a surrogate pair is skipped."""
    found = read(f"jsonl:{CASES}/a02_jsonl_separators/docs.jsonl@text")
    assert len(found.texts) == 11 and len(found.skipped) == 1 and "docs.jsonl:6" in found.skipped[0].origin
    assert [sum(mark in text for text in found.texts) for mark in "\u2028\u2029\x85"] == [1, 1, 1]


def test_lines_end_at_lf_alone(tmp_path):
    """huggingface/datasets#3910: 81 lines, as google-research/bert reads them."""
    found = read(f"lines:{CASES}/a03_lines_separators/docs.txt")
    lines = [line for text in found.texts for line in text.split("\n") if line]
    assert len(lines) == 81
    manifest = run(tmp_path / "corpus", [f"lines:{CASES}/a03_lines_separators/docs.txt"])
    assert sum(split["sentences"] for split in manifest["splits"].values()) == 81


def test_a_dump_with_empty_pages_revisions_and_redirects():
    """attardi/wikiextractor, self-closing text: 5 articles."""
    found = read(f"mediawiki:{CASES}/a11_dump_xml/dump.xml")
    assert len(found.texts) == 5 and "Betatwo is a town" in found.texts[1]


@pytest.mark.parametrize(
    "piece", json.loads((CASES / "a14_wikitext" / "pieces.json").read_text()), ids=lambda piece: piece["case"]
)
def test_wikitext(piece):
    """attardi/wikiextractor#125, #80, #285, #275, #135 and others."""
    assert plain_text(piece["wikitext"]) == piece["text"]


def test_one_document_is_refused(tmp_path):
    """NVIDIA/DeepLearningExamples#421: it has no valid random next sentence."""
    with pytest.raises(UserError, match=r"one document with text is left .* a corpus needs two"):
        run(tmp_path / "corpus", [f"text-files:{CASES}/b01_one_document/text.txt"])


def test_blank_lines_between_all_sentences_are_noted(tmp_path, capsys):
    """google-research/bert#125: every sentence is a document, so that every pair is random."""
    TOKENIZER.save(tmp_path / "tokenizer.json")
    source = f"text:{CASES}/b02_blank_line_each_sentence/text.txt"
    out = str(tmp_path / "corpus")
    words = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", out, "--workers", "1"]
    assert main(["build", "--source", source, *words]) == 0
    assert "100% of next-sentence pairs are random" in capsys.readouterr().err


# Tokenizers


def test_marks_that_the_default_tokenizer_deletes_are_noted(tmp_path, capsys):
    """huggingface/tokenizers#572, google-research/bert#138: vowel signs of Hindi (our own sentences)."""
    source = f"text-files:{CASES}/a12_default_strips_marks/hin.txt"
    words = ["--vocab-size", "300", "--workers", "1", "--out", str(tmp_path / "tokenizer.json")]
    assert main(["tokenizer", "--source", source, *words]) == 0
    assert "--keep-accents" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["a05_vocab_blank_lines", "a05_vocab_blank_lines/two", "a07_vocab_bom_crlf"])
def test_vocabulary_files(case):
    """SudachiTra#64, medbert#6, viggy28/recall#38: the ids are line numbers, as in transformers."""
    path = CASES / case / "vocab.txt"
    pieces = [line.rstrip("\r") for line in path.read_text("utf-8-sig").split("\n")]
    loaded = Tokenizer.load(path)
    assert loaded.pad_id == 0 and pieces[0] == "[PAD]"
    for piece in ("[UNK]", "[MASK]", "ship", "sea", "##s"):
        assert loaded.id_to_token(pieces.index(piece)) == piece


@pytest.mark.parametrize("split", ["train", "dev"])
def test_markers_that_the_tokenizer_has_added(split, tmp_path):
    """dmis-lab/biobert#166: <e1> and </e1> are one token each."""
    library = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    library.encode_special_tokens = False
    library.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<e1>", "</e1>")])
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    for line in (CASES / "a04_added_special_tokens" / f"{split}.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        expected = library.encode(text, add_special_tokens=False).ids
        assert loaded.encode(text) == expected
        assert {len(TOKENIZER.encode("")) + i for i in expected} & {library.token_to_id("<e1>")}


# Fine-tuning


def test_answers_keep_their_first_letter():
    """EuroEval#2173: a Sequence of Whitespace, ByteLevel and Punctuation reports late offsets."""
    context = "Het schip voer naar Amsterdam en Rotterdam. De kapitein heette Jansen."
    loaded = Tokenizer.load(CASES / "e01_offsets_sequence_pretokenizer" / "tokenizer.json")
    ids, offsets = loaded.encode_with_offsets(context)
    (window,) = squad.windows(0, 3, len(ids), 64, 32)
    for answer in ("Amsterdam", "Jansen", "Rotterdam", "schip"):
        first, last = squad.answer_positions(window, offsets, answer, context.index(answer))
        start, end = np.zeros((2, len(ids) + 10))
        start[first] = end[last] = 9
        best, _ = squad.best_answers([window], [start], [end], context, offsets)
        assert best[0].text == answer


def test_questions_in_pieces_of_sentencepiece():
    """The pinned sentencepiece 0.2.2 refuses the call that gave offsets before."""
    loaded = sentencepiece(small_model(), "the test's model")
    for questions in read_squad_splits(CASES / "e02_squad_sentencepiece", FileOptions()).values():
        assert len(questions) == 12
        context = questions[0].context
        ids, offsets = loaded.encode_with_offsets(context)
        assert len(ids) == len(offsets) and "".join(context[a:b] for a, b in offsets) == context.replace(" ", "")


def test_labels_of_mnli_in_another_order():
    """huggingface/nn_pruning#32, transformers#10386: the labels are found by their names."""
    task = read_glue("mnli", CASES / "e12_mnli_label_order")
    assert [task.labels[example.label] for example in task.splits["train"][:3]] == [
        "entailment",
        "neutral",
        "contradiction",
    ]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("e14_squad_start_minus_1", "is not at character -1"),
        ("e15_squad_hf_lists", "answers .* must be a list"),
        ("e16_squad_duplicate_ids", "have the id of another one"),
        ("e18_squad_utf16_offsets", "is not at character"),
    ],
)
def test_questions_that_are_refused(case, message):
    with pytest.raises(UserError, match=message) as error:
        read_squad_splits(CASES / case, FileOptions())
    assert "\n" not in str(error.value)


def test_squad_2_with_plausible_answers():
    for questions in read_squad_splits(CASES / "e19_squad_v2", FileOptions()).values():
        assert len(questions) == 12 and {len(question.answers) for question in questions} == {0, 1}


def test_the_index_of_a_word_is_not_the_word():
    """Universal NER."""
    with pytest.raises(UserError, match="--word-column"):
        read_tagging(CASES / "e04_index_word_tag", FileOptions(tag_column=2))
    found = tagging.read_conll(CASES / "e04_index_word_tag" / "train.conll", 2, 1)
    assert found[0] == TaggedSentence(*SENTENCE)


def test_tags_without_types_are_spans():
    """allenai/allennlp#1491: B, I and O are spans of one type."""
    assert tagged("e05_bio_without_type").has_spans


def test_columns_are_separated_by_spaces_and_tabs_alone():
    found = read_tagging(CASES / "e08_nbsp_word", FileOptions())["train"]
    assert any("\xa0" in word for sentence in found for word in sentence.words)


def test_columns_with_a_byte_order_mark_and_crlf():
    assert read_tagging(CASES / "e10_bom_crlf", FileOptions())["train"][0] == TaggedSentence(*SENTENCE)


def test_words_without_tokens_keep_their_place(tmp_path):
    """huggingface/transformers#1662: U+200B and U+FE0F are predicted as O, their neighbours as their tokens."""
    data = tagged("e11_empty_words")
    tokens = len(data.splits["dev"].examples.input_ids)
    data.write_predictions(tmp_path, {"dev": np.eye(len(data.labels))[[data.labels.index("B-LOC")] * tokens]})
    lines = [json.loads(line) for line in (tmp_path / "dev.jsonl").read_text().splitlines()]
    words = [word for line in lines for word in line["words"]]
    found = [tag for line in lines for tag in line["predictions"]]
    assert "\u200b" in words
    assert found == ["O" if word in ("\u200b", "\ufe0f") else "B-LOC" for word in words]
