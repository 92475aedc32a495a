"""What ALBERT does to text in front of its SentencePiece model; the model's file does not say it."""

import functools
from typing import NamedTuple

import tokenizers
from tokenizers import normalizers


class Preparation(NamedTuple):
    """Quotes written as `` or '' become ", then compatibility forms and accents go, then upper case.

    As `AlbertTokenizer` of transformers 5 does it. google-research/albert tokenization.py has the same steps; besides,
    it cuts a piece of digits and a comma once more, which transformers' compiled tokenizer never did, and keeps marks
    of combining class 0.
    """

    lowercase: bool = True
    """Their do_lower_case."""
    keep_accents: bool = False

    def __call__(self, text: str) -> str:
        """Prepared text."""
        return _normalizer(self).normalize_str(text)


@functools.lru_cache(maxsize=4)
def _normalizer(how: Preparation) -> tokenizers.normalizers.Normalizer:
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not how.keep_accents:
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if how.lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)
