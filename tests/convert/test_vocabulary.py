"""Padded vocabularies: rows are removed from every table at once, and nothing is read."""

import numpy as np
import pytest

from bert_jax.convert.formats.format import trim_vocabulary
from bert_jax.convert.hf_model import HuggingFaceModel

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
    "mobilebert": (
        *("mobilebert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        *("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
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


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("size", [10, 13, 20])
def test_cut(family, size):
    """The model has 13 rows. Too few stay as they are, and contradict the config."""
    shapes = {name: (13,) if name.endswith("bias") else (13, 4) for name in NAMES[family]} | OTHERS
    tensors = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
    hf_model = HuggingFaceModel({"model_type": family.partition(",")[0], "vocab_size": 13}, tensors, "there")
    cut = trim_vocabulary(hf_model, size)
    assert cut.config == hf_model.config | {"vocab_size": size} and hf_model.config["vocab_size"] == 13
    assert list(cut.tensors) == list(tensors)
    for name, array in tensors.items():
        kept = size if name in NAMES[family] else 13
        np.testing.assert_array_equal(cut.tensors[name], array[:kept])
        assert cut.tensors.lazy_tensors[name].shape == cut.tensors[name].shape


def test_cut_columns():
    """MobileBERT's further columns of the decoder have a column for each token."""
    table, columns = np.zeros((13, 4)), np.random.default_rng(0).normal(size=(3, 13))
    names = "mobilebert.embeddings.word_embeddings.weight", "cls.predictions.dense.weight"
    hf_model = HuggingFaceModel(
        {"model_type": "mobilebert", "vocab_size": 13}, dict(zip(names, (table, columns), strict=True)), "there"
    )
    cut = trim_vocabulary(hf_model, 10)
    np.testing.assert_array_equal(cut.tensors[names[1]], columns[:, :10])
    assert cut.tensors.lazy_tensors[names[1]].shape == (3, 10) and cut.tensors[names[0]].shape == (10, 4)
