"""Removes the padding rows of a vocabulary, which trainers add for sizes that divide evenly.

NVIDIA's BERT pads to a multiple of 8 (DeepLearningExamples PyTorch/LanguageModeling/BERT/run_pretraining.py), Megatron
to a multiple of 128 times the number of tensor-parallel parts.
"""

import dataclasses
import re
from collections.abc import Callable

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import LazyTensor, LazyTensors, lazy_row_slice, to_lazy
from bert_jax.errors import UserError

HEADS = r"(cls\.predictions\.decoder|predictions\.decoder|lm_head\.decoder|vocab_projector|generator_lm_head|decoder)"
TABLES = re.compile(rf"(^|\.)embeddings\.(word|tok)_embeddings\.weight$|^{HEADS}\.weight$")
"""Input and output tables of BERT, RoBERTa, ALBERT, DistilBERT, ELECTRA, ModernBERT (transformers modeling_*.py)."""
BIASES = re.compile(rf"^({HEADS}|cls\.predictions|predictions|lm_head)\.bias$")


def trim_vocabulary(hf_model: HuggingFaceModel, vocab_size: int) -> HuggingFaceModel:
    """Remove the rows after the tokenizer's last token from every table and bias of the vocabulary.

    Hidden states stay the same. Probabilities are then over the tokenizer's tokens only.

    Args:
      hf_model: with at least vocab_size rows.
      vocab_size: number of the tokenizer's tokens.

    Raises:
      UserError: there are fewer rows than tokens, or the tables differ in size.
    """
    num_rows = _num_rows(hf_model)
    if num_rows < vocab_size:
        raise UserError(
            f"{hf_model.source}: the word table has {num_rows} rows, the tokenizer {vocab_size} tokens: "
            "the tokenizer belongs to another model"
        )
    return _changed(hf_model, vocab_size, lambda name, tensor: lazy_row_slice(tensor, 0, vocab_size))


def _num_rows(hf_model: HuggingFaceModel) -> int:
    """Number of rows of the vocabulary's tables and biases, which must all be equal."""
    sizes = {
        name: (*tensor.shape, 0)[0] for name, tensor in to_lazy(hf_model.tensors).items() if _is_vocabulary_tensor(name)
    }
    if not any(TABLES.search(name) for name in sizes):
        raise UserError(f"{hf_model.source}: there is no table of word embeddings")
    if len(set(sizes.values())) != 1:
        sizes_text = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
        raise UserError(f"{hf_model.source}: the vocabulary's tables differ in their number of rows: {sizes_text}")
    return next(iter(sizes.values()))


def _is_vocabulary_tensor(name: str) -> bool:
    return bool(TABLES.search(name) or BIASES.search(name))


def _changed(
    hf_model: HuggingFaceModel, size: int, change: Callable[[str, LazyTensor], LazyTensor]
) -> HuggingFaceModel:
    tensors = {
        name: change(name, tensor) if _is_vocabulary_tensor(name) else tensor
        for name, tensor in to_lazy(hf_model.tensors).items()
    }
    return dataclasses.replace(hf_model, config=hf_model.config | {"vocab_size": size}, tensors=LazyTensors(tensors))
