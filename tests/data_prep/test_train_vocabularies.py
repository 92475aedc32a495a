"""Words from text, and vocabularies from words: every kind, from sources to ids."""

import collections
import functools

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from bert_jax.errors import UserError
from bert_jax.tokenizers.kinds import bert_normalizer
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.vocabularies import counting, sentencepiece_training
from data_prep.vocabularies.counting import (
    BertWordCounter,
    BoundedWordCounts,
    ByteWordCounter,
    MarkCounts,
    weighted_counts,
)
from data_prep.vocabularies.train import KINDS, VocabularySettings, sampling_rates, train
from tests.data_prep.fakes import fake

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog is not amused.",
    "Foxes jumped; dogs slept. Nobody was amusing, nobody was quicker than the quickest fox!",
    "Über Straßen und Äcker — naïve café, 力加 1984 (x_1 + y_2) = z. It's ΣΊΣΥΦΟΣ' $5,000.00 <s> [MASK] ▁",
] * 3
SIZES = {"wordpiece": 140, "bpe": 140, "byte-bpe": 300, "sentencepiece-unigram": 80, "sentencepiece-bpe": 110}


def pieces(tokenizer):
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


def recipe(kind, **more):
    return VocabularySettings(**{"kind": kind, "vocab_size": SIZES[kind], "lowercase": False} | more)


@functools.cache
def trained(kind, lowercase=False):
    return train(recipe(kind, lowercase=lowercase), [fake(*TEXTS)], workers=1)


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_are_those_of_bert(lowercase):
    library = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = bert_normalizer(lowercase), pre_tokenizers.BertPreTokenizer()
    expected = collections.Counter(
        word
        for text in TEXTS
        for word, _ in library.pre_tokenizer.pre_tokenize_str(library.normalizer.normalize_str(text))
    )
    found = BertWordCounter(lowercase)(TEXTS, MarkCounts())
    assert found == expected and ("über" in found or "uber" in found) == lowercase
    assert next(iter(found)) == ("the" if lowercase else "The")


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_are_those_of_gpt2(lowercase):
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    normalize = normalizers.Lowercase().normalize_str if lowercase else str
    expected = collections.Counter(
        word for text in TEXTS for word, _ in pre_tokenizer.pre_tokenize_str(normalize(text))
    )
    assert ByteWordCounter(lowercase)(TEXTS, MarkCounts()) == expected
    assert ByteWordCounter(lowercase)(["a\nb  c"], MarkCounts()) == {"Ġa": 1, "Ġb": 1, "Ġc": 1}, (
        "spaces are one, as in sentences"
    )


def test_rare_words_are_forgotten_beyond_the_limit(capsys):
    table = BoundedWordCounts(limit=6)
    table.add({"a": 3, "b": 1, "c": 2, "d": 1})
    assert len(table.counts) == 4 and not capsys.readouterr().err
    table.add({"e": 1, "f": 2, "g": 2, "a": 1})
    assert table.counts == {"a": 4}, "words seen once, and as that left more than half of the limit, twice"
    assert "more than 6 different words" in capsys.readouterr().err
    table.add({"h": 1})
    assert table.counts == {"a": 4, "h": 1}


def test_rates_reach_limit_and_shares():
    sizes, shares = [900.0, 100.0], np.array([0.5, 0.5])
    for limit, rates in ((200, [100 / 900, 1]), (100, [50 / 900, 0.5]), (1000, [500 / 900, 1])):
        np.testing.assert_allclose(sampling_rates(sizes, shares, limit), rates)


def test_weights_are_thousandths():
    total = weighted_counts([{"a": 2, "b": 1}, {"b": 3}], np.array([1.0, 1.5]))
    assert total == {"a": 2000, "b": 1000 + 4500}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_from_source_to_ids(kind, tmp_path, capsys):
    tokenizer = train(recipe(kind), [fake(*TEXTS)], workers=1)
    assert tokenizer.vocab_size == SIZES[kind] and "gives only" not in capsys.readouterr().err
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    expected = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    if kind != "byte-bpe":
        expected = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert pieces(tokenizer)[:5] == expected
    ids, _ = tokenizer.encode_corpus(["[MASK] <mask> fox", *TEXTS])
    assert set(ids.tolist()).isdisjoint({*tokenizer.special_ids} - {tokenizer.unk_id})
    assert tokenizer.unk_id not in tokenizer.encode("Nobody quicker than the dogs")
    assert tokenizer.decode(tokenizer.encode("nobody was quicker")).strip() == "nobody was quicker"
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    again = train(recipe(kind), [fake(*TEXTS, per_block=5)], workers=1)
    assert again.to_json() == tokenizer.to_json(), "neither chance nor the cut into blocks decides anything"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_word_of_a_text_is_spelled_like_others_and_case(kind):
    tokenizer, uncased = trained(kind), trained(kind, lowercase=True)
    once, twice = tokenizer.encode("fox"), tokenizer.encode("fox fox")
    assert twice == once + once
    begins = ~tokenizer.continues_word[twice]
    assert begins.sum() == 2 and begins[0] and begins[len(once)]
    assert uncased.lowercase and uncased.encode("FOX") == uncased.encode("fox") != uncased.encode("box")
    assert not tokenizer.lowercase and tokenizer.encode("FOX") != once


