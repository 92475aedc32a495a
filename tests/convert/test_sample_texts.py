"""The batch of the parity report."""

import numpy as np
import pytest

from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity.sample_texts import MAX_ROW_LENGTH, TEXTS, sample_inputs
from bert_jax.tokenizers.tokenizer import Tokenizer, wordpiece

BERT = {"model_type": "bert", "vocab_size": 120, "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0}


def form(**changes) -> HuggingFaceModel:
    return HuggingFaceModel(BERT | changes, {}, "here")


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted({letter for text in TEXTS for letter in text.lower() if not letter.isspace()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    return wordpiece(pieces, None, "letters")


def test_texts_are_many_scripts():
    scripts = {"а": "я", "α": "ω", "א": "ת", "ء": "ي", "अ": "ह", "一": "鿿", "ぁ": "ん", "가": "힣", "ก": "ฮ", "a": "z"}
    for first, last in scripts.items():
        assert any(first <= letter <= last for text in TEXTS for letter in text), first
    assert len(set(TEXTS)) == len(TEXTS) >= 20


def test_rows_of_texts(tokenizer: Tokenizer):
    inputs = sample_inputs(form(vocab_size=tokenizer.vocab_size), tokenizer)
    ids, types, mask = inputs
    lengths = mask.sum(1)
    assert ids.shape == types.shape == mask.shape == (len(TEXTS) + 1, MAX_ROW_LENGTH)
    assert lengths[0] == 1 and lengths.max() == MAX_ROW_LENGTH and len(set(lengths)) > 5
    assert (np.diff(mask, axis=1) <= 0).all()  # padding behind
    assert (ids[:, 0] == tokenizer.cls_id).all() and (ids[mask == 0] == tokenizer.pad_id).all()
    assert not types[mask == 0].any()
    paired = types.any(1)
    assert 5 < paired.sum() < len(TEXTS) / 2
    for row in np.flatnonzero(paired):
        first = int(types[row].argmax())
        assert ids[row, first - 1] == tokenizer.sep_id and (types[row, first : lengths[row]] == 1).all()
    for one, other in zip(inputs, sample_inputs(form(vocab_size=tokenizer.vocab_size), tokenizer), strict=True):
        np.testing.assert_array_equal(one, other)


def test_random_rows():
    ids, types, mask = sample_inputs(form(pad_token_id=7), None)
    assert mask.sum(1).min() == 1 and mask.sum(1).max() == MAX_ROW_LENGTH
    assert (ids[mask == 0] == 7).all() and not (ids[mask == 1] == 7).any()
    assert ids.min() >= 0 and 110 < ids.max() < 120
    assert types.any() and not types[mask == 0].any()
    np.testing.assert_array_equal(ids, sample_inputs(form(pad_token_id=7), None).input_ids_BS)


@pytest.mark.parametrize("family", ["distilbert", "modernbert", "roberta"])
def test_models_without_types(family):
    changes = {"model_type": family, "type_vocab_size": 1} if family == "roberta" else {"model_type": family}
    made = form(**changes)
    if family != "roberta":
        del made.config["type_vocab_size"]
    assert not sample_inputs(made, None).token_type_ids_BS.any()


def test_never_longer_than_the_position_table(tokenizer: Tokenizer):
    size = tokenizer.vocab_size
    for each in (None, tokenizer):
        assert sample_inputs(form(vocab_size=size, max_position_embeddings=9), each).input_ids_BS.shape[1] == 9
        # RoBERTa's positions begin after its padding id.
        short = form(vocab_size=size, model_type="roberta", pad_token_id=1, max_position_embeddings=20)
        assert sample_inputs(short, each).input_ids_BS.shape[1] == 18
