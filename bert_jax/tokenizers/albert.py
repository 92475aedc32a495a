"""ALBERT's text preprocessing before SentencePiece, which the .model file does not describe."""

import functools
from typing import NamedTuple

import tokenizers
from tokenizers import normalizers


class AlbertPreprocessing(NamedTuple):
    """Replaces quotes `` and '' by ", removes compatibility forms and accents, and lower-cases.

    The same as `AlbertTokenizer` of transformers 5. google-research/albert tokenization.py has the same steps, but also
    splits a piece of digits and a comma again, which transformers' compiled tokenizer never did, and keeps marks of
    combining class 0.
    """

    lowercase: bool = True
    """do_lower_case in transformers."""
    keep_accents: bool = False

    def __call__(self, text: str) -> str:
        """Preprocess a text."""
        return _normalizer(self).normalize_str(text)


@functools.lru_cache(maxsize=4)
def _normalizer(preprocessing: AlbertPreprocessing) -> tokenizers.normalizers.Normalizer:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not preprocessing.keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if preprocessing.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)
