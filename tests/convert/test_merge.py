"""`bert-jax merge`, and held-out metrics of models that are no runs."""

import dataclasses
import json
import shutil
from contextlib import ExitStack

import numpy as np
import pytest

from bert_jax.cli import main as cli
from bert_jax.convert import merge
from bert_jax.convert.formats.input_formats import open_model
from bert_jax.convert.held_out import score_model
from bert_jax.convert.merge import merge_models
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import load
from bert_jax.storage.paths import to_path
from bert_jax.training import pretraining
from tests.runs import arrays


@pytest.fixture(scope="module")
def checkpoints(tiny_run):
    return [to_path(tiny_run / "checkpoints" / step) for step in ("00000004", "00000008")]


@pytest.mark.parametrize(("weights", "shares"), [(None, (0.5, 0.5)), ((1, 3), (0.25, 0.75)), ((0, 2), (0, 1))])
def test_the_mean(checkpoints, weights, shares):
    first, second = (arrays(load(path).params) for path in checkpoints)
    assert max(np.abs(first[name] - second[name]).max() for name in first) > 1e-3
    with ExitStack() as stack:
        merged = merge_models(checkpoints, weights, stack)
        for name, array in arrays(merged.model.params).items():
            assert array.dtype == np.float32
            mean = shares[0] * first[name].astype(np.float64) + shares[1] * second[name]
            np.testing.assert_allclose(array, mean, rtol=1e-7, atol=1e-9)
    assert f"00000004 ({shares[0]:.3g})" in merged.notes[-1]


def test_corpora_of_a_merged_model(checkpoints):
    web, books = ({"name": name} for name in ("web", "books"))
    joint = merge._joint_corpora([((1.0, web),), ((0.5, web), (0.5, books))], (0.25, 0.75))
    assert joint == ((0.625, web), (0.375, books))
    assert merge._joint_corpora([((1.0, web),), ()], (0.5, 0.5)) == ()
    with ExitStack() as stack:
        merged = merge_models(checkpoints, None, stack)
        assert [share for share, _ in merged.corpora] == [1.0]


def test_the_command(checkpoints, tiny_corpus, tmp_path, capsys):
    out = tmp_path / "merged"
    words = ["merge", *map(str, checkpoints), "--out", str(out), "--corpus", str(tiny_corpus), "--seq-len", "32"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "/" in line and "wrote" not in line}
    assert list(rows) == [*map(str, checkpoints), str(out)] and len({tuple(row) for row in rows.values()}) == 3
    with open_model(out) as source:
        found = score_model(source, [CorpusWeight(tiny_corpus)], seq_len=32).metrics
    assert f"{found['mlm_loss']:.4f}" in rows[str(out)]
    assert "weighted mean of those of" in (out / "README.md").read_text()
    assert cli.main(words) == 2 and "exists already" in capsys.readouterr().err


def test_the_card_begins_as_that_of_the_first_model(tiny_export, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cards = {"README.md": "other", "first/README.md": "mit"}  # of no model, and of the first
    shutil.copytree(tiny_export, tmp_path / "first")
    for name, license in cards.items():
        (tmp_path / name).write_text(f"---\nlicense: {license}\n---\n")
    assert cli.main(["merge", "first", str(tiny_export), "--out", "merged"]) == 0
    assert "license: mit" in (tmp_path / "merged/README.md").read_text()


def test_an_exported_model_has_the_metrics_of_its_run(tiny_run, tiny_export, tiny_corpus, capsys):
    expected = pretraining.evaluate(
        tiny_run, [CorpusWeight(tiny_corpus)], form="full_sentences", seq_len=48, rows=16
    )._asdict()
    metrics = expected.pop("metrics")
    rows = ["--seq-len", "48", "--rows", "16", "--json"]
    assert cli.main(["evaluate", str(tiny_export), "--corpus", str(tiny_corpus), *rows]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found.pop(name) for name in expected} == expected
    assert found == pytest.approx(metrics, rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "words"),
    [((1,), "has 1 numbers for 2 models"), ((1, -1), "must not be negative"), ((0, 0), "must be above 0")],
)
def test_weights_that_mean_nothing(checkpoints, weights, words):
    with pytest.raises(UserError, match=words), ExitStack() as stack:
        merge_models(checkpoints, weights, stack)


def test_models_that_do_not_go_together(checkpoints, tiny_corpus, tmp_path):
    with pytest.raises(UserError, match="at least two models, 1 given"), ExitStack() as stack:
        merge_models(checkpoints[:1], None, stack)
    with open_model(checkpoints[0]) as source:
        assert str(source) == str(checkpoints[0])  # not the run: messages name two checkpoints of one
        wider = dataclasses.replace(source.model.config, hidden_dropout=0.3, norm_epsilon=1e-6)
        headless = dataclasses.replace(source.model.heads, mlm=False)
        changes = {"different models: norm_epsilon": {"config": wider}, "different heads": {"heads": headless}}
        for words, fields in changes.items():
            other = dataclasses.replace(source, model=source.model._replace(**fields))
            with pytest.raises(UserError, match=words):
                merge._check_alike(source, other)
        with pytest.raises(UserError, match="different tokenizers"):
            merge._check_alike(source, dataclasses.replace(source, tokenizer_path=None))
        with pytest.raises(UserError, match="no head for masked language modelling"):
            score_model(other, [CorpusWeight(tiny_corpus)])
