"""A run with every schedule: what each step predicts, and that it ends the same wherever it is killed."""

import contextlib
import dataclasses
import functools
import itertools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.config.presets import load_config
from bert_jax.data.cursor import Cursor
from bert_jax.data.mixture import CorpusWeight
from bert_jax.objectives.losses import WeightedSum
from bert_jax.run_report import metric_blocks, run_files, sections
from bert_jax.training import pretraining
from bert_jax.training.pretraining_task import Pretraining
from tests.runs import Killed, arrays, assert_same_run, kill_after, numbers
from tests.training.schedules_config import STEPS

CONFIG = Path(__file__).with_name("schedules_config.py")


@dataclasses.dataclass(frozen=True)
class CountedPretraining(Pretraining):
    """Also measures the number of predictions of a step."""

    def sums(self, params, batch, dropout_key):
        count = WeightedSum(batch["target_weights"].sum(), jnp.ones(()))
        return super().sums(params, batch, dropout_key) | {"predictions": count}


def counted(task: Pretraining) -> CountedPretraining:
    return CountedPretraining(*(getattr(task, field.name) for field in dataclasses.fields(Pretraining)))


@pytest.fixture(scope="module")
def config():
    return load_config(str(CONFIG))


@pytest.fixture(scope="module")
def run(config, train):
    return functools.partial(train, config, change_task=counted)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """The run, undisturbed."""
    workdir = tmp_path_factory.mktemp("schedules") / "run"
    assert run(workdir).ended == "steps"
    return workdir


def predictions(rows: dict, rate: float | None, special_ids) -> int:
    """The number of tokens that a step predicts, example by example; without a rate, all but the first."""
    count = 0
    for ids, segments in zip(rows["input_ids"], rows["segment_ids"], strict=True):
        for example in range(1, segments.max() + 1):
            tokens = ids[segments == example]
            ordinary = int((~np.isin(tokens, special_ids)).sum())
            count += len(tokens) - 1 if rate is None else min(max(1, round(rate * len(tokens))), ordinary)
    return count


def test_every_step_has_the_objective_and_mask_rate_of_its_schedule(config, whole, tiny_corpus):
    """Rates and numbers of predictions, worked out here from the rows."""
    rates = [None] * 5 + [0.2 + (0.4 - 0.2) * s / 4 for s in range(4)] + [0.3 + (0.05 - 0.3) * s / 6 for s in range(6)]
    lines, task = numbers(whole, "train"), pretraining.open_task(config, [CorpusWeight(tiny_corpus)])
    assert [line.get("mask_rate") for line in lines] == rates
    assert [("causal_loss" in line, "mlm_loss" in line) for line in lines] == [
        (r is None, r is not None) for r in rates
    ]
    with contextlib.closing(task.batches(Cursor())) as batches:
        expected = [
            predictions(batch.rows, rate, task.vocabulary.special_ids)
            for batch, rate in zip(batches, rates, strict=True)
        ]
    assert [line["predictions"] for line in lines] == expected
    assert len(set(expected)) > 10


def test_evaluation_has_the_objective_of_the_phase(whole, tiny_corpus):
    """After step 5, the last of the causal phase, then after 10 and 15; `evaluate` repeats the last one."""
    lines = numbers(whole, "validation")
    assert [("causal_loss" in line, "mlm_loss" in line) for line in lines] == [(True, False), *[(False, True)] * 2]
    found = pretraining.evaluate(whole, [CorpusWeight(tiny_corpus)]).metrics
    np.testing.assert_allclose(found["mlm_loss"], lines[-1]["mlm_loss"], rtol=1e-5)


def test_a_checkpoint_has_the_model_of_its_phase(config, whole):
    """Of the first phase, whose parameters are those of a masked model, and of the last one."""
    assert [config.model_of(i).local_rotary_base for i in range(3)] == [30.0, 30.0, 10000.0]
    trees = []
    for step, direction, base in ((4, "causal", 100.0), (8, "bidirectional", 100.0), (12, "bidirectional", 400.0)):
        model = bert_jax.load(whole / "checkpoints" / f"{step:08d}")
        assert (model.config.direction, model.config.rotary_base) == (direction, base)
        assert np.isfinite(model.encode(["the river sings"], pooling="mean")).all()
        trees.append({name: array.shape for name, array in arrays(model.params).items()})
    assert trees[0] == trees[1] == trees[2]
    assert model.fill_mask("the [MASK] sings.")


def test_the_report_ends_with_the_last_objective(whole):
    """The causal phase is in the curves only, beside the baseline of its own targets."""
    (run,) = run_files.read_runs([whole])
    (_, table), curves = metric_blocks.final_metrics(run), metric_blocks.held_out_curves([run])
    assert {row[0] for row in table.rows} >= {"mlm_loss", "mask_rate"}
    assert not any("causal" in row[0] for row in table.rows)
    steps = {one.title: [series.x for series in one.series] for one in curves}
    assert steps["causal_loss, held out"] == [(5,)] * 2 and steps["mlm_loss, held out"] == [(10, 15)] * 2


@pytest.mark.slow
def test_a_run_that_stopped_in_its_causal_phase(whole, tiny_corpus, tmp_path):
    """It is evaluated as a causal model, and fills no masks."""
    cut = Path(shutil.copytree(whole, tmp_path / "run"))
    for save in (cut / "checkpoints").iterdir():
        if int(save.name) > 4:
            shutil.rmtree(save)
    assert "causal_loss" in pretraining.evaluate(cut, [CorpusWeight(tiny_corpus)]).metrics
    assert sections.filled_masks(run_files.read_runs([cut]), ["the [MASK] sings."]) is None


@pytest.mark.slow
def test_killed_at_random_moments(config, whole, run, tmp_path):
    """Once at each border of two phases, and three times elsewhere."""
    moments = np.random.default_rng(0).choice(np.arange(1, sum(STEPS)), 3, replace=False).tolist()
    for moment in sorted({*moments, *itertools.accumulate(STEPS[:2])}):
        with pytest.raises(Killed):
            run(tmp_path / "run", after_step=kill_after(moment))
    run(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole, config)
