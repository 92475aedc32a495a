"""Tokenizers beside a converted model: put there, and compared with what they came from."""

import tempfile
from pathlib import Path

from bert_jax.convert import tokenizer_files, transformers_forward
from bert_jax.convert.contents import Contents
from bert_jax.convert.parity import TokenizerAgreement, tokenizer_agreement
from bert_jax.convert.sample_texts import TEXTS
from bert_jax.tokenizer import Tokenizer
from bert_jax.tokenizer_sentencepiece import FORMAT

OURS, CONFIG = "tokenizer.json", "tokenizer_config.json"


def put_ours(contents: Contents, directory: Path) -> None:
    """Copy the tokenizer's files; one that hangs on more than they say is written as our tokenizer.json besides."""
    if contents.tokenizer is None:
        return
    tokenizer = Tokenizer.load(contents.tokenizer)
    copied = tokenizer_files.carry(contents.tokenizer.parent, directory)
    if not copied or Tokenizer.load(directory).fingerprint != tokenizer.fingerprint:
        tokenizer.save(directory / OURS)


def put_theirs(contents: Contents, directory: Path) -> None:
    """Copy the tokenizer's files, and make those that transformers needs besides.

    Raises:
      UserError: a tokenizer that transformers has no class for in this family.
    """
    if contents.tokenizer is None:
        return
    tokenizer = Tokenizer.load(contents.tokenizer)
    tokenizer_files.carry(contents.tokenizer.parent, directory)
    copied = directory / OURS
    if copied.exists() and FORMAT in copied.read_text()[:100]:
        copied.unlink()
    with tempfile.TemporaryDirectory(prefix="bert_jax-") as made:
        family, positions = contents.model.family, contents.model.config.max_positions
        for name in tokenizer_files.make(tokenizer, Path(made), family, positions):
            if not (directory / name).exists():
                (directory / name).write_bytes((Path(made) / name).read_bytes())


def agreement(tokenizer: Tokenizer, directory: Path) -> TokenizerAgreement:
    """How what was written cuts the sample texts, by transformers where it is installed, beside the original."""
    if transformers_forward.available() and (directory / CONFIG).exists():
        import transformers

        written = transformers.AutoTokenizer.from_pretrained(directory)
        return tokenizer_agreement(tokenizer.encode, lambda text: written.encode(text, add_special_tokens=False), TEXTS)
    return tokenizer_agreement(tokenizer.encode, Tokenizer.load(directory).encode, TEXTS)
