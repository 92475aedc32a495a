"""The cleaning of corpora as steps of a trained tokenizer, so that every program that loads it cleans texts, too.

Without it, no-break spaces, soft hyphens and decomposed characters become pieces that no corpus has.
"""

import json
import unicodedata

import tokenizers
from tokenizers import models, normalizers

INVISIBLE = (
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffd\ud800-\udfff]"
)
"""Control, format and surrogate characters without text, which cleaning removes."""
_SURROGATES = "\ud800-\udfff"


def with_cleaning(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with cleaning as the first steps of its normalizer.

    A BertNormalizer that strips accents decomposes characters and removes control and format characters itself. It is
    not changed, so that a vocab.txt describes the tokenizer; it joins words that a form feed separates.
    """
    before = library.normalizer
    if isinstance(before, normalizers.BertNormalizer):
        steps = [] if before.strip_accents else _bert_steps()
    else:
        steps = [
            normalizers.Replace(tokenizers.Regex(INVISIBLE.replace(_SURROGATES, "")), ""),
            normalizers.NFC(),
            normalizers.Replace(tokenizers.Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    if steps:
        library.normalizer = normalizers.Sequence([*steps, *([] if before is None else [before])])
    return library


def _bert_steps() -> list[normalizers.Normalizer]:
    """For a BertNormalizer that keeps accents: characters that end a line, invisible ones, composition."""
    removes = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
    )
    return [normalizers.Replace(tokenizers.Regex("[\x0b\x0c\x85]"), " "), removes, normalizers.NFC()]


def last_step(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer | None:
    """The last step of a sequence, or the normalizer itself."""
    return normalizer[len(normalizer) - 1] if isinstance(normalizer, normalizers.Sequence) else normalizer


def is_bert_cleaning(library: tokenizers.Tokenizer) -> bool:
    """Whether the steps before the last one are those of `with_cleaning` for a BertNormalizer."""
    expected = tokenizers.Tokenizer(models.WordPiece())
    expected.normalizer = normalizers.Sequence([*_bert_steps(), last_step(library.normalizer)])
    return json.loads(expected.to_str())["normalizer"] == json.loads(library.to_str())["normalizer"]


class BertCleaning:
    """The steps before a BertNormalizer that keeps accents, as a function of one text.

    Texts of corpora are clean, which is found faster than the library cleans them.
    """

    def __init__(self):
        self._steps = normalizers.Sequence(_bert_steps())

    def __call__(self, text: str) -> str:
        """Cleans a text; white space may stay as it is, because BertNormalizer makes all of it a space."""
        # BERT removes these: joiners, which corpora keep, and U+FFFD, which is printable.
        joined = text.replace("\u200c", "").replace("\u200d", "").replace("\ufffd", "")
        # Printable: without control, format, private and unassigned characters, and with no white space but spaces.
        if joined.isprintable() and (joined.isascii() or unicodedata.is_normalized("NFC", joined)):
            return joined
        return self._steps.normalize_str(text)
