"""Pseudo-log-likelihoods equal those of minicons, which ran the same models in PyTorch (golden/make_minicons.py)."""

import json

import numpy as np
import pytest

import bert_jax
from bert_jax.analysis.cloze.pll import token_scores
from bert_jax.interventions.rows import encode_sentences
from tests.golden.make_minicons import FAMILIES, PATH, SENTENCES, VARIANTS
from tests.live import small_models

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_minicons(family, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "model").mkdir()
    small_models.save(family, tmp_path / "model", tmp_path)
    model = bert_jax.load(tmp_path / "model")
    rows = encode_sentences(SENTENCES, model.tokenizer, model.config.max_positions)
    found, golden = token_scores(model, rows, VARIANTS), json.loads(PATH.read_text())[family]
    for variant in VARIANTS:
        for scores, expected in zip(found[variant], golden[variant], strict=True):
            np.testing.assert_allclose(scores, expected, atol=1e-4)
    differ = [np.abs(a - b).max() > 1e-4 for a, b in zip(found["original"], found["within_word_l2r"], strict=True)]
    assert any(differ)
