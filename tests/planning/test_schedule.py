"""`bert-jax schedule`: counts against sums over single steps, the three outputs against each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bert_jax.cli import main as cli
from bert_jax.config import Config, Phase, presets
from bert_jax.data.mixture import MixtureOrder
from bert_jax.doctor import epochs
from bert_jax.planning import schedule
from bert_jax.report.text import render
from bert_jax.training.optimizers.schedules import learning_rate_at

CONFIG = Config(
    name="ramped",
    phases=(
        Phase(
            steps=100,
            seq_len=32,
            batch_size=48,
            start_batch_size=16,
            ramp_steps=10,
            accumulation=3,
            learning_rate=0.5,
            warmup_steps=20,
            decay_start=60,
            num_layers=3,
            frozen=("encoder/embeddings/.*",),
        ),
        Phase(steps=40, seq_len=64, batch_size=8, warmup_steps=0, learning_rate=0.25, hours=2, step_count="reset"),
    ),
)


@pytest.mark.parametrize("start", [None, 1, 3, 24])
@pytest.mark.parametrize("ramp", [1, 7, 100])
def test_rows_are_those_of_single_steps(start, ramp):
    ramped = {} if start is None else {"start_batch_size": start, "ramp_steps": ramp}
    phase = Phase(steps=60, batch_size=24, accumulation=24, **ramped)
    sizes = [phase.batch_size_at(step) for step in range(phase.steps)]
    assert (len(set(sizes)) > 1) == (start not in (None, 24))
    assert [phase.rows_before(step) for step in range(61)] == [sum(sizes[:step]) for step in range(61)]
    assert phase.rows_before(60) == epochs.rows_by_phase_and_corpus(
        Config(name="x", phases=(phase,)), [MixtureOrder([1.0])]
    )


def test_mask_rates_that_change():
    """A column of the table, in runs that have them."""
    assert "mask_rate" not in schedule.to_dict(CONFIG)["table"][0]
    phases = Phase(steps=10, warmup_steps=0, mask_rate=0.3, end_mask_rate=0.1), Phase(steps=10, warmup_steps=0)
    found = schedule.to_dict(Config(name="x", phases=phases))
    rates = {row["step"]: row["mask_rate"] for row in found["table"]}
    assert rates[0] == 0.3 and rates[5] == pytest.approx(0.2) and rates[10] == rates[19] == 0.15
    assert "mask_rate" in render(schedule.to_sections(found))


def test_values():
    found = schedule.to_dict(CONFIG)
    rows = sum(CONFIG.phases[0].batch_size_at(step) for step in range(100))
    assert rows < 100 * 48
    assert [phase["tokens"] for phase in found["phases"]] == [rows * 32, 40 * 8 * 64]
    assert found["tokens"] == rows * 32 + 40 * 8 * 64 and found["steps"] == 140
    assert [(p["first_step"], p["end_step"]) for p in found["phases"]] == [(0, 100), (100, 140)]
    assert [(p["num_layers"], p["frozen"], p["hours"]) for p in found["phases"]] == [
        (3, ["encoder/embeddings/.*"], None),
        (12, [], 2),
    ]
    table = {row["step"]: row for row in found["table"]}
    assert 15 <= len(table) <= 25 and list(table) == sorted(table)
    assert {0, 20, 60, 100, 139} <= table.keys(), "where a phase, its full rate and its decay begin; the last step"
    assert table[0]["tokens"] == 16 * 32 and table[0]["learning_rate"] == 0 and table[0]["batch_size"] == 16
    assert table[100] == {
        "step": 100,
        "phase": 1,
        "seq_len": 64,
        "batch_size": 8,
        "learning_rate": 0.25,
        "tokens": rows * 32 + 8 * 64,
    }
    assert table[139]["tokens"] == found["tokens"]
    for step, row in table.items():
        assert row["learning_rate"] == learning_rate_at(CONFIG, step)


def test_text():
    text = render(schedule.to_sections(schedule.to_dict(CONFIG)))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.strip()}
    assert rows["first_step"] == ["0", "100"] and rows["learning_rate"] == ["0.5", "0.25"]
    assert rows["start_batch_size"] == ["16"] and rows["num_layers"] == ["3", "12"] and rows["hours"] == ["2"]
    assert rows["20"] == ["0", "32", "48", f"{sum(map(CONFIG.phases[0].batch_size_at, range(21))) * 32:,}", "0.5"]
    assert "time decides the number of steps" in text


def test_command(tmp_path, capsys):
    """All flags of the config; the same numbers as text, JSON and picture, and no corpus."""
    picture = tmp_path / "new.png"
    flags = ["schedule", "bert_base", "--phases.1.steps", "7", "--phases.0.learning-rate", "0.125"]
    assert cli.main([*flags, "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert cli.main([*flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert text == render(schedule.to_sections(found)) + "\n"
    assert found["steps"] == 900_007 and found["phases"][0]["learning_rate"] == 0.125
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_errors(tmp_path, capsys, monkeypatch):
    assert cli.main(["schedule", "bert_base", "--plot", str(tmp_path / "none" / "x.png")]) == 2
    assert "x.png: it cannot be written: No such file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["schedule", "bert_base", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_it_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from bert_jax.cli.main import main; sys.exit(main(['schedule', 'bert_24h']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and "time decides" in done.stdout, done.stderr


@pytest.mark.parametrize("name", sorted(presets.preset_files()))
def test_every_preset(name):
    found = schedule.to_dict(presets.load_config(name))
    assert found["table"][-1]["tokens"] == found["tokens"]
    assert all(len(line) <= 140 for line in render(schedule.to_sections(found)).splitlines())
