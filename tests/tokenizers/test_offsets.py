"""The characters that each token comes from, for every kind of tokenizer: they cut an answer out of its context."""

import itertools

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bert_jax.finetune import squad
from bert_jax.tokenizers.kinds import AlbertPreprocessing, byte_alphabet
from bert_jax.tokenizers.models import TokenizersBackend
from bert_jax.tokenizers.sentencepiece_backend import SentencePieceBackend
from bert_jax.tokenizers.tokenizer import Tokenizer, byte_bpe, char_bpe, sentencepiece, wordpiece
from tests.tokenizers.test_tokenizer import BERT_IDS, LINES, ROBERTA, SPECIALS, train

TEXTS = [
    "Het schip voer naar Amsterdam. De kapitein (Jansen) zweeg!",
    "  Zoe\u0308 dronk cafe\u0301 in A\u030angstro\u0308m",  # decomposed accents, spaces before the text
    "😀 smile👩‍💻 ❤️ 東京 京都 Tokyo",
    "\u200fשלום \ufeffAnna\u200b Berg\u00ad \u00a0x İzmir ﬁne",  # characters that normalisation deletes or expands
    "n\u0304\u0301 \u0301a हिन्दी ภาษาไทย\tco\u0301\u0302te\u0301 ``quoted''",
]
LETTERS = sorted({character for text in TEXTS for character in text.lower() + text if not character.isspace()})


def late_bytes():
    """Spaces are removed before ByteLevel adds one to each word, so that a token has a mark without a space."""
    vocabulary = {piece: i for i, piece in enumerate([*ROBERTA, *byte_alphabet()])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Punctuation()]
    )
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    return Tokenizer(TokenizersBackend(library, "test"))


def unigram():
    pieces = [(name, 0.0) for name in ROBERTA] + [(piece, -3.0) for piece in ["▁", *LETTERS]]
    library = tokenizers.Tokenizer(models.Unigram(pieces, 3))
    library.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(TokenizersBackend(library, "test"))


def bytes_of(prefix_space):
    vocabulary = {piece: i for i, piece in enumerate([*ROBERTA, *byte_alphabet()])}
    return byte_bpe(vocabulary, [], False, prefix_space=prefix_space, origin="test")


def small_model(model_type="unigram"):
    return train(LINES + TEXTS, model_type, **BERT_IDS, vocab_size=150)


def pieces_of_bert():
    return [*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]


KINDS = {
    "WordPiece": lambda: wordpiece(pieces_of_bert(), True, "test"),
    "cased WordPiece": lambda: wordpiece(pieces_of_bert(), False, "test"),
    "BPE": lambda: char_bpe([*SPECIALS, "▁", *LETTERS], [], True, "test"),
    "bytes": lambda: bytes_of(True),
    "bytes without a space before the text": lambda: bytes_of(False),
    "bytes of words": late_bytes,
    "Unigram": unigram,
    "SentencePiece unigram": lambda: sentencepiece(small_model(), "test"),
    "SentencePiece BPE": lambda: sentencepiece(small_model("bpe"), "test"),
    "SentencePiece bytes": lambda: sentencepiece(train(LINES, **BERT_IDS, vocab_size=400, byte_fallback=True), "test"),
    "ALBERT": lambda: Tokenizer(SentencePieceBackend(small_model(), "test", AlbertPreprocessing())),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_is_cut_out_of_its_context(tokenizer, text):
    """Every word, and every two words with what is between them."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert len(ids) == len(offsets) and ids == tokenizer.encode(text)
    assert (offsets[:, 0] <= offsets[:, 1]).all() and offsets.min() >= 0 and offsets.max() <= len(text)
    words = text.split()
    answers = words + [text[text.index(a) : text.index(b) + len(b)] for a, b in itertools.pairwise(words)]
    window = squad.windows(0, 1, len(ids), len(ids) + 4, 1)[0]
    for answer in answers:
        first, last = squad.answer_positions(window, offsets, answer, text.index(answer))
        assert first > 0, answer
        starts, ends = np.zeros((2, len(ids) + 4))
        starts[first] = ends[last] = 5.0
        ranked, _ = squad.best_answers([window], [starts], [ends], text, offsets, max_answer_tokens=100)
        assert ranked[0].text == answer
