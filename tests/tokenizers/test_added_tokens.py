"""Added tokens are matched as the `tokenizers` library matches them; control tokens are plain text in corpora."""

import json
import pickle
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from bert_jax.finetune.encoding import encode_examples
from bert_jax.finetune.tables import Example
from bert_jax.tokenizers import kinds, trimming
from bert_jax.tokenizers.tokenizer import Tokenizer, sentencepiece
from tests.tokenizers.test_tokenizer import BERT_IDS, LINES, train

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MARKERS = ["<e1>", "</e1>", "covid-19", "River", "the r", "é!", "##s", "[E]"]
WORDS = ["the", "river", "stone", "s", "É", "é", "!", ",", " ", "  ", "\t", "COVID-19", "covid", "<E1>"]


def wordpiece_library() -> tokenizers.Tokenizer:
    letters = sorted(set("theriversnoéc!,-<>/[]1d9"))
    pieces = [*kinds.SPECIAL_TOKENS, *letters, *(f"##{c}" for c in letters), "the", "river", "##s"]
    return kinds.wordpiece(list(dict.fromkeys(pieces)), True, "test")


def byte_library() -> tokenizers.Tokenizer:
    pieces = [*kinds.BYTE_SPECIAL_TOKENS[:4], *kinds.byte_alphabet(), "he", "Ġt", "<mask>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return kinds.byte_bpe(vocab, [("h", "e"), ("Ġ", "t")], False, prefix_space=False)


def unigram_library() -> tokenizers.Tokenizer:
    """With control tokens that the file does not add, as a trainer of the library leaves them."""
    pieces = [*kinds.BYTE_SPECIAL_TOKENS[:4], "▁", *dict.fromkeys("theriversn!,<>/1"), "▁the", "<mask>"]
    library = tokenizers.Tokenizer(models.Unigram([(piece, -1.0 - len(piece) % 3) for piece in pieces], 3))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    return library


KINDS = {"wordpiece": wordpiece_library, "byte-bpe": byte_library, "unigram": unigram_library}


def random_case(kind: str, seed: int) -> tuple[tokenizers.Tokenizer, Tokenizer, list[str]]:
    """A library's tokenizer with random added tokens, the same here, and texts with all of its tokens."""
    rng = random.Random(seed)
    library = KINDS[kind]()
    for marker in rng.sample(MARKERS, 4):
        library.add_tokens([AddedToken(marker, **{flag: rng.random() < 0.5 for flag in FLAGS})])
    tokenizer = Tokenizer.from_json(library.to_str(), "test")
    parts = [*tokenizer.added_tokens, *WORDS]
    texts = ["".join(rng.choices(parts, k=rng.randint(1, 12))) for _ in range(60)]
    return library, tokenizer, texts


def flat(encoded) -> list[list[int]]:
    ids, lengths = encoded
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys(kind, seed):
    library, tokenizer, texts = random_case(kind, seed)
    if kind == "unigram":  # the classes of transformers add what a file does not add
        library.add_special_tokens(kinds.to_added_tokens(kinds.BYTE_SPECIAL_TOKENS, is_wordpiece=False))
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.encode_batch(texts) == expected == flat(tokenizer.encode_flat(texts))
    assert [ids for ids, _ in tokenizer.encode_with_word_ids(texts)] == expected
    assert [tokenizer.encode_with_offsets(text)[0] for text in texts] == expected
    assert flat(pickle.loads(pickle.dumps(tokenizer)).encode_flat(texts)) == expected
    examples = encode_examples([Example((text,), 0) for text in texts], tokenizer, 500, 2)
    assert [ids.tolist()[1:-1] for ids in np.split(examples.input_ids, examples.starts[1:-1])] == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_corpus_only_control_tokens_are_plain_text(kind, seed):
    library, tokenizer, texts = random_case(kind, seed)
    control = [tokenizer.id_to_token(i) for i in tokenizer.special_ids]
    found = flat(tokenizer.encode_corpus(texts))
    forbidden = set(tokenizer.special_ids) - {tokenizer.unk_id}
    assert forbidden.isdisjoint(i for ids in found for i in ids)
    without = [text for text in texts if not any(token in text for token in control)]
    assert len(without) > 5
    kept = [ids for text, ids in zip(texts, found, strict=True) if text in without]
    assert kept == [library.encode(text, add_special_tokens=False).ids for text in without]
    added = [token.content for token in library.get_added_tokens_decoder().values() if token.content not in control]
    spaced = [f"s {token} s" for token in added]
    for token, ids in zip(added, flat(tokenizer.encode_corpus(spaced)), strict=True):
        assert tokenizer.token_to_id(token) in ids, token


def test_a_text_without_added_tokens_does_not_go_to_the_library():
    """It would take 40 times as long."""
    library = wordpiece_library()
    library.add_tokens(["<e1>", "covid-19"])
    tokenizer = Tokenizer.from_json(library.to_str(), "test")
    plain, marked = ["the river [no token] <e >", "c vd-1"], "the [MASK]"
    tokenizer.encode_flat([*plain, marked])
    fast, seen = tokenizer._fast("library"), []

    class Library:
        def encode_batch_fast(self, sentences, **options):
            seen.extend(sentences)
            return library.encode_batch_fast(sentences, **options)

    library, fast._backend = fast._backend, Library()
    assert flat(tokenizer.encode_flat([*plain, marked])) == tokenizer.encode_batch([*plain, marked])
    assert seen == [marked]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_changes_the_fingerprint(flag):
    fingerprints = set()
    for value in (False, True):
        library = wordpiece_library()
        library.add_tokens([AddedToken("<e1>", **{flag: value})])
        fingerprints.add(Tokenizer.from_json(library.to_str(), "test").fingerprint)
    without = Tokenizer.from_json(wordpiece_library().to_str(), "test").fingerprint
    assert len(fingerprints | {without}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_trimmed_vocabulary_keeps_added_tokens(kind):
    _, tokenizer, texts = random_case(kind, 1)
    used = np.unique(np.concatenate([tokenizer.encode_flat(texts)[0], tokenizer.encode_corpus(texts)[0]]))
    smaller, kept = trimming.trim(tokenizer, used, "test")
    assert smaller.added_tokens == tokenizer.added_tokens
    assert [kept[ids].tolist() for ids in smaller.encode_batch(texts)] == tokenizer.encode_batch(texts)
    assert [kept[ids].tolist() for ids in flat(smaller.encode_corpus(texts))] == flat(tokenizer.encode_corpus(texts))


def test_symbols_of_a_sentencepiece_model():
    """As in AlbertTokenizer: control and user-defined symbols are matched, and a word begins after them."""
    model = train(LINES, **BERT_IDS | {"user_defined_symbols": ["<e1>"]})
    tokenizer = sentencepiece(model, "test")
    assert tokenizer.added_tokens == (*kinds.SPECIAL_TOKENS, "<e1>")
    marker, the, river = tokenizer.token_to_id("<e1>"), tokenizer.encode("the"), tokenizer.encode("river")
    assert tokenizer.encode("the<e1> river[SEP]the") == [*the, marker, *river, tokenizer.sep_id, *the]
    (ids,) = flat(tokenizer.encode_corpus(["the<e1> river[SEP]the"]))
    assert ids[: len(the) + 1 + len(river)] == [*the, marker, *river] and tokenizer.sep_id not in ids
    ids, offsets = tokenizer.encode_with_offsets("the<e1> river[SEP]the")
    assert offsets[ids.index(marker)].tolist() == [3, 7] and offsets[ids.index(tokenizer.sep_id)].tolist() == [13, 18]


def write_vocabulary(directory, **settings):
    (directory / "vocab.txt").write_text("\n".join([*kinds.SPECIAL_TOKENS, "a", "b", "ab", "##b", "##a"]))
    (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True} | settings))
    return directory


DECODER = {"7": {"content": "ab", "special": False, "normalized": True, "single_word": False}}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [5, 9, 8]),
        ({"additional_special_tokens": ["ab"]}, [5, 7]),
        ({"extra_special_tokens": {"image_token": "ab"}}, [5, 7]),
        ({"additional_special_tokens": [{"content": "ab", "single_word": True}]}, [5, 9, 8]),
        ({"added_tokens_decoder": DECODER}, [5, 7]),
        ({"added_tokens_decoder": {"7": DECODER["7"] | {"single_word": True}}}, [5, 9, 8]),
    ],
)
def test_tokens_that_the_settings_add_to_a_vocabulary(tmp_path, settings, expected):
    """The text "aab" is "a", "##a", "##b" without them."""
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path, **settings))
    assert tokenizer.encode("aab") == Tokenizer.from_json(tokenizer.to_json(), "again").encode("aab") == expected
    assert tokenizer.encode("ab") == [7] and tokenizer.encode("[MASK]") == [4]