def test_a_short_text_gives_fewer_pieces_and_says_so(capsys):
    for kind in KINDS:
        size = 600 if kind == "byte-bpe" else 500
        tokenizer = train(recipe(kind, vocab_size=size), [fake("low low lower", "lower low")], workers=1)
        assert tokenizer.vocab_size < size
        assert f"gives only {tokenizer.vocab_size} pieces, not {size}" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_user_errors(kind):
    with pytest.raises(UserError, match=r"no words|leaves no text"):
        train(recipe(kind), [fake("  ")], workers=1)
    with pytest.raises(UserError, match="use at least") as error:
        train(recipe(kind, vocab_size=20), [fake(*TEXTS)], workers=1)
    least = int(str(error.value).split()[-1])
    assert train(recipe(kind, vocab_size=least), [fake(*TEXTS)], workers=1).vocab_size == least
    with pytest.raises(UserError, match="contains no document"):
        train(recipe(kind), [fake()], workers=1)


def test_a_note_about_what_is_skipped(capsys):
    train(recipe("bpe"), [fake(*TEXTS, None, "x", None, spec="some")], workers=1)
    assert "source some: skipped 2 x malformed_json; the first: some#4: no brace" in capsys.readouterr().err
    train(recipe("sentencepiece-bpe"), [fake(*TEXTS, None, spec="some")], workers=1)
    assert capsys.readouterr().err.count("skipped") == 1, "two passes, one note"


def test_max_characters():
    tokenizer = train(recipe("bpe", max_characters=3), [fake("aaa bb bb cc d", "aaa")], workers=1)
    assert {"a", "b", "c"} <= set(pieces(tokenizer)) and "d" not in pieces(tokenizer)
    assert tokenizer.unk_id in tokenizer.encode("d")


def test_ascii_is_always_in_the_alphabet():
    for kind in ("wordpiece", "bpe"):
        for more in ({}, {"max_characters": 2}):
            tokenizer = train(recipe(kind, vocab_size=900, **more), [fake("аа аа аа", "где")], workers=1)
            assert tokenizer.unk_id not in tokenizer.encode("".join(map(chr, range(32, 127))))
            assert (tokenizer.unk_id in tokenizer.encode("где")) == bool(more)


def test_the_alphabet_follows_the_text(capsys):
    """Two thousand characters, each of which occurs as often as the others, and one that is rare."""
    common = "".join(map(chr, range(0x4E00, 0x4E00 + 2000)))
    tokenizer = train(recipe("wordpiece", vocab_size=8000), [fake(*[common] * 11, "\u9fa0")], workers=1)
    assert tokenizer.unk_id not in tokenizer.encode(common) and tokenizer.encode("\u9fa0") == [tokenizer.unk_id]
    assert "unknown" not in capsys.readouterr().err
    train(recipe("wordpiece", vocab_size=8000, max_characters=1000), [fake(*[common] * 11)], workers=1)
    assert "note: 50.00% of the bytes of the text become unknown: 50.00% by characters that" in capsys.readouterr().err
    small = train(recipe("wordpiece", vocab_size=3000), [fake(*[common] * 11)], workers=1)
    assert sum(piece >= "\u4e00" for piece in pieces(small)) == 1500
    assert "raise --max-characters or --vocab-size" in capsys.readouterr().err
    train(recipe("wordpiece", vocab_size=300), [fake("a b c d", "ก" * 101)], workers=1)
    assert "in words of more than 100 characters, take --kind sentencepiece-unigram" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("निष्पक्ष विचार", "15.4%"),
        ("ที่นี่ก็ดี", "60.0%"),
        ("Tiếng Việt", "30.8%"),
        ("Über die Straße", "7.1%"),
        ("plain", None),
    ],
)
def test_deleted_marks_are_reported(text, share, capsys):
    for kind in ("wordpiece", "bpe"):
        train(recipe(kind, lowercase=True, vocab_size=300), [fake(text, text)], workers=1)
        error = capsys.readouterr().err
        assert (f"note: stripping accents deletes {share} of the letters and marks" in error) == bool(share), error
        kept = train(recipe(kind, lowercase=True, strip_accents=False, vocab_size=300), [fake(text, text)], workers=1)
        assert "accents" not in capsys.readouterr().err and kept.lowercase
        assert kept.decode(kept.encode(text)).replace(" ", "") == text.lower().replace(" ", "")


def test_long_words_are_left_to_wordpiece_and_cut_for_bpe():
    text = "ab" * 300
    with pytest.raises(UserError, match="no words"):
        train(recipe("wordpiece"), [fake(text)], workers=1)
    for kind in ("bpe", "byte-bpe"):
        tokenizer = train(recipe(kind), [fake(text)], workers=1)
        assert max(map(len, pieces(tokenizer))) > 8 and len(tokenizer.encode(text)) < 100


