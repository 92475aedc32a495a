"""`bert-jax doctor --against`: refusals, bounds, and the shipped curves against a real run."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path

import pytest

from bert_jax import config as config_lib
from bert_jax.cli import main as cli
from bert_jax.config import presets
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight
from bert_jax.doctor import reference_curve
from bert_jax.doctor.reference_curve import Curve, compare, comparison_config, read_curve
from bert_jax.errors import UserError
from bert_jax.training import pretraining

ROOT = Path(__file__).parent.parent.parent
CURVES = ["bert_mini", "bert_tiny"]
FASTER = dataclasses.replace(presets.load_config("bert_tiny").phases[0], learning_rate=7e-3)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_reference_curves", ROOT / "scripts/make_reference_curves.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def synthetic(**spread) -> Curve:
    """Two metrics of 60 steps, three windows."""
    metrics = {"mlm_loss": [7 - i / 10 for i in range(60)], "pair_loss": [0.7] * 60}
    zeros = {name: [0.0] * 3 for name in metrics}
    return Curve({}, "", metrics, {"float32": zeros | spread, "bfloat16": {name: [0.01] * 3 for name in metrics}})


def scaled(values, factor, start, stop):
    return [value * factor if start <= i < stop else value for i, value in enumerate(values)]


def levels(lines) -> dict[str, str]:
    return {line.name: line.level for line in lines}


@pytest.mark.parametrize(
    ("factor", "start", "stop", "first", "window"),
    [
        (1 + 0.9e-4, 0, 60, "ok", "ok"),
        (1 - 1.1e-4, 0, 1, "error", "ok"),
        (1 + 1.1e-4, 0, 20, "error", "error"),
        # The second window's spread of 1e-3 allows 4e-3, in the third one too.
        (1 + 3.9e-3, 20, 60, "ok", "ok"),
        (1 - 4.1e-3, 20, 40, "ok", "error"),
        (1 + 4.1e-3, 40, 60, "ok", "error"),
        # One value of 2.5 counts a twentieth of a mean of 2.05: 20 x 4e-3 x 2.05 / 2.5 = 0.0656.
        (1.065, 45, 46, "ok", "ok"),
        (1.066, 45, 46, "ok", "error"),
        (math.nan, 33, 34, "ok", "error"),
        (math.nan, 0, 1, "error", "error"),
    ],
)
def test_bounds(factor, start, stop, first, window):
    curve = synthetic(mlm_loss=[0.0, 1e-3, 2e-4])
    values = curve.metrics | {"mlm_loss": scaled(curve.metrics["mlm_loss"], factor, start, stop)}
    assert levels(compare(values, curve, "float32")) == {"first": first, "mlm_loss": window, "pair_loss": "ok"}


def test_bfloat16_may_be_farther_off():
    curve = synthetic()
    values = {name: scaled(row, 1.009, 0, 60) for name, row in curve.metrics.items()}
    assert set(levels(compare(values, curve, "float32")).values()) == {"error"}
    assert set(levels(compare(values, curve, "bfloat16")).values()) == {"ok"}


@pytest.mark.parametrize("name", CURVES)
def test_free_settings_are_kept_and_the_others_are_the_curves(name):
    preset, curve = presets.load_config(name), read_curve(name)
    free = {"attention": "xla", "compute_dtype": "bfloat16", "remat": "full", "scan_unroll": 2}
    user = config_lib.replace(
        preset,
        model=free | {"vocab_size": 1000, "attention_dropout": 0.0},
        data={"reader_processes": 1, "prefetch": 2, "verify": "counts"},
        mesh={"tensor": 2},
        log={"every": 7, "wandb": "p"},
        phases=(dataclasses.replace(preset.phases[0], accumulation=4), *preset.phases[1:]),
    )
    wanted = config_lib.from_dict(curve.config)
    config = comparison_config(user, preset, curve)
    assert config == config_lib.replace(
        wanted,
        model=free,
        data={"reader_processes": 1, "prefetch": 2, "verify": "counts"},
        mesh={"tensor": 2},
        phases=(dataclasses.replace(wanted.phases[0], accumulation=4),),
    )
    assert config.log.every == 1 and config.total_steps == len(curve.metrics["mlm_loss"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed 1"),
        ({"phases": (FASTER,)}, r"phases\.0\.learning_rate 0\.007"),
        ({"model": {"vocab_size": 999}}, r"model\.vocab_size 999: .* run that has 1000"),
        ({"optimizer": {"beta2": 0.98}}, r"optimizer\.beta2 0\.98"),
    ],
)
def test_settings_that_decide_the_results_are_refused(changes, named):
    preset = presets.load_config("bert_tiny")
    with pytest.raises(UserError, match=f"^{named}"):
        comparison_config(config_lib.replace(preset, **changes), preset, read_curve("bert_tiny"))


def test_refusals_on_the_command_line(tiny_corpus, capsys):
    args = ["--corpus", str(tiny_corpus), "--against"]
    assert cli.main(["doctor", "bert_base", *args]) == 2
    assert "'bert_base': --against knows bert_mini and bert_tiny" in capsys.readouterr().err
    assert cli.main(["doctor", "bert_tiny", *args, "--optimizer.beta1", "0.8"]) == 2
    assert "optimizer.beta1 0.8: --against compares" in capsys.readouterr().err
    assert cli.main(["doctor", "bert_tiny", *args]) == 2
    error = capsys.readouterr().err
    assert f"corpus {tiny_corpus} is not the one" in error and all(
        command in error for command in reference_curve.COMMANDS
    )


def test_the_command(tiny_corpus, tmp_path, monkeypatch, capsys):
    """A run like the curve's, computed in another way; then a curve that differs. Nothing is trained."""
    reference = read_curve("bert_tiny")
    curve = dataclasses.replace(reference, corpus=Corpus.open(tiny_corpus).identity)
    monkeypatch.setattr(reference_curve, "CURVES_DIRECTORY", tmp_path / "curves")
    (tmp_path / "curves").mkdir()
    file = tmp_path / "curves" / "bert_tiny.json"
    file.write_text(json.dumps(vars(curve)))
    measured, runs = {name: [*row] for name, row in reference.metrics.items()}, []

    def pretrain(config, parts, workdir):
        runs.append((config, parts))
        workdir.mkdir(parents=True)
        for i in range(200):
            line = {"step": i + 1, "split": "train", "timing": {"unix": 0, "line": i}} | {
                name: row[i] for name, row in measured.items()
            }
            with (workdir / "metrics.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n" + json.dumps(line | {"split": "validation"}) + "\n")

    monkeypatch.setattr(pretraining, "pretrain", pretrain)
    args = ["doctor", "bert_tiny", "--corpus", str(tiny_corpus), "--against", "--phases.0.accumulation", "2"]
    args += ["--model.remat", "full", "--model.attention", "xla"]
    assert cli.main(args) == 0
    ((config, parts),) = runs
    assert (config.phases[0].accumulation, config.model.remat, config.model.attention) == (2, "full", "xla")
    assert config.total_steps == 200 and parts == [CorpusWeight(tiny_corpus)]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed] == [["ok", name] for name in ("set-up", "first", *curve.metrics)]
    assert "200 steps of bert_tiny on 1 x cpu" in printed[0] and "compared as float32" in printed[0]

    curve.metrics["mlm_loss"][43] *= 1.5
    file.write_text(json.dumps(vars(curve)))
    assert cli.main([*args, "--json"]) == 2
    findings = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert [name for name, line in findings.items() if line["level"] == "error"] == ["mlm_loss"]
    assert "steps 41 to 60" in findings["mlm_loss"]["text"]


