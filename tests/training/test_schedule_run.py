"""A run with every schedule: what each step predicts, and that it ends the same wherever it is killed."""

import contextlib
import dataclasses
import functools
import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bert_jax
from bert_jax.config.presets import load_config
from bert_jax.data.cursor import Cursor
from bert_jax.data.mixture import CorpusWeight
from bert_jax.objectives.losses import WeightedSum
from bert_jax.training import pretraining
from bert_jax.training.pretraining_task import Pretraining
from tests.runs import Killed, assert_same_run, kill_after, numbers
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


def predictions(rows: dict, rate: float, special_ids) -> int:
    """The number of tokens that masking predicts in a batch, example by example."""
    count = 0
    for ids, segments in zip(rows["input_ids"], rows["segment_ids"], strict=True):
        for example in range(1, segments.max() + 1):
            tokens = ids[segments == example]
            count += min(max(1, round(rate * len(tokens))), int((~np.isin(tokens, special_ids)).sum()))
    return count


def test_every_step_has_the_mask_rate_of_its_schedule(config, whole, tiny_corpus):
    """Rates and numbers of predictions, worked out here from the rows."""
    rates = [0.2 + (0.4 - 0.2) * s / 6 for s in range(6)] + [0.3 + (0.05 - 0.3) * s / 5 for s in range(5)]
    lines, task = numbers(whole, "train"), pretraining.open_task(config, [CorpusWeight(tiny_corpus)])
    assert [line.get("mask_rate") for line in lines] == [*rates, *[None] * STEPS[2]]
    with contextlib.closing(task.batches(Cursor())) as batches:
        expected = [
            predictions(batch.rows, rate, task.vocabulary.special_ids)
            for batch, rate in zip(batches, [*rates, *[0.1] * STEPS[2]], strict=True)
        ]
    assert [line["predictions"] for line in lines] == expected
    assert len(set(expected)) > 10


def test_the_phases_have_their_own_rotary_bases(config, whole):
    """Before the change of base, the model that is read from the run has the first one."""
    bases = [(config.model_of(i).rotary_base, config.model_of(i).local_rotary_base) for i in range(3)]
    assert bases == [(100.0, 30.0), (400.0, 10000.0), (400.0, 10000.0)]
    for step, base in ((4, 100.0), (8, 400.0)):
        model = bert_jax.load(whole / "checkpoints" / f"{step:08d}")
        assert model.config.rotary_base == base
        assert np.isfinite(model.encode(["the river sings"])).all()


@pytest.mark.slow
def test_killed_at_random_moments(config, whole, run, tmp_path):
    """Three runs, each killed five times, once at a border of two phases."""
    rng = np.random.default_rng(0)
    borders = list(itertools.accumulate(STEPS))
    for attempt in range(3):
        moments = sorted({*rng.choice(np.arange(1, sum(STEPS)), 4, replace=False).tolist(), borders[attempt % 2]})
        for moment in moments:
            with pytest.raises(Killed):
                run(tmp_path / str(attempt), after_step=kill_after(moment))
        run(tmp_path / str(attempt))
        assert_same_run(tmp_path / str(attempt), whole, config)
