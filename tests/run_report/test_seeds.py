"""The report on several seeds of one fine-tuning, from files alone: against SciPy, and with damaged files."""

import json

import numpy as np
import pytest
from scipy import stats

from bert_jax.cli import main as cli
from bert_jax.provenance import Code, make_provenance
from bert_jax.report.text import render
from bert_jax.run_report import seeds

SCORES = [0.71, 0.69, 0.74, 0.52, None]
OTHER = {"seed 1": Code(version="0.0.9", commit="", sha256="0123456789abcdef")}


@pytest.fixture
def directory(tmp_path):
    """Five seeds, one of which is not above the baseline and one of which diverged."""
    made = make_provenance(
        {"python": "3"}, hashes={"train": "ff"}, configs={"run": {"finetune": {"flags": ["--epochs 3"]}}}, made_by=OTHER
    )
    results = {
        "task": "rte",
        "baseline": 0.527,
        "seeds": [
            {
                "seed": seed,
                "score": score,
                "failed": not (score or 0) > 0.527,
                "metrics": {"accuracy": score} if score else {},
            }
            for seed, score in enumerate(SCORES)
        ],
        "provenance": made,
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "seed0").mkdir()
    (tmp_path / "seed0" / "config.json").write_text("{}")
    return tmp_path


def test_scores_with_mean_interval_and_baseline(directory):
    shown = [" ".join(line.split()) for line in render(seeds.sections(directory)).splitlines()]
    finite = np.array([score for score in SCORES if score is not None])
    low, high = stats.t.interval(0.95, len(finite) - 1, finite.mean(), stats.sem(finite))
    p_value = stats.ttest_1samp(finite, 0.527).pvalue
    assert f"mean {finite.mean():.4f} {finite.mean():.4f}" in shown
    assert f"standard deviation {finite.std(ddof=1):.4f} {finite.std(ddof=1):.4f}" in shown
    assert f"95 % interval {low:.4f} to {high:.4f} {low:.4f} to {high:.4f}" in shown
    text = " ".join(shown)
    assert f"{finite.mean() - 0.527:+.4f} above the best constant prediction, 0.5270: 95 % interval " in text
    assert f"{low - 0.527:+.4f} to {high - 0.527:+.4f}, p {p_value:.2g} (Student's t)" in text
    assert "2 of 5 runs failed, 1 of them diverged, without a score" in text
    assert {"* seed 3 0.5200 0.5200", "* seed 4 - -", "seed 2 0.7400 0.7400", "SHA-256 of train ff"} <= set(shown)
    assert "finetune.flags.0 --epochs 3" in shown and "made by other code: seed 1 by bert_jax 0.0.9" in text


def test_the_command_and_its_page(directory, capsys):
    page = directory / "page.html"
    assert cli.main(["report", str(directory), "--out", str(page)]) == 0
    html = page.read_text()
    assert "Fine-tuning on rte: 5 seeds" in html and "<svg" in html and "http" not in html
    assert cli.main(["report", str(directory)]) == 0 and "best constant prediction" in capsys.readouterr().out


def test_one_seed_has_no_interval(directory):
    results = json.loads((directory / "results.json").read_text())
    (directory / "results.json").write_text(
        json.dumps(results | {"seeds": results["seeds"][:1], "teacher": {"score": 0.8}})
    )
    text = render(seeds.sections(directory))
    assert "Student's t" not in text and "The teacher has the score 0.8000." in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"provenance": 3}, "provenance is 3: it must be an object"),
        ({"provenance": {}}, "field 'provenance.code' is missing"),
        ({"seeds": [{"seed": 0}]}, "field 'seeds.0.score' is missing"),
        ({"baseline": "high"}, "baseline is 'high'"),
    ],
)
def test_damaged_results_are_one_line(directory, change, message, capsys):
    results = json.loads((directory / "results.json").read_text())
    (directory / "results.json").write_text(json.dumps(results | change))
    assert cli.main(["report", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{directory / 'results.json'}" in line and message in line and "run bert-jax finetune again" in line
