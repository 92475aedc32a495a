"""Tokenizers beside a converted model: put there, and compared with what they came from."""

import json
from pathlib import Path

from bert_jax.convert import transformers_forward
from bert_jax.convert.contents import Contents
from bert_jax.convert.parity import TokenizerAgreement, tokenizer_agreement
from bert_jax.convert.sample_texts import TEXTS
from bert_jax.tokenizer import Tokenizer


def put(contents: Contents, directory: Path) -> None:
    """Write the tokenizer of the contents, if they have one, in the files that its family has."""
    if contents.tokenizer is None:
        return
    tokenizer = Tokenizer.load(contents.tokenizer)
    tokenizer.save(directory / "tokenizer.json")
    tokenizer.save_vocab(directory / "vocab.txt")
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.lowercase,
        "model_max_length": contents.model.config.max_positions,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def agreement(tokenizer: Tokenizer, directory: Path) -> TokenizerAgreement:
    """How what was written cuts the sample texts, by transformers where it is installed, beside the original."""
    if transformers_forward.available() and (directory / "tokenizer_config.json").exists():
        import transformers

        written = transformers.AutoTokenizer.from_pretrained(directory)
        return tokenizer_agreement(tokenizer.encode, lambda text: written.encode(text, add_special_tokens=False), TEXTS)
    return tokenizer_agreement(tokenizer.encode, Tokenizer.load(directory).encode, TEXTS)
