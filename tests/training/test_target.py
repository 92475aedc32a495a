"""Runs that end at a figure, and evaluations, which change nothing of a run."""

import dataclasses

import pytest

from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, TargetConfig
from bert_jax.errors import UserError
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.run_directory import checkpoint
from tests.runs import numbers


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    """4 steps of 8 rows, and 18 of 4 rows: 104 rows."""
    phase = dataclasses.replace(plain_config.phases[0], steps=4, warmup_steps=0)
    return dataclasses.replace(
        plain_config,
        phases=(phase, dataclasses.replace(phase, steps=18, batch_size=4, accumulation=1)),
        checkpoint=CheckpointConfig(every=1000, keep=2),
        evaluation=EvaluationConfig(every=1000, rows=8, batch_size=8),
    )


def aiming(config: Config, goal: float | None, every: int | None = None) -> Config:
    return dataclasses.replace(config, target=TargetConfig(goal, every))


def files(workdir) -> list[tuple]:
    kept = [*(workdir / "checkpoints").rglob("*"), workdir / "metrics.jsonl"]
    return sorted((path, path.stat().st_mtime_ns) for path in kept)


class Scored(Pretraining):
    """Its accuracy is 0.1, 0.2, and so on, whatever the parameters are."""

    found: list[float]

    def evaluate(self, score, batch_size):
        self.found.append(round(0.1 * (len(self.found) + 1), 1))
        return {"mlm_accuracy": self.found[-1]}


@pytest.fixture
def evaluations() -> list[float]:
    """The accuracies of the runs with `scored` so far."""
    return []


@pytest.fixture
def scored_run(train, evaluations):
    """Trains with the accuracies of `Scored`."""

    def change_task(task):
        scored = Scored(*(getattr(task, field.name) for field in dataclasses.fields(task)))
        scored.__class__.found = evaluations
        return scored

    return lambda config, workdir: train(config, workdir, change_task=change_task)


@pytest.mark.slow
def test_a_run_ends_where_it_reaches_its_target(config, scored_run, evaluations, tmp_path):
    """Evaluations are where 20, 40, 60 ... rows are reached: with 8 rows a step, then with 4."""
    workdir = tmp_path / "run"
    progress = scored_run(aiming(config, 0.3, 20), workdir)
    assert (progress.ended, progress.cursor.step, progress.cursor.rows) == ("target", 11, 60)
    assert [line["step"] for line in numbers(workdir, "validation")] == [3, 6, 11]
    assert evaluations == [0.1, 0.2, 0.3] and progress.evaluation == {"mlm_accuracy": 0.3}
    (saved,) = checkpoint.committed_checkpoint_paths(checkpoint.checkpoint_directory(workdir))
    assert saved.name == "00000011" and checkpoint.read_metadata(saved)["ended"] == "target"
    # The same command, or an easier target, does nothing more.
    before = files(workdir)
    for goal in (0.3, 0.2):
        assert scored_run(aiming(config, goal, 20), workdir) == progress
    assert files(workdir) == before and len(evaluations) == 3
    # A higher one continues the run; one that is never reached lets it end with its steps.
    progress = scored_run(aiming(config, 0.5, 20), workdir)
    assert (progress.ended, progress.cursor.step) == ("target", 21)
    progress = scored_run(aiming(config, 0.9, 20), workdir)
    assert (progress.ended, progress.cursor.step) == ("steps", 22)
    assert [line["step"] for line in numbers(workdir, "validation")] == [3, 6, 11, 16, 21, 22]
    assert [line["step"] for line in numbers(workdir, "train")] == list(range(1, 23))


