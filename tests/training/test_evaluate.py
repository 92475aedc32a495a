"""`bert-jax evaluate`: any run on the devices that are here, on rows of one stated kind."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import scipy.stats

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import Config, ModelConfig, Phase
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import load
from bert_jax.training import pretraining
from bert_jax.training.eval_metrics import mean_difference
from bert_jax.training.run_directory.metrics import read_metrics


@pytest.fixture
def run_as(tiny_run, tmp_path):
    """Copies of one run whose config says that it was trained otherwise."""

    def copy(name, **changes):
        directory = tmp_path / name
        shutil.copytree(tiny_run, directory)
        described = json.loads((directory / "config.json").read_text())
        for section, values in changes.items():
            kept = described["config"][section]
            (kept[0] if section == "phases" else kept).update(values)
        (directory / "config.json").write_text(json.dumps(described))
        return directory

    return copy


def test_a_run_of_a_pod_is_scored_here(run_as, tiny_run, tiny_corpus, tiny_programs):
    """Its mesh needs 16 devices, its batches do not divide, and its attention needs a GPU."""
    run = run_as(
        "pod",
        mesh={"data": 4, "fsdp": 2, "tensor": 2},
        phases={"batch_size": 6, "accumulation": 3},
        evaluation={"batch_size": 7},
        model={"attention": "cudnn", "attention_dropout": 0.0},
    )
    found = pretraining.evaluate(run, [CorpusWeight(tiny_corpus)], make_programs=tiny_programs()).metrics
    trained = read_metrics(tiny_run / "metrics.jsonl")[-1]
    assert trained["split"] == "validation"
    expected = {name: value for name, value in trained.items() if name not in ("step", "split", "timing")}
    assert found == pytest.approx(expected, rel=1e-5)
    first, last = (run / "checkpoints" / step for step in ("00000004", "00000008"))
    scores = [
        pretraining.evaluate(one, [CorpusWeight(tiny_corpus)], make_programs=tiny_programs()).metrics
        for one in (first, last)
    ]
    assert scores[1] == found and scores[0]["mlm_loss"] > found["mlm_loss"]


def test_a_changed_tokenizer_is_refused(run_as, tiny_corpus, capsys):
    """By whoever loads the run; with the old advice the corpus would have been built with it."""
    run = run_as("changed")
    text = (run / "tokenizer.json").read_text()
    description = json.loads(text)
    vocab = description["model"]["vocab"]
    *_, first, second = vocab
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (run / "tokenizer.json").write_text(json.dumps(description))
    commands = [
        ["fill-mask", str(run), "a [MASK]"],
        ["convert", str(run), str(run / "exported")],
        ["evaluate", str(run), "--corpus", str(tiny_corpus)],
    ]
    for command in commands:
        assert cli.main(command) == 2
        message = capsys.readouterr().err
        assert "tokenizer.json is not the tokenizer that the run was trained with" in message
        assert f"copy {tiny_corpus / 'tokenizer.json'} to it" in message
    described = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(described | {"corpus_paths": ["/absent"]}))
    with pytest.raises(UserError, match="ids mean other words; restore a copy of it"):
        load(run)
    (run / "tokenizer.json").write_text(text)
    assert load(run)


def test_runs_of_different_formats_on_one(run_as, tiny_corpus, tiny_programs, capsys):
    """The same weights, trained on pairs or on full sentences: figures agree only on rows of the same kind."""
    pairs = run_as("pairs")
    runs = run_as("runs", data={"format": "full_sentences", "example_end": "row"}, objective={"pair": "none"})

    def score(run, **stated):
        return pretraining.evaluate(run, [CorpusWeight(tiny_corpus)], make_programs=tiny_programs(), **stated)

    own = [score(run) for run in (pairs, runs)]
    assert [(one.format, one.example_end, one.seq_len, one.rows) for one in own] == [
        ("segment_pair", "sentence", 32, 12),
        ("full_sentences", "row", 32, 12),
    ]
    assert own[0].metrics["unigram_loss"] != own[1].metrics["unigram_loss"]
    assert "pair_accuracy" in own[0].metrics and "pair_accuracy" not in own[1].metrics

    stated = {"form": "full_sentences", "seq_len": 24, "rows": 9}
    one, other = (score(run, **stated) for run in (pairs, runs))
    assert one == other and one[:4] == ("full_sentences", "sentence", 24, 9)
    assert "pair_accuracy" not in one.metrics, "these rows have no pair labels"
    on_pairs = score(runs, form="segment_pair")
    assert on_pairs.metrics == {name: own[0].metrics[name] for name in on_pairs.metrics}
    assert not [name for name in on_pairs.metrics if name.startswith("pair")], "it learned no pairs"

    flags = ["evaluate", str(pairs), "--corpus", str(tiny_corpus), "--format", "full_sentences", "--seq-len", "24"]
    assert cli.main([*flags, "--rows", "9"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("scored: format full_sentences, example_end sentence, seq_len 24, rows 9 at most\n")
    assert re.search(rf"^  mlm_loss +{one.metrics['mlm_loss']:.4f}$", shown, re.M)


def test_a_model_without_token_types_reads_no_pairs(run_as, tiny_corpus):
    run = run_as("roberta", model={"type_vocab_size": 1}, data={"format": "full_sentences"}, objective={"pair": "none"})
    with pytest.raises(UserError, match=r"--format segment_pair marks .* has 1 token type.*use full_sentences"):
        pretraining.evaluate(run, [CorpusWeight(tiny_corpus)], form="segment_pair")


@pytest.mark.parametrize("attention", ["pallas_gpu", "pallas_tpu"])
def test_a_run_with_kernels_is_scored_anywhere(attention):
    """Without dropout, as the attention of evaluation has none."""
    config = Config("x", ModelConfig(attention=attention), phases=(Phase(),))
    assert config.model.attention_dropout > 0
    model = pretraining._evaluation_config(config, None, None, None).model
    assert (model.attention, model.attention_dropout) == ("xla", 0.0)


def test_a_run_with_weights_is_scored_on_other_corpora(tiny_config, tiny_corpus):
    """Weights of corpora and of documents are those of training rows."""
    parts, groups = [CorpusWeight(tiny_corpus)], {"source_weights": (("papers", 3.0),)}
    phase = dataclasses.replace(tiny_config.phases[0], corpus_weights=(("elsewhere", 1.0),))
    for config in (dataclasses.replace(tiny_config, phases=(phase,)), config_lib.replace(tiny_config, data=groups)):
        with pytest.raises(UserError):
            pretraining.open_task(config, parts)
        pretraining.open_task(pretraining._evaluation_config(config, None, None, None), parts)


def test_standard_error_of_a_difference():
    differences = np.random.default_rng(0).normal(2, 1, 50)
    mean, error = mean_difference(differences, np.full(50, 3.0))
    assert mean == pytest.approx(differences.mean() / 3)
    assert error == pytest.approx(scipy.stats.sem(differences) / 3)
