"""What is shown of a run while it goes on: speeds without compilation, the MLM loss, held-out lines."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import LogConfig
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training import reporter
from bert_jax.training.divergence import StepMeasures
from bert_jax.training.eval_metrics import EvaluationSums, format_metrics
from bert_jax.training.monitoring.prometheus import PrometheusServer
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.reporter import Reporter
from bert_jax.training.run_directory.goodput import GoodputRecorder
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.sharding import make_mesh

COMPILE, STEP = 100.0, 1.0
HELD_OUT = {"mlm_loss": 4.5, "mlm_accuracy": 0.25, "unigram_loss": 6.25, "unigram_accuracy": 0.125}
HELD_OUT |= {"pair_accuracy": 0.875, "pair_loss": 0.5, "pair_majority_accuracy": 0.75}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so."""
    now = types.SimpleNamespace(seconds=0.0)
    fake = types.SimpleNamespace(perf_counter=lambda: now.seconds)
    monkeypatch.setattr(reporter, "time", fake)
    monkeypatch.setattr(reporter, "peak_flops", lambda devices: 1.0)
    return now


@pytest.fixture
def attempt(two_phases, clock, tmp_path):
    """Steps of an attempt, as the loop drives a reporter: each is reported after the next one was dispatched."""
    config = dataclasses.replace(two_phases, log=LogConfig(every=1, tensorboard=False))
    task = Pretraining(config, Vocabulary(120, 4, (0, 1, 2, 3, 4)))
    first, last = config.phases

    def run(begin: int, end: int, skipped: tuple[int, ...] = ()) -> None:
        compiled, mesh = None, make_mesh(config.mesh, jax.devices()[:1])
        prometheus = PrometheusServer(config, tmp_path, Ledger(tmp_path / "ledger.jsonl"))
        with (
            GoodputRecorder(tmp_path, 0.0) as goodput,
            Reporter(task, tmp_path, mesh, begin, 0, 0, 0, goodput, None, prometheus) as report,
        ):
            for step in range(begin, end):
                report.before_step(step)
                phase = first if step < first.steps else last
                clock.seconds += STEP if phase is compiled else COMPILE
                compiled = phase
                loss = float("nan") if step + 1 in skipped else 5.5
                measures = StepMeasures(sum(one <= step + 1 for one in skipped), 0, 0.0, 0.0, 0.0, 0.0)._asdict()
                metrics = {"tokens": 8, "loss": loss, "mlm_loss": 4.75} | measures
                metrics |= {"pair_loss": 0.75, "pair_accuracy": 0.5, "pair_negatives": 0.25}
                report.add_step(step + 1, 8, {name: jnp.asarray(value) for name, value in metrics.items()})
            report.flush()
            report.add_evaluation(end, HELD_OUT)

    run.lines = lambda: [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["split"] == "train"]
    return run


def test_skipped_steps_are_reported(attempt, capfd):
    """Each was silent, and a run that skipped half of its steps "finished"."""
    attempt(0, 6, skipped=(3, 5))
    shown = capfd.readouterr().err
    assert shown.count("warning:") == 1 and "warning: the loss of step 3 is not finite; its update is skipped" in shown
    assert "mlm_loss 4.750, 2 skipped" in shown


def test_no_speed_includes_compilation(attempt):
    """Neither the first step of a run, of a phase or of a restart, nor the last one before a phase."""
    attempt(0, 10)
    attempt(10, 12)
    speeds = {line["step"]: line["timing"].get("step_seconds") for line in attempt.lines()}
    assert [step for step, seconds in speeds.items() if seconds is None] == [1, 8, 11]
    assert all(seconds is None or seconds <= STEP for seconds in speeds.values()), speeds


def test_the_bar_and_the_held_out_lines(attempt, capfd):
    """Without a terminal too; the figure of the bar is not the sum with the pair loss."""
    attempt(0, 3)
    shown = capfd.readouterr().err
    assert "mlm_loss 4.750" in shown and "5.500" not in shown  # a rate of the bar has two decimals
    assert f"step 3, held out: {format_metrics(HELD_OUT)}\n" in shown
    assert "mlm_accuracy 0.2500 (unigram 0.1250), pair_accuracy 0.8750 (majority 0.7500)" in shown
    assert {line["pair_majority_accuracy"] for line in attempt.lines()} == {0.75}
    attempt(3, 4)  # begins where the last one ended, or its rate and ETA would be those of a faster machine
    shown = capfd.readouterr().err
    assert " 3/12 [" in shown and " 0/12 [" not in shown


def test_the_majority_is_that_of_the_scored_pairs():
    """Over several corpora and for each; rows without pair labels have no pair metrics."""
    prepared = {"target_labels": np.array([[5, 6]]), "target_weights": np.ones((1, 2))}
    mlm = {"mlm_loss": (2.0, 2.0), "mlm_accuracy": (1.0, 2.0)}
    one, two, unlabelled = (EvaluationSums(np.ones(8), 3) for _ in range(3))
    one.add(prepared, mlm | {"pair_accuracy": (5.0, 8.0), "pair_negatives": (6.0, 8.0)})
    two.add(prepared, mlm | {"pair_accuracy": (1.0, 4.0), "pair_negatives": (1.0, 4.0)})
    unlabelled.add(prepared, mlm | {"pair_accuracy": (0.0, 0.0), "pair_negatives": (0.0, 0.0)})
    found = [scores.means() for scores in (one, two, EvaluationSums.merge([one, two]), unlabelled)]
    assert [means.get("pair_majority_accuracy") for means in found] == [0.75, 0.75, 7 / 12, None]
    assert found[2]["pair_accuracy"] == 0.5 and not [name for name in found[3] if "pair" in name]
