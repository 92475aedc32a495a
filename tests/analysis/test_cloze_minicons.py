"""Pseudo-log-likelihoods equal those of minicons, which runs the same model in PyTorch."""

import numpy as np
import pytest

import bert_jax
from bert_jax.analysis.cloze.pll import token_scores
from bert_jax.interventions.rows import encode_sentences
from tests.live import small_models

pytestmark = pytest.mark.slow
VARIANTS = ("original", "within_word_l2r")
SENTENCES = ["The river sings.", "a crab don't", "isn't it; so?", "quick-witted stone", "the slow wind runs"]


def directory_of(name: str, tmp_path, tiny_export):
    """A trained model, or a random one of a family: WordPiece, byte-level BPE, SentencePiece."""
    if name == "trained":
        return tiny_export
    (tmp_path / "model").mkdir()
    (tmp_path / "scratch").mkdir()
    small_models.save(name, tmp_path / "model", tmp_path / "scratch")
    return tmp_path / "model"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["trained", "bert", "roberta", "albert"])
def test_scores_are_those_of_minicons(name, tmp_path, tiny_export):
    pytest.importorskip("torch")
    scorer = pytest.importorskip("minicons.scorer")
    directory = directory_of(name, tmp_path, tiny_export)
    peer, model = scorer.MaskedLMScorer(str(directory), "cpu"), bert_jax.load(directory)
    rows = encode_sentences(SENTENCES, model.tokenizer, model.config.max_positions)
    assert None not in rows
    found = token_scores(model, rows, VARIANTS)
    encoded = peer.tokenizer(SENTENCES, padding="longest", return_tensors="pt")
    for variant in VARIANTS:
        batch = peer.prepare_text(encoded, PLL_metric=variant)
        expected = peer.compute_stats(batch)
        assert [len(scores) for scores in expected] == [len(row.input_ids) - 2 for row in rows]
        for scores, peers in zip(found[variant], expected, strict=True):
            np.testing.assert_allclose(scores, peers, atol=1e-4)
    differ = [np.abs(a - b).max() > 1e-4 for a, b in zip(found["original"], found["within_word_l2r"], strict=True)]
    assert any(differ)
