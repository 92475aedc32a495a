"""Trains SentencePiece models with the `sentencepiece` library."""

import functools
import io
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece as library
from sentencepiece import sentencepiece_model_pb2

from bert_jax.errors import UserError
from bert_jax.tokenizers.cleaning import INVISIBLE
from bert_jax.tokenizers.kinds import CLS, MASK, PAD, SEP, UNK
from bert_jax.tokenizers.tokenizer import Tokenizer, sentencepiece
from data_prep.clean import LINE_ENDS
from data_prep.vocabularies.wordpiece_bpe import vocab_size_error, warn_if_fewer_pieces

MAX_LINE_BYTES = 4096
"""Longer lines are split: the library skips lines longer than 4192 bytes."""

# As in ALBERT. With the library's default 0.9995, 1 in 640 pieces of English books is unknown; with this 1 in 5,300.
_CHARACTER_COVERAGE = 0.99995
# The sums of the EM algorithm depend, in their last bits, on the number of threads.
_THREADS = 16


def split_lines(blocks: Iterable[list[str]]) -> list[str]:
    """Lines of at most MAX_LINE_BYTES of the texts of blocks; none is empty."""
    return [part for texts in blocks for text in texts for line in text.split("\n") for part in _split_line(line)]


def train_sentencepiece(lines: Sequence[str], model_type: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    """Trains a SentencePiece model: ids 0..4 are [PAD] [UNK] [CLS] [SEP] [MASK], which no text is encoded as.

    Text is normalised by the library's rules (an extended NFKC), and by those of the cleaning of corpora. The rarest
    characters, 1 in 20,000 of the text, become unknown. The same lines give the same model, bit for bit.

    Args:
      lines: at most `MAX_LINE_BYTES` each; all are used and kept in memory.
      model_type: "unigram" or "bpe".
      vocab_size: number of pieces; if the text gives fewer, a note is printed on stderr.
      lowercase: fold case (accents are kept).

    Raises:
      UserError: there is no text, or vocab_size is too small for the characters.
    """
    if not any(line.strip() for line in lines):
        raise UserError("no words in the text; a tokenizer cannot be trained on it")
    model, rules = io.BytesIO(), "nmt_nfkc_cf" if lowercase else "nmt_nfkc"
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            normalization_rule_name=rules,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=PAD,
            unk_piece=UNK,
            bos_piece=CLS,
            eos_piece=SEP,
            control_symbols=[MASK],
            character_coverage=_CHARACTER_COVERAGE,
            shuffle_input_sentence=False,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error)):
            raise vocab_size_error(vocab_size, int(match[1])) from error
        raise
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.normalizer_spec.precompiled_charsmap = _rules_with_cleaning(rules)
    tokenizer = sentencepiece(proto.SerializeToString(deterministic=True), "the trained vocabulary")
    warn_if_fewer_pieces(tokenizer.vocab_size, vocab_size)
    return tokenizer


@functools.lru_cache
def _rules_with_cleaning(name: str) -> bytes:
    """The library's rules of a name, compiled with those of the cleaning of corpora, which come first.

    Corpora, from which the model is trained, are clean: the further rules change the pieces of other texts only.
    Rules map characters, or a composed character and a mark, as in "ê" and a grave accent. They do not order marks,
    nor compose over an invisible character or another mark.
    """
    rules = dict(library.SentencePieceNormalizer(rule_name=name).decompile())
    removed = re.compile(INVISIBLE)
    cleaning = {}
    for character in map(chr, range(1, sys.maxunicode + 1)):  # 0 ends a rule
        if removed.match(character):
            if not "\ud800" <= character <= "\udfff":
                cleaning[character] = ""
            continue
        marks = unicodedata.normalize("NFD", character)
        for i in range(1, len(marks)):
            before = unicodedata.normalize("NFC", marks[:i] + marks[i + 1 :]) + marks[i]
            if unicodedata.normalize("NFC", before) == character:
                cleaning[before] = rules.get(character, character)
    cleaning |= dict.fromkeys(LINE_ENDS, " ")
    spec = library.SentencePieceNormalizer(norm_map=list((rules | cleaning).items())).serialized_normalizer_spec()
    return sentencepiece_model_pb2.NormalizerSpec.FromString(spec).precompiled_charsmap


def _split_line(line: str) -> Iterator[str]:
    """Splits a line after a space if possible, otherwise between two characters."""
    content, start = line.encode(), 0
    while len(content) - start > MAX_LINE_BYTES:
        end = start + MAX_LINE_BYTES
        while content[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        space = content.rfind(b" ", start, end)
        end = space + 1 if space > start else end
        yield content[start:end].decode()
        start = end
    if start < len(content):
        yield content[start:].decode()