@pytest.mark.parametrize("name", CURVES)
def test_curves_are_complete(script, name):
    """They have the script's recipe and 200 finite values of each metric, and the model learns."""
    curve = read_curve(name)
    recipe = script.recipe(name)
    assert config_lib.identity_fields(config_lib.from_dict(curve.config)) == config_lib.identity_fields(recipe)
    assert tuple(curve.metrics) == script.METRICS
    assert all(len(row) == 200 and all(map(math.isfinite, row)) for row in curve.metrics.values())
    last = {metric: sum(row[-20:]) / 20 for metric, row in curve.metrics.items()}
    assert last["mlm_loss"] < curve.metrics["mlm_loss"][20] - 0.4
    for kind in ("float32", "bfloat16"):
        assert all(len(curve.tolerances(metric, kind)) == 10 for metric in script.METRICS)
    assert max(curve.tolerances("mlm_loss", "float32")) < 0.05


def test_every_variant_differs_from_the_reference(script):
    base = script.recipe("bert_tiny")
    for changes in script.WRONG.values():
        assert config_lib.fingerprint(script.changed(base, changes)) != config_lib.fingerprint(base)
    for _, flags, changes in script.RIGHT.values():
        variant = script.changed(base, changes)
        assert flags or variant != base
        assert variant.optimizer.beta2 == pytest.approx(base.optimizer.beta2, rel=1e-7)
        same = config_lib.replace(variant, model={"compute_dtype": "float32"}, optimizer=base.optimizer)
        assert config_lib.fingerprint(same) == config_lib.fingerprint(base)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Created by the commands of the error message."""
    from data_prep.cli import main as data_cli

    directory = tmp_path_factory.mktemp("reference")
    for command in reference_curve.COMMANDS:
        words = [str(directory / word) if word.startswith("ref/") else word for word in command.split()[1:]]
        assert data_cli.main([*words, "--workers", "1"]) == 0
    return directory / "ref" / "corpus"


def test_the_commands_make_the_corpus_of_the_curves(corpus):
    assert {read_curve(name).corpus for name in CURVES} == {Corpus.open(corpus).identity}
