"""Trained tokenizers clean texts like those of corpora, in our commands and wherever their files are loaded."""

import json
import random
import unicodedata

import pytest
import sentencepiece
import tokenizers

from bert_jax.convert.tokenizer_files import write_tokenizer_files
from bert_jax.tokenizers import wordpiece
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep.clean import clean
from data_prep.vocabularies.train import VocabularySettings, train
from tests.data_prep.fakes import fake

TEXTS = ["Die Größe der Häuser läßt sich schön streiten naïve café. ญี่ปุ่น क़लम ạ́", "Über e x y é dog 力加 don't ǰ İ"] * 3
CHARACTERS = [
    *"aeéüß gJ.,-\n\t\r",
    *"\u00a0\u00ad\u200b\u200c\u200d\u2028\ufeff\u3000\u202a\ufffd\x00\x0b\x0c\x85",
    *"\u0301\u0323\u030c\u0308\u0345\u093c\u094d\u0e34\u0e48",
    *"力豈가\u1100\u1161\u11a8ǄİญकA\U0001f600\ue000\u0378",
]
RECIPES = [("wordpiece", False, None), ("wordpiece", True, False), ("wordpiece", True, None)]
RECIPES += [("bpe", False, None), ("bpe", True, False), ("bpe", True, None), ("byte-bpe", False, None)]


@pytest.fixture(scope="module")
def random_texts():
    rng = random.Random(5)
    texts = ["".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(1, 14))) for _ in range(600)]
    return [*texts, "na\u00efve\u00a0cafe\u0301 zu\u00adsammen\u200bhang"]


@pytest.mark.parametrize(("kind", "lowercase", "strips"), RECIPES)
def test_a_text_has_the_ids_of_the_cleaned_text(kind, lowercase, strips, random_texts, tmp_path):
    tokenizer = train(VocabularySettings(kind, 400, lowercase, strip_accents=strips), [fake(*TEXTS)], 1)
    written = write_tokenizer_files(tokenizer, tmp_path, "roberta" if kind == "byte-bpe" else "bert", 128)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = random_texts
    if strips is None and lowercase:  # BERT's rule: these are control characters, which join what they separate
        texts = [text for text in texts if not set("\x0b\x0c\x85") & set(text)]
    cleaned = [clean(text).replace("\n", " ") for text in texts]
    assert sum(text != one for text, one in zip(texts, cleaned, strict=True)) > len(texts) / 2
    expected = tokenizer.encode_batch(cleaned)
    assert tokenizer.encode_batch(texts) == expected
    assert [exported.encode(text, add_special_tokens=False).ids for text in texts] == expected
    ids, lengths = tokenizer.encode_corpus(texts)
    assert [part.tolist() for part in _split(ids, lengths)] == expected, "the compiled encoder, too"
    assert tokenizer.decode(expected[-1])
    # The classes of transformers that make a normalizer by themselves would lose the cleaning.
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    is_bert = lowercase and strips is None and kind == "wordpiece"
    assert settings["tokenizer_class"] == ("BertTokenizer" if is_bert else "PreTrainedTokenizerFast")
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint and "tokenizer.json" in written


@pytest.mark.parametrize("lowercase", [False, True])
def test_sentencepiece_cleans_by_its_own_rules(lowercase, tmp_path):
    """All but the order of marks and compositions across removed characters, which rules of characters cannot do."""
    tokenizer = train(VocabularySettings("sentencepiece-unigram", 120, lowercase), [fake(*TEXTS)], 1)
    write_tokenizer_files(tokenizer, tmp_path, "albert", 128)
    exported = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    texts = [f"Die {one} Größe {one}naïve" for one in CHARACTERS if one != "\x00" and unicodedata.combining(one) == 0]
    texts += [
        "zu\u00adsammen\u200bhang cafe\u0301 \u1ea1\u0301 \u00e2\u0323 \u0103\u0301 \u00ea\u0300 \u1100\u1161\u11a8"
    ]
    expected = tokenizer.encode_batch([clean(text).replace("\n", " ") for text in texts])
    assert tokenizer.encode_batch(texts) == exported.encode(texts) == expected
    assert tokenizer.lowercase == lowercase


def _split(ids, lengths):
    ends = lengths.cumsum()
    return [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def test_the_compiled_encoder_takes_cleaning_and_no_other_steps():
    tokenizer = train(VocabularySettings("wordpiece", 400, False), [fake(*TEXTS)], 1)
    library = tokenizer._model.corpus_library
    assert wordpiece.FastWordPiece.from_tokenizer(library)
    steps = [library.normalizer[index] for index in range(len(library.normalizer))]
    library.normalizer = tokenizers.normalizers.Sequence(steps[1:])
    assert wordpiece.FastWordPiece.from_tokenizer(library) is None
