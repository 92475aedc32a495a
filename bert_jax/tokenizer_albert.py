"""What ALBERT does to text in front of its SentencePiece model; the model's file does not say it."""

import functools
import json
from typing import Any, NamedTuple

import tokenizers
from etils import epath
from tokenizers import normalizers

from bert_jax.errors import UserError


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


def preparation_beside(path: epath.Path) -> Preparation | None:
    """What the directory of a SentencePiece .model says; None where the model is not an ALBERT's.

    It is one if config.json has model_type albert, tokenizer_config.json an AlbertTokenizer, or an albert_config.json
    (google-research/albert) lies there.

    Raises:
      UserError: one of these files is no JSON object.
    """
    config, settings = (_settings(path.parent / name) for name in ("config.json", "tokenizer_config.json"))
    tokenizer_class = str(settings.get("tokenizer_class") or "")
    is_albert = (
        tokenizer_class.startswith("AlbertTokenizer")
        or (not tokenizer_class and config.get("model_type") == "albert")
        or (path.parent / "albert_config.json").exists()
    )
    if not is_albert:
        return None
    return Preparation(bool(settings.get("do_lower_case", True)), bool(settings.get("keep_accents", False)))


def _settings(path: epath.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object; copy it again")
    return found
