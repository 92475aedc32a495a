"""`bert-jax adapt`: continued pretraining, scored before and after; killed and continued; refused in one line."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from scipy import stats

from bert_jax.cli import main as cli
from bert_jax.cli.adapt import adaptation_config
from bert_jax.convert import adaptation
from bert_jax.convert.adaptation import AdaptationCorpora, TextScore, half_interval, run_config
from bert_jax.convert.formats import input_formats, native
from bert_jax.convert.held_out import score_model
from bert_jax.convert.init_from import load_initial_params
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import pretraining
from bert_jax.training.param_paths import params_sha256
from bert_jax.training.reporter import Reporter
from bert_jax.training.run_directory import workdir
from bert_jax.training.shared_programs import share_programs
from tests.runs import Killed, numbers, read_results

pytestmark = pytest.mark.usefixtures("quick_compilation")
SMALL = (
    "--phases.0.seq-len 32 --phases.0.batch-size 8 --phases.0.learning-rate 5e-3 --evaluation.rows 12 "
    "--evaluation.batch-size 1 --data.example-end sentence --log.no-tensorboard --checkpoint.every 2 --log.every 1"
)


def command(model, domain, general, workdir, more: str = "--phases.0.steps 4 --replay 0.25") -> list[str]:
    words = ["adapt", str(model), "--corpus", str(domain), "--general", str(general), "--workdir", str(workdir)]
    return [*words, *SMALL.split(), *more.split()]


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tiny_programs):
    """The runs of this file have one compiled step."""
    with pytest.MonkeyPatch.context() as patch:
        shared = functools.partial(pretraining.pretrain, make_programs=tiny_programs())
        patch.setattr(pretraining, "pretrain", shared)
        yield


@pytest.fixture(scope="module")
def adapted(tiny_export, second_corpus, tiny_corpus, tmp_path_factory):
    """The work directory of a finished run. Read only."""
    workdir = tmp_path_factory.mktemp("adapted") / "run"
    assert cli.main([*command(tiny_export, second_corpus, tiny_corpus, workdir)]) == 0
    return workdir


def test_before_and_after(adapted, tiny_export, second_corpus, tiny_corpus, capsys, monkeypatch):
    """Both sides are what `bert-jax evaluate` gives; a finished run prints its table again, or its results."""
    found = read_results(adapted)
    assert [(text["role"], text["corpus"]) for text in found["texts"]] == [("domain", "second"), ("general", "corpus")]
    shared = share_programs()
    for text, corpus in zip(found["texts"], (second_corpus, tiny_corpus), strict=True):
        parts = [CorpusWeight(corpus)]
        with input_formats.open_model(tiny_export) as source:
            before = score_model(source, parts, seq_len=32, rows=12, make_programs=shared).metrics
        after = pretraining.evaluate(adapted, parts, make_programs=shared).metrics
        assert set(text["metrics"]) == {"mlm_loss", "mlm_accuracy"} and text["rows"] == 12
        for name, one in text["metrics"].items():
            assert one["before"] == pytest.approx(before[name], rel=1e-5)
            assert one["after"] == pytest.approx(after[name], rel=1e-5)
            assert one["change"] == one["after"] - one["before"] and one["interval"] > 0
            assert one["baseline"] == pytest.approx(before[name.replace("mlm", "unigram")], rel=1e-6)
    assert all(text["metrics"]["mlm_loss"]["change"] < -0.1 for text in found["texts"]) and found["steps"] == 4
    assert found["tokens_seen"] == numbers(adapted, "train")[-1]["tokens_seen"] > 0
    hashes = json.loads((adapted / "results.json").read_text())["provenance"]["hashes"]
    initial = load_initial_params(workdir.read_config(adapted), Tokenizer.load(tiny_corpus / "tokenizer.json"))
    assert hashes["initial parameters"] == params_sha256(initial.params) and len(hashes) == 3
    shares = json.loads((adapted / "config.json").read_text())["corpora"]
    assert shares == {Corpus.open(second_corpus).identity: 0.75, Corpus.open(tiny_corpus).identity: 0.25}
    again = command(tiny_export, second_corpus, tiny_corpus, adapted)
    assert cli.main(again) == 0
    printed = capsys.readouterr().out
    for text in found["texts"]:
        one = text["metrics"]["mlm_loss"]
        line = f"{text['role']}: {text['corpus']} (12 rows) mlm_loss"
        (cells,) = (row.removeprefix(line).split() for row in printed.splitlines() if row.startswith(line))
        assert cells[:3] == [f"{one[name]:.4f}" for name in ("baseline", "before", "after")]
    assert cli.main([*again, "--json"]) == 0
    assert {**json.loads(capsys.readouterr().out), "provenance": 0} == {**found, "provenance": 0}
    # A run whose source has changed since keeps its results.
    changed = initial._replace(params=jax.tree.map(lambda leaf: leaf + 1, initial.params))
    monkeypatch.setattr(adaptation.Scorer, "read_initial", lambda _: changed)
    assert cli.main(again) == 2 and "has other parameters than those that the run in" in capsys.readouterr().err
    assert read_results(adapted) == found


@pytest.mark.slow
def test_a_killed_run_continues(adapted, tiny_export, second_corpus, tiny_corpus, tmp_path, monkeypatch, capsys):
    words = command(tiny_export, second_corpus, tiny_corpus, tmp_path / "run")
    steps, add_step = [], Reporter.add_step

    def die(*arguments):
        steps.append(1)
        if len(steps) == 3:
            raise Killed
        add_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "add_step", die)
        with pytest.raises(Killed):
            cli.main(words)
    assert not (tmp_path / "run" / "results.json").exists()
    read = adaptation.Scorer.read_initial

    def read_changed(scorer):
        initial = read(scorer)
        return initial._replace(params=jax.tree.map(lambda leaf: leaf + 1, initial.params))

    with monkeypatch.context() as patch:
        patch.setattr(adaptation.Scorer, "read_initial", read_changed)
        assert cli.main(words) == 2 and "has other parameters than those that the run in" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert read_results(tmp_path / "run") == read_results(adapted)
    fewer = ["8" if word == "12" else word for word in words]  # rows of another evaluation, before and after
    assert cli.main(fewer) == 0 and {text["rows"] for text in read_results(tmp_path / "run")["texts"]} == {8}


def test_the_schedule_follows_from_the_text(tiny_export, second_corpus, tiny_corpus):
    """One pass over the domain's tokens with rows of the share that replay leaves; 6 % warmup, then decay."""
    texts = AdaptationCorpora([CorpusWeight(second_corpus)], [CorpusWeight(tiny_corpus)])
    phase = dataclasses.replace(adaptation_config().phases[0], seq_len=16, batch_size=2)
    config = dataclasses.replace(adaptation_config(), phases=(phase,))
    tokens = Corpus.open(second_corpus).num_tokens
    for epochs, replay in ((1.0, 0.1), (3.0, 0.0)):
        found = run_config(config, tiny_export, (), texts, replay, epochs)
        (phase,) = found.phases
        assert phase.steps == round(epochs * tokens / (32 * (1 - replay))) and phase.steps > 10
        assert phase.warmup_steps == phase.decay_start == round(0.06 * phase.steps) and found.model.vocab_size == 120
        assert found.model.hidden_size == 64 and found.model.max_positions == 64
    given = {"phases.0.steps", "phases.0.warmup_steps", "model.hidden_dropout"}
    mine = dataclasses.replace(config.model, hidden_dropout=0.3)
    phases = (dataclasses.replace(phase, steps=9, warmup_steps=4, decay_start=0),)
    found = run_config(dataclasses.replace(config, model=mine, phases=phases), tiny_export, given, texts, 0.1, 1.0)
    (phase,) = found.phases
    assert (phase.steps, phase.warmup_steps, phase.decay_start, found.model.hidden_dropout) == (9, 4, 4, 0.3)


