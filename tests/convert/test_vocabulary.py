"""Padded vocabularies: rows are removed from every table at once, with the same predictions."""

import numpy as np
import pytest

from bert_jax.convert.formats.format import trim_vocabulary
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.tensors import LazyTensor, LazyTensors
from bert_jax.errors import UserError

NAMES = {
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight", "cls.predictions.bias"),
    "bert, both biases": (
        *("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        *("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    "roberta": (
        *("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        *("lm_head.bias", "lm_head.decoder.bias"),
    ),
    "albert": (
        *("albert.embeddings.word_embeddings.weight", "predictions.decoder.weight"),
        *("predictions.bias", "predictions.decoder.bias"),
    ),
    "distilbert": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight", "vocab_projector.bias"),
    "electra": ("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight", "generator_lm_head.bias"),
    "modernbert": ("model.embeddings.tok_embeddings.weight", "decoder.weight", "decoder.bias"),
    "bert, encoder alone": ("embeddings.word_embeddings.weight",),
}
"""What has a row for each token, by family (transformers 5.23 modeling_*.py)."""
OTHERS = {
    "bert.embeddings.position_embeddings.weight": (13, 4),
    "bert.embeddings.token_type_embeddings.weight": (13, 4),
    "cls.predictions.transform.dense.bias": (13,),
    "classifier.bias": (13,),
    "lm_head.dense.bias": (13,),
    "generator_predictions.dense.bias": (13,),
}


def make(family, size=13, dtype=np.float32) -> HuggingFaceModel:
    rng = np.random.default_rng(0)
    names = NAMES[family]
    shapes = {name: (size,) if name.endswith("bias") else (size, 4) for name in names} | OTHERS
    tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return HuggingFaceModel({"model_type": family.partition(",")[0], "vocab_size": size}, tensors, "there")


@pytest.mark.parametrize("family", NAMES)
def test_cut(family):
    hf_model = make(family)
    cut = trim_vocabulary(hf_model, 10)
    assert cut.config == hf_model.config | {"vocab_size": 10} and hf_model.config["vocab_size"] == 13
    assert list(cut.tensors) == list(hf_model.tensors)
    for name, array in hf_model.tensors.items():
        kept = 10 if name in NAMES[family] else 13
        np.testing.assert_array_equal(cut.tensors[name], array[:kept])
        assert cut.tensors.lazy_tensors[name].shape == cut.tensors[name].shape


def test_sizes_that_fit_stay():
    hf_model = make("bert", size=16)
    same = trim_vocabulary(hf_model, 16)
    assert same.config == hf_model.config
    for name, array in hf_model.tensors.items():
        np.testing.assert_array_equal(same.tensors[name], array)


def test_nothing_is_read():
    def read():
        raise AssertionError("read")

    tensors = LazyTensors(
        {name: LazyTensor((13, 4)[: 2 - ("bias" in name)], "float32", read) for name in NAMES["bert"]}
    )
    hf_model = object.__new__(HuggingFaceModel)
    for field, value in (("config", {"model_type": "bert"}), ("tensors", tensors), ("source", "there")):
        object.__setattr__(hf_model, field, value)
    with pytest.raises(UserError, match="has 13 rows, the tokenizer 14 tokens"):
        trim_vocabulary(hf_model, 14)


def test_impossible():
    hf_model = make("bert")
    with pytest.raises(
        UserError, match=r"^there: the word table has 13 rows, the tokenizer 14 tokens: the tokenizer belongs to"
    ):
        trim_vocabulary(hf_model, 14)
    odd = HuggingFaceModel(
        hf_model.config, dict(hf_model.tensors) | {"cls.predictions.bias": np.zeros(12, np.float32)}, "there"
    )
    with pytest.raises(
        UserError, match=r"^there: the vocabulary.s tables differ .*cls\.predictions\.bias 12.*weight 13"
    ):
        trim_vocabulary(odd, 10)
    with pytest.raises(UserError, match="no table of word embeddings"):
        trim_vocabulary(HuggingFaceModel(hf_model.config, {"lm_head.bias": np.zeros(3, np.float32)}, "there"), 10)