@pytest.mark.slow
def test_a_finished_run_is_lengthened(config, train, tmp_path):
    """By two steps and a second phase: bit-identical to the longer run at once. With another schedule it is refused."""
    first = dataclasses.replace(config.phases[0], decay="constant")
    config = dataclasses.replace(config, evaluation=EvaluationConfig(every=0, rows=8, batch_size=8))
    longer = dataclasses.replace(config, phases=(dataclasses.replace(first, steps=6), config.phases[1]))
    whole = train(longer, tmp_path / "whole")
    progress = train(dataclasses.replace(config, phases=(first,)), tmp_path / "run")
    assert progress.cursor.step == 4 and progress.ended == "steps"
    lengthened = train(longer, tmp_path / "run")
    # One more line of metrics.jsonl: the evaluation at the first end.
    assert lengthened == dataclasses.replace(whole, metric_lines=whole.metric_lines + 1)
    assert numbers(tmp_path / "run", "train") == numbers(tmp_path / "whole", "train")
    assert numbers(tmp_path / "run", "validation")[1:] == numbers(tmp_path / "whole", "validation")
    before = files(tmp_path / "run")
    steeper = dataclasses.replace(longer, phases=(longer.phases[0], dataclasses.replace(longer.phases[1], steps=30)))
    with pytest.raises(UserError, match=r"phases.1.steps 18 -> 30.*the learning rate of step 8 was .*--init-from"):
        train(steeper, tmp_path / "run")
    assert files(tmp_path / "run") == before


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_goes_on(config, train, tmp_path):
    workdir, refused = tmp_path / "run", []

    def start_another(step, _):
        if step == 3:
            with pytest.raises(UserError, match=r"run is in use by process \d+ on "):
                train(aiming(config, 1.0, 200), workdir)
            refused.append(step)

    train(aiming(config, 1.0, 200), workdir, before_step=start_another)
    assert refused == [3] and [line["step"] for line in numbers(workdir, "train")] == list(range(1, 23))
    assert not (workdir / "run.lock").exists()


@pytest.mark.slow
def test_evaluations_change_nothing_of_the_run(config, train, tmp_path):
    often = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=1))
    never = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=0))
    runs = {"often": often, "never": never, "by rows": aiming(config, 1.0, 1)}
    places = {name: train(one, tmp_path / name) for name, one in runs.items()}
    steps = {name: [line["step"] for line in numbers(tmp_path / name, "validation")] for name in runs}
    assert steps == {"often": list(range(1, 23)), "never": [22], "by rows": list(range(1, 23))}
    reference = numbers(tmp_path / "never", "train")
    assert len({line["loss"] for line in reference}) == 22
    for name, place in places.items():
        assert numbers(tmp_path / name, "train") == reference, name
        assert place == dataclasses.replace(places["never"], metric_lines=len(reference) + len(steps[name])), name


@pytest.mark.parametrize(
    ("batch_size", "rows"),
    [
        # As NVIDIA's submissions to MLPerf Training set them: 8 and 512 DGX A100 with 48 and 3 rows a GPU.
        (3_072, 175_000),
        (12_288, 275_000),
        # By hand: 0.05 * (230.23 * 8192 + 3,000,000) is 244,302.2.
        (8_192, 225_000),
        (448, 150_000),
        (65_536, 900_000),
        (1, 150_000),
    ],
)
def test_mlperf_says_how_often(batch_size, rows):
    assert TargetConfig(0.72).rows_between_evaluations(batch_size) == rows
    assert TargetConfig(0.72, every_rows=1000).rows_between_evaluations(batch_size) == 1000


@pytest.mark.slow
def test_an_mlperf_run_evaluates_by_its_formula(config, scored_run, tmp_path, monkeypatch):
    """The loop asks for the batch size of the phase that it is in."""
    asked = []

    def rows_between_evaluations(self, batch_size):
        asked.append(batch_size)
        return 52

    monkeypatch.setattr(TargetConfig, "rows_between_evaluations", rows_between_evaluations)
    scored_run(aiming(config, 1.0), tmp_path / "run")
    assert asked == [8] * 4 + [4] * 18
    assert [line["step"] for line in numbers(tmp_path / "run", "validation")] == [9, 22]
