"""The command `bert-jax ablate`: a study file from start to end, parts, and mistakes in one line."""

import json

import pytest

pytest.importorskip("scipy")
from bert_jax.cli import main as cli
from bert_jax.cli.ablate import parse_part
from bert_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("quick_compilation")
STUDY = """
from bert_jax import Study
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, ModelConfig, Phase
from bert_jax.experiments.study import HeldOutRows

def study():
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, max_positions=32)
    base = Config(
        name="small",
        model=model,
        phases=(Phase(steps=2, seq_len=32, batch_size=64, learning_rate=1e-2, warmup_steps=0),),
        log=LogConfig(tensorboard=False),
        evaluation=EvaluationConfig(every=0, rows=8, batch_size=8),
    )
    rates = {"low": {}, "high": {"phases": {"learning_rate": 0.02}}}
    rows = HeldOutRows("full_sentences", 32, 8)
    return Study(name="rates", base=base, factors={"rate": rates}, margins={"mlm_loss": 0.1}, rows=rows, seeds=1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.py").write_text(STUDY)
    return tmp_path


@pytest.mark.slow
def test_a_study(folder, tiny_corpus, capsys):
    command = ["ablate", "rates.py", "--corpus", str(tiny_corpus), "--workdir", "study", "--compilation-cache", "none"]
    assert cli.main([*command, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [cell["name"] for cell in plan["cells"]] == ["baseline", "rate=high"] and not (folder / "study").exists()
    assert cli.main([*command, "--part", "1/2"]) == 0
    assert "1 of 2 runs are done" in capsys.readouterr().out
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "no verdict: fewer than 3 seeds" in shown and "study rates" in shown
    results = json.loads((folder / "study/results.json").read_text())
    assert cli.main([*command, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    results["provenance"]["date"] = again["provenance"]["date"]  # of writing, which is repeated
    assert again == results
    assert cli.main(["report", "study"]) == 0 and "no verdict" in capsys.readouterr().out
    changed = STUDY.replace("0.02", "0.03")
    (folder / "rates.py").write_text(changed)
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "began with other settings (study.factors.rate.high.phases.learning_rate 0.02 -> 0.03)" in line


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        (None, {}, (0, 1)),
        ("1/1", {}, (0, 1)),
        ("2/8", {"ID": "5", "COUNT": "6"}, (1, 8)),
        (None, {"ID": "3", "COUNT": "4", "MIN": "0", "STEP": "1"}, (3, 4)),
        (None, {"ID": "1", "COUNT": "4", "MIN": "1"}, (0, 4)),
        (None, {"ID": "4", "COUNT": "4", "MIN": "1", "MAX": "4", "STEP": "1"}, (3, 4)),
        ("2/8", {"ID": "abc"}, (1, 8)),
    ],
)
def test_parts(text, environment, part):
    assert parse_part(text, {f"SLURM_ARRAY_TASK_{name}": value for name, value in environment.items()}) == part


@pytest.mark.parametrize("text", ["9/8", "0/8", "2", "a/b", "-1/2", "1/0", ""])
def test_bad_parts(text):
    with pytest.raises(UserError, match="as in 2/8"):
        parse_part(text, {})


@pytest.mark.parametrize(
    "environment",
    [
        {"ID": "3", "COUNT": "2", "MIN": "3", "MAX": "7", "STEP": "1"},
        {"ID": "7", "COUNT": "2", "MIN": "3", "STEP": "1"},
        {"ID": "0", "COUNT": "2", "MIN": "0", "MAX": "7", "STEP": "1"},
        {"ID": "4", "COUNT": "3", "MIN": "0", "STEP": "2"},
        {"ID": "4", "COUNT": "4", "MIN": "0", "STEP": "1"},
        {"ID": "0", "COUNT": "4", "MIN": "1"},
        {"ID": "abc"},
        {"ID": "1", "COUNT": "", "MIN": "0"},
    ],
)
def test_arrays_that_give_no_part(environment):
    with pytest.raises(UserError, match=f"SLURM_ARRAY_TASK_ID={environment['ID']}.*add --part I/N"):
        parse_part(None, {f"SLURM_ARRAY_TASK_{name}": value for name, value in environment.items()})
