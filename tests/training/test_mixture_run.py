"""A run on two corpora: both are read, and both are scored."""

import dataclasses
import math

import pytest

from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.training import pretraining
from bert_jax.training.run_directory.metrics import read_metrics


def test_both_corpora_are_read_and_scored(tiny_corpus, second_corpus, tiny_config, tiny_programs, tmp_path):
    config = dataclasses.replace(
        tiny_config, phases=(dataclasses.replace(tiny_config.phases[0], steps=4),), name="mixture"
    )
    parts = [CorpusWeight(tiny_corpus, 3.0), CorpusWeight(second_corpus, 1.0)]
    progress = pretraining.pretrain(config, parts, tmp_path / "run", make_programs=tiny_programs())
    assert len(progress.cursor.positions) == 2 and progress.cursor.rows == 32
    names = {"corpus", "second"}
    for metric in ("mlm_loss", "mlm_perplexity", "mlm_accuracy", "pair_loss", "pair_accuracy", "unigram_loss"):
        of_parts = [progress.evaluation[f"{metric}/{name}"] for name in names]
        assert min(of_parts) <= progress.evaluation[metric] <= max(of_parts)
    for of in ("", "/corpus", "/second"):
        assert progress.evaluation[f"mlm_perplexity{of}"] == pytest.approx(
            math.exp(progress.evaluation[f"mlm_loss{of}"])
        )
    assert progress.evaluation["mlm_loss/corpus"] != progress.evaluation["mlm_loss/second"]
    (line,) = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "validation"]
    assert {f"mlm_loss/{name}" for name in names} <= line.keys()
    # Each part alone gives the figure that it has in the mixture.
    alone = pretraining.evaluate(tmp_path / "run", [CorpusWeight(second_corpus)]).metrics
    assert alone["mlm_loss"] == pytest.approx(progress.evaluation["mlm_loss/second"], rel=1e-6)
    # The same run, however its corpora are ordered; another one with other shares.
    again = pretraining.pretrain(config, parts[::-1], tmp_path / "run", make_programs=tiny_programs())
    assert again == progress
    with pytest.raises(UserError, match=r"share|corpora"):
        pretraining.pretrain(
            config, [CorpusWeight(tiny_corpus, 1.0), CorpusWeight(second_corpus, 1.0)], tmp_path / "run"
        )
