"""Ids are compared with the library's, over a vocabulary that holds what depends on its neighbours."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from bert_jax.tokenizers import wordpiece
from bert_jax.tokenizers.wordpiece import FastWordPiece

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Spacing marks that survive accent stripping and whose combining classes are 224 and 9.
TONE, KILLER = "\u302e", "\u1b44"
LETTERS = "abcdeixéΣσςßİıǰकि\u0301\u0334\u1112\u1161\u11ab한力豈𝔞\ue000\x00\xad" + TONE + KILLER
WORDS = "the ing abc abcd bcd xa xab cabbage cabbages ##age [ ] ! ; # [MASK] mask"
ADDED_TEXTS = ["abC-d", "abC", "İxé", "[E]", "[E]x", "x", "b", "de", "b 力d"]
OTHERS = "\u0345\u093c\u200d\u0660\u2028\x85\xa0\t\r\n ÿ≠\u037e。"


def make(lowercase=True, prefix="##", limit=100, added=(), plain=True, **options) -> tokenizers.Tokenizer:
    """A tokenizer of the library; a limit is in characters per word."""
    inner = [*LETTERS, *"[]#!", "ing", "bc", "abbage", "s", TONE + KILLER, KILLER + TONE]
    pieces = list(dict.fromkeys([*LETTERS, *WORDS.split(), *(prefix + piece for piece in inner), *SPECIALS]))
    vocab = {piece: i for i, piece in enumerate(reversed(pieces))}
    model = models.WordPiece(vocab, unk_token="[UNK]", continuing_subword_prefix=prefix, max_input_chars_per_word=limit)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(**{"lowercase": lowercase, "strip_accents": None} | options)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(list(added))
    backend.encode_special_tokens = plain
    return backend


def expected(backend, sentences):
    return [encoding.ids for encoding in backend.encode_batch_fast(sentences, add_special_tokens=False)]


def divided(ids, lengths):
    assert (ids.dtype, lengths.dtype) == (np.uint32, np.int64)
    assert len(ids) == lengths.sum()
    stops = np.cumsum(lengths)
    return [ids[stop - length : stop].tolist() for stop, length in zip(stops, lengths, strict=True)]


ADDED = [
    AddedToken("abC-d"),
    AddedToken("abC", normalized=False),
    AddedToken("İxé", single_word=True),
    AddedToken("[E]", lstrip=True, special=True),
    AddedToken("[E]x", rstrip=True),
    AddedToken("b 力d"),
    AddedToken("de", single_word=True, lstrip=True, rstrip=True),
    AddedToken("!", normalized=False),
]
"""With parts of each other, upper case, accents and spaces; some alone, some with spaces around."""


class Spy:
    """Stands for the library and notes which sentences it is given."""

    def __init__(self, backend):
        self.backend, self.seen = backend, []

    def encode_batch_fast(self, sentences, **options):
        self.seen += sentences
        return self.backend.encode_batch_fast(sentences, **options)


BACKENDS = [
    make(),
    make(lowercase=False),
    make(lowercase=False, strip_accents=True),
    make(strip_accents=False, handle_chinese_chars=False),
    make(clean_text=False),
    make(prefix=""),
    make(prefix="x", limit=3),
    make(limit=0),
    make(plain=False),
    make(lowercase=False, added=ADDED),
    make(plain=False, added=ADDED),
]
FAST = [FastWordPiece.from_tokenizer(backend) for backend in BACKENDS]
characters = st.sampled_from([*LETTERS, *OTHERS, *WORDS.split(), *ADDED_TEXTS]) | st.characters(
    exclude_categories=["Cs"]
)
texts = st.lists(characters, max_size=30).map("".join) | st.text("abcdeing", max_size=12)


@pytest.mark.parametrize("which", range(len(BACKENDS)))
@settings(deadline=None, max_examples=75)
@given(sentences=st.lists(texts, max_size=5))
@example(sentences=["the [MASK]", "", "cabbages!abcd", " \n", "bcde\ncab"])
@example(sentences=["ÿ" * 3, "a" + TONE + KILLER, "한글 a", "a" + KILLER + "\u0301" + TONE])
def test_ids_are_the_librarys(which, sentences):
    assert divided(*FAST[which].encode_flat(sentences)) == expected(BACKENDS[which], sentences)


def test_the_options_matter():
    sentence = ["Áa力a \xadX한 cabbages" + TONE + KILLER + "[MASK] [E]xabC"]
    seen = {str(expected(backend, sentence)) for backend in BACKENDS}
    assert len(seen) == len(BACKENDS)


def test_pieces_and_unknown_words():
    backend = make()
    ids, lengths = FastWordPiece.from_tokenizer(backend).encode_flat(["Cabbages, the [MASK]", "", "q aq"])
    unknown = "[UNK]"
    pieces = ["cabbages", unknown, "the", "[", "mask", "]", unknown, unknown]
    assert [backend.id_to_token(i) for i in ids] == pieces
    assert lengths.tolist() == [6, 0, 2]
    ids, lengths = FAST[0].encode_flat([])
    assert ids.shape == lengths.shape == (0,)


def test_words_at_the_limit():
    """Of 100 characters after normalization."""
    for character in ["a", "é", "e\u0301", "力", "İ", "\u0958", "a\x00", "a\ufffd"]:
        sentences = [f"{character * size}the {character * size}! {character}" for size in (33, 34, 99, 100, 101)]
        sentences += [character * size for size in (33, 34, 99, 100, 101)]
        for backend, fast in zip(BACKENDS[:2], FAST[:2], strict=True):
            assert divided(*fast.encode_flat(sentences)) == expected(backend, sentences), character
    unknown = [BACKENDS[0].token_to_id("[UNK]")]
    # A syllable decomposes into three characters; an accent is stripped.
    assert divided(*FAST[0].encode_flat(["한" * 33, "한" * 34]))[1] == unknown
    assert len(FAST[0].encode_flat(["한" * 33])[0]) == 99
    assert len(FAST[0].encode_flat(["e\u0301" * 100])[0]) == 100
    assert FAST[1].encode_flat(["e\u0301" * 100])[0].tolist() == [BACKENDS[1].token_to_id("[UNK]")]


def test_only_sentences_whose_marks_may_change_places_go_to_the_library():
    fast = FastWordPiece.from_tokenizer(BACKENDS[0])
    moving = ["a" + TONE + KILLER + "b", "a" + TONE + "\u0301" + KILLER]
    # "abc" puts its mark where the sentence before it had one.
    apart = ["abc" + TONE, "a" + TONE + "b" + KILLER, "a" + TONE, TONE + " " + KILLER, "the"]
    sentences = [moving[0], *apart, moving[1], "abc"]
    fast.encode_flat(sentences)
    fast._backend = spy = Spy(BACKENDS[0])
    assert divided(*fast.encode_flat(sentences)) == expected(BACKENDS[0], sentences)
    assert spy.seen == moving
    turned = "a" + KILLER + TONE + "b"
    assert expected(BACKENDS[0], moving[:1]) == expected(BACKENDS[0], [turned]), "the library no longer reorders"
    assert expected(BACKENDS[1], moving[:1]) != expected(BACKENDS[1], [turned])


def test_a_character_of_no_known_kind_goes_to_the_library():
    fast = FastWordPiece.from_tokenizer(BACKENDS[0])
    fast._table[ord("b")] = wordpiece._FOREIGN << wordpiece._KIND
    fast._backend = spy = Spy(BACKENDS[0])
    sentences = ["abc the", "the", "b", "c"]
    assert divided(*fast.encode_flat(sentences)) == expected(BACKENDS[0], sentences)
    assert spy.seen == ["abc the", "b"]


@pytest.mark.parametrize("becomes", [" ab ", "a b", "a!", "!!", "abcd", "aaa", " " + TONE + " "])
def test_what_is_no_known_kind(becomes):
    """None of these is made of one character today, "aaa" being more symbols than "é" has bytes."""
    fast = FastWordPiece.from_tokenizer(BACKENDS[0])
    real = BACKENDS[0]
    normalizer = SimpleNamespace(normalize_str=lambda character: becomes)
    fast._backend = SimpleNamespace(pre_tokenizer=real.pre_tokenizer, model=real.model)
    fast._normalizer = normalizer
    assert fast._entry("é") >> wordpiece._KIND == wordpiece._FOREIGN


def test_a_hash_alone_is_no_match():
    backend, fast = BACKENDS[0], FAST[0]

    def find(text, word, start=0, twist=0):
        running = np.uint64(0)
        for character in text:
            running = np.uint64(wordpiece._push(running, fast._symbols[character]))
        symbols = np.array([fast._symbols[character] for character in word], np.uint16)
        return wordpiece._find(fast._pieces, running ^ np.uint64(twist), symbols, start, len(symbols))

    assert find("abc", "abc") == backend.token_to_id("abc")
    assert find("bc", "abc", start=1) == backend.token_to_id("##bc")
    assert find("abc", "abd") == find("abc", "ab") == find("abc", "abcd") == -1
    assert find("abc", "eabc", start=1, twist=wordpiece._REST) == -1, "a word's beginning inside a word"


def test_half_a_surrogate_pair_is_an_error():
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        FAST[0].encode_flat(["a", "b\ud800"])


def test_threads_and_processes_may_share_one():
    fast = FastWordPiece.from_tokenizer(BACKENDS[0])
    batches = [["".join(map(chr, range(start, start + 300))), "the 한 [MASK]"] for start in range(0x100, 0xC00, 50)]
    expected_ids = [expected(BACKENDS[0], batch) for batch in batches]
    for each in (fast, pickle.loads(pickle.dumps(fast))):
        with ThreadPoolExecutor(4) as pool:
            assert [divided(*result) for result in pool.map(each.encode_flat, batches)] == expected_ids


UNSUPPORTED = [
    lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
    lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.BertNormalizer()])),
    lambda backend: setattr(backend, "normalizer", None),
    lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Whitespace()),
    lambda backend: setattr(backend, "pre_tokenizer", None),
    lambda backend: setattr(backend, "model", models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    lambda backend: setattr(backend, "model", models.WordPiece({"a": 0}, unk_token="[UNK]")),
    lambda backend: backend.enable_truncation(8),
    lambda backend: backend.enable_padding(),
    lambda backend: backend.add_tokens([AddedToken("\x00")]),
    lambda backend: backend.add_tokens([AddedToken("a" + TONE)]),
]


def test_what_is_left_to_the_library():
    """Other kinds of tokenizers, and more characters than symbols."""
    for change in UNSUPPORTED:
        backend = make()
        change(backend)
        assert FastWordPiece.from_tokenizer(backend) is None
    alphabet = [chr(code) for code in range(0x10000, 0x10000 + 0xFFFF)]
    for extra, known in (([], True), (["a"], False)):
        # The letters of [UNK] count too.
        pieces = ["[UNK]", *alphabet[len(set("[UNK]")) :], *extra]
        backend = make()
        backend.model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
        assert (FastWordPiece.from_tokenizer(backend) is not None) == known


@pytest.mark.skipif("BERT_JAX_SHARED_DATA" not in os.environ, reason="needs the published vocabularies and text")
@pytest.mark.parametrize("case", ["uncased", "cased"])
def test_published_vocabularies(case):
    data = Path(os.environ["BERT_JAX_SHARED_DATA"])
    backend = make(lowercase=case == "uncased")
    backend.model = models.WordPiece.from_file(str(data / "vocab" / f"bert_base_{case}_vocab.txt"), unk_token="[UNK]")
    fast = FastWordPiece.from_tokenizer(backend)
    for path in sorted((data / "wikipedia_sample").glob("wiki_*")):
        sentences = path.read_text().split("\n")
        assert divided(*fast.encode_flat(sentences)) == expected(backend, sentences)
