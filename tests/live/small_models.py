"""Small random models of transformers' own classes, with tokenizers that fit them, as transformers saves them."""

import json
from pathlib import Path

import pytest
from etils import epath

from bert_jax.convert import tokenizer_files
from bert_jax.tokenizers.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.fixtures import WORDS, make_documents
from tests.golden import make_families

BESIDE_TRANSFORMERS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
"""Marks of tests that import transformers: warnings inside of torch and transformers are not errors."""
CLASSES = {
    "bert": "BertForPreTraining",
    "roberta": "RobertaForMaskedLM",
    "xlm-roberta": "XLMRobertaForMaskedLM",
    "camembert": "CamembertForMaskedLM",
    "albert": "AlbertForPreTraining",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForPreTraining",
    "modernbert": "ModernBertForMaskedLM",
    "mobilebert": "MobileBertForPreTraining",
}


def wordpiece(directory: Path) -> Tokenizer:
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), *WORDS[2:]]
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in dict.fromkeys(pieces)))
    return Tokenizer.load(directory)


def byte_bpe(directory: Path) -> Tokenizer:
    """With the ids of RoBERTa's special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ t", "h e", "Ġt he", "i n", "Ġ s", "e r"]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *sorted(ByteLevel.alphabet())]
    pieces += [merge.replace(" ", "") for merge in merges] + ["<mask>"]
    (directory / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return Tokenizer.load(directory)


def unigram(directory: Path) -> Tokenizer:
    from data_prep.cli import main

    (directory / "text.txt").write_text("\n".join(make_documents(0, 60)))
    out, source = directory / "tokenizer.json", f"lines:{directory / 'text.txt'}"
    command = ["tokenizer", "--source", source, "--kind", "sentencepiece-unigram", "--vocab-size", "60"]
    assert main.main([*command, "--out", str(out)]) == 0
    return Tokenizer.load(out)


KINDS = {"roberta": byte_bpe, "modernbert": byte_bpe, "albert": unigram, "xlm-roberta": byte_bpe, "camembert": byte_bpe}
"""Other families: wordpiece."""


def save(family: str, directory: Path, scratch: Path) -> object:
    """Write a model and its tokenizer into `directory`; returns the model."""
    tokenizer = KINDS.get(family, wordpiece)(scratch)
    first, last = tokenizer.cls_id, tokenizer.sep_id
    ids = {"pad_token_id": tokenizer.pad_id}
    if family not in ("bert", "distilbert", "electra", "mobilebert"):
        ids |= {"bos_token_id": first, "cls_token_id": first, "eos_token_id": last, "sep_token_id": last}
    # Two more rows than tokens, as padded vocabularies have them.
    model = make_families.make(CLASSES[family], 0, vocab_size=tokenizer.vocab_size + 2, **ids)
    model.save_pretrained(directory)
    positions = make_families.BERT["max_position_embeddings"]
    tokenizer_files.write_tokenizer_files(tokenizer, epath.Path(directory), family, positions)
    return model
