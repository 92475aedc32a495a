"""Tokenizers beside a converted model: put there, and compared with what they came from."""

import tempfile
from pathlib import Path

from bert_jax.convert import tokenizer_files, transformers_forward
from bert_jax.convert.contents import Contents
from bert_jax.convert.parity import TokenizerAgreement, tokenizer_agreement
from bert_jax.convert.sample_texts import TEXTS
from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer
from bert_jax.tokenizer_sentencepiece import FORMAT

OURS, CONFIG = "tokenizer.json", "tokenizer_config.json"


def put_ours(contents: Contents, directory: Path) -> None:
    """Copy the tokenizer's files; one that hangs on more than they say is written as our tokenizer.json besides."""
    tokenizer = contents.loaded_tokenizer
    if tokenizer is None:
        return
    copied = tokenizer_files.carry(contents.tokenizer.parent, directory)
    if not copied or Tokenizer.load(directory).fingerprint != tokenizer.fingerprint:
        tokenizer.save(directory / OURS)


def put_theirs(contents: Contents, directory: Path) -> None:
    """Copy the tokenizer's files, and make those that transformers needs besides.

    Raises:
      UserError: a tokenizer that transformers has no class for in this family.
    """
    tokenizer = contents.loaded_tokenizer
    if tokenizer is None:
        return
    tokenizer_files.carry(contents.tokenizer.parent, directory)
    copied = directory / OURS
    if copied.exists() and FORMAT in copied.read_text()[:100]:
        copied.unlink()
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as made:
        family, positions = contents.model.family, contents.model.config.max_positions
        for name in tokenizer_files.make(tokenizer, Path(made), family, positions):
            if not (directory / name).exists():
                (directory / name).write_bytes((Path(made) / name).read_bytes())


def agreement(tokenizer: Tokenizer, directory: Path, theirs_too: bool) -> TokenizerAgreement:
    """How what was written cuts the sample texts, beside the original.

    Args:
      tokenizer: the original.
      directory: what was written.
      theirs_too: it is for transformers, which then does the cutting, where it is installed.

    Raises:
      UserError: transformers cannot open the tokenizer.
    """
    if theirs_too and transformers_forward.available() and (directory / CONFIG).exists():
        import transformers

        try:
            written = transformers.AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # of whatever kind the damage of its many files happens to raise there
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"transformers cannot open the tokenizer that the source has: {reason}") from error
        return tokenizer_agreement(tokenizer.encode, lambda text: written.encode(text, add_special_tokens=False), TEXTS)
    return tokenizer_agreement(tokenizer.encode, Tokenizer.load(directory).encode, TEXTS)