def test_a_causal_model_is_compared_by_its_own_losses():
    before, after = (TextScore("x", 8, {"causal_loss": x, "unigram_loss": 4.0}, [], 8) for x in (3.5, 3.0))
    change = adaptation.Change(baseline=4.0, before=3.5, after=3.0, change=-0.5, interval=None)
    assert adaptation.compare(before, after) == {"causal_loss": change}


def test_detection_is_compared_with_the_best_constant():
    """That constant is the share of replaced tokens: its cross-entropy is -0.16 ln 0.16 - 0.84 ln 0.84."""
    metrics = {"rtd_loss": 0.4, "rtd_accuracy": 0.6, "rtd_replaced": 0.16}
    changes = adaptation.compare(*[TextScore("x", 8, metrics, [], 8)] * 2)
    assert changes["rtd_accuracy"]["baseline"] == 0.84
    assert changes["rtd_loss"]["baseline"] == pytest.approx(0.439670, abs=1e-6)


def test_a_model_without_the_head_is_refused(tiny_export, second_corpus, tiny_corpus, tmp_path, capsys):
    with input_formats.open_model(tiny_export) as source:
        params = {name: part for name, part in source.model.params.items() if name != "mlm"}
        model = source.model._replace(heads=dataclasses.replace(source.model.heads, mlm=False), params=params)
        native.write(dataclasses.replace(source, model=model, hf_model=None), tmp_path)
    assert cli.main(command(tmp_path, second_corpus, tiny_corpus, tmp_path / "run")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path} has no head for masked language modelling")
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_work_directory_is_refused_before_scoring(
    tiny_export, tiny_run, second_corpus, tiny_corpus, monkeypatch, capsys
):
    monkeypatch.setattr(adaptation.Scorer, "score_initial", None)
    assert cli.main(command(tiny_export, second_corpus, tiny_corpus, tiny_run)) == 2
    assert f"work directory {tiny_run} holds a different run" in capsys.readouterr().err


def test_intervals():
    """For groups of one size: the interval of a paired t-test."""
    rng = np.random.default_rng(0)
    before, gain = rng.normal(50, 9, 40), rng.normal(4, 1, 40)
    pairs = [((b, 10.0), (b - g, 10.0)) for b, g in zip(before, gain, strict=True)]
    interval = stats.ttest_1samp(gain / 10, 0).confidence_interval()
    assert half_interval(pairs) == pytest.approx((interval.high - interval.low) / 2)
    assert half_interval([*pairs, ((0.0, 0.0), (0.0, 0.0))]) == half_interval(pairs)  # a batch without targets
    assert half_interval(pairs[: adaptation.MIN_GROUPS - 1]) is None
    weights = rng.integers(5, 15, 400)
    draws = [rng.normal(3, 0.5, n).sum() for n in weights]
    uneven = [((0.0, float(n)), (total, float(n))) for n, total in zip(weights, draws, strict=True)]
    assert half_interval(uneven) == pytest.approx(1.96 * 0.5 / np.sqrt(weights.sum()), rel=0.1)