LANGUAGES = [f"aa{i % 7}b{i}" for i in range(900)], [f"zz{i % 7}y{i}" for i in range(100)]


def mixed(kind, exponent, **more):
    sources = [fake(*words, spec=spec, per_block=50) for words, spec in zip(LANGUAGES, "az", strict=True)]
    return train(recipe(kind, sampling_exponent=exponent, **more), sources, workers=1)


def test_sampling_exponent_weights_counts(monkeypatch):
    """At 0 the small language has as large a part in the counts as the large one."""
    seen = []
    learn = counting.weighted_counts
    monkeypatch.setattr(
        "data_prep.vocabularies.train.weighted_counts", lambda *args: seen.append(learn(*args)) or seen[-1]
    )
    mixed("bpe", 1.0)
    assert not seen
    large, small = (sum(map(len, words)) for words in LANGUAGES)
    for exponent in (0.0, 0.7):
        mixed("bpe", exponent)
        counts = seen.pop()
        sizes = [sum(n * len(word) for word, n in counts.items() if word.startswith(letter)) for letter in "az"]
        assert sizes[1] / sizes[0] == pytest.approx((small / large) ** exponent, rel=0.002)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_sampling_exponent_for_text_takes_no_document_twice(exponent, monkeypatch):
    seen = []
    real = sentencepiece_training.train_sentencepiece
    monkeypatch.setattr(
        sentencepiece_training, "train_sentencepiece", lambda lines, *rest: seen.extend(lines) or real(lines, *rest)
    )
    mixed("sentencepiece-bpe", exponent)
    assert len(seen) == len(set(seen))
    sizes = [sum(len(line) for line in seen if line.startswith(letter)) for letter in "az"]
    large, small = (sum(map(len, words)) for words in LANGUAGES)
    assert sizes[1] == small, "the small one is used whole"
    assert sizes[1] / sizes[0] == pytest.approx((small / large) ** exponent, rel=0.15)


def test_a_sample_of_one_long_document_has_a_part_of_it(monkeypatch, capsys):
    """A file can be a document, and each language one file."""
    seen = []
    real = sentencepiece_training.train_sentencepiece
    monkeypatch.setattr(
        sentencepiece_training, "train_sentencepiece", lambda lines, *rest: seen.extend(lines) or real(lines, *rest)
    )
    sources = [fake("\n".join(words), spec=spec) for words, spec in zip(LANGUAGES, "az", strict=True)]
    train(recipe("sentencepiece-bpe", sampling_exponent=0.0), sources, workers=1)
    sizes = [sum(len(line) for line in seen if line.startswith(letter)) for letter in "az"]
    assert 0.7 < sizes[0] / sizes[1] < 1.4 and "note" not in capsys.readouterr().err
    with pytest.raises(UserError, match="no words in the text"):
        train(recipe("byte-bpe", sample_bytes=1), [fake("a" * 900, spec="one line")], workers=1)
    assert "note: source one line: no line of it is in the sample; raise --sample-mb" in capsys.readouterr().err


def test_a_sample_is_about_as_large_as_asked_and_always_the_same(monkeypatch):
    words = [f"{i:x}g" for i in range(4000)]
    size = sum(map(len, words))
    seen = []
    monkeypatch.setattr("data_prep.vocabularies.train._from_counts", lambda recipe, counts, _: seen.append(counts))

    def sample(per_block, limit):
        train(recipe("byte-bpe", sample_bytes=limit), [fake(*words, per_block=per_block)], workers=1)
        return [word for word, n in seen.pop().items() if word.startswith("Ġ") for _ in range(n)]

    third = sample(100, size // 3)
    assert len(third) == pytest.approx(len(words) / 3, rel=0.1)
    assert third == sample(77, size // 3)
    assert set(third) < set(sample(100, size // 2))
    assert len(sample(100, size * 2)) == len(words)


def test_a_source_without_text_in_a_mixture():
    sources = [fake(*TEXTS), fake("\u200b", spec="invisible")]
    with pytest.raises(UserError, match="source invisible: cleaning leaves no text"):
        train(recipe("bpe", sampling_exponent=0.7), sources, workers=1)
    assert train(recipe("bpe"), sources, workers=1).vocab_size == SIZES["bpe"]


def test_lines_for_sentencepiece_are_not_too_long():
    cut = sentencepiece_training.split_lines
    assert cut([["a\nb\n\nc d", ""], [], ["e"]]) == ["a", "b", "c d", "e"]
    spaced = "wörd " * 3000
    parts = cut([[spaced]])
    assert "".join(parts) == spaced and all(part.endswith("wörd ") for part in parts)
    assert max(len(part.encode()) for part in parts) <= sentencepiece_training.MAX_LINE_BYTES
    solid = "語" * 5000
    parts = cut([[solid]])
    assert "".join(parts) == solid and len(parts) == 4
