"""The moving average of the parameters: its values, and what is evaluated and exported; test_fork.py resumes a run."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import CheckpointConfig, Config
from bert_jax.convert.formats.format import ReadOptions
from bert_jax.convert.formats.input_formats import open_model
from bert_jax.data.mixture import CorpusWeight
from bert_jax.inference import loaded_model
from bert_jax.training import pretraining, programs
from bert_jax.training.divergence import init_divergence_state
from bert_jax.training.run_directory.metrics import read_metrics
from bert_jax.training.state import TrainState
from tests.runs import arrays, final_state

STEPS, DECAY = 4, 0.3


@pytest.fixture(scope="module")
def config(plain_config) -> Config:
    phase = dataclasses.replace(plain_config.phases[0], steps=STEPS, warmup_steps=0)
    return dataclasses.replace(
        plain_config,
        phases=(phase,),
        optimizer=dataclasses.replace(plain_config.optimizer, ema_decay=DECAY),
        checkpoint=CheckpointConfig(every=2, keep=9),
    )


def test_the_average_is_evaluated_and_exported(config, train, tiny_corpus, tiny_programs, tmp_path):
    trained = []

    def keep(count, state):
        trained.append(arrays(state.params))
        return state

    train(config, tmp_path / "run", after_step=keep)
    state, _ = final_state(tmp_path / "run", config)
    with open_model(tmp_path / "run" / "checkpoints" / "00000002", ReadOptions()) as middle:
        expected = arrays(middle.model.params)
    for step in (2, 3):
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * array for name, array in trained[step].items()}
    found, params = arrays(state.average), arrays(state.params)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7)
    assert max(np.abs(found[name] - params[name]).max() for name in params) > 1e-4
    exported = loaded_model.load(tmp_path / "run")
    assert all(np.array_equal(array, found[name]) for name, array in arrays(exported.params).items())
    with open_model(tmp_path / "run", ReadOptions(optimizer_state=True)) as source:
        assert all(np.array_equal(array, params[name]) for name, array in arrays(source.model.params).items())
    with open_model(tmp_path / "run", ReadOptions()) as source:
        assert "moving average" in source.notes[-1] and "decay 0.3" in source.notes[-1]
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    scored = pretraining.evaluate(tmp_path / "run", [CorpusWeight(tiny_corpus)], make_programs=tiny_programs()).metrics
    assert scored["mlm_loss"] == pytest.approx(logged["mlm_loss"], rel=1e-6)


def test_the_first_averages_and_a_skipped_step():
    """The decay grows to that of the config; a step that changes no parameter changes no average."""
    average, params = {"a": jnp.asarray([1.0, -2.0])}, {"a": jnp.asarray([3.0, 4.0])}
    for step, decay in ((0, 0.1), (8, 0.5), (10**6, 0.9)):
        state = TrainState(jnp.int32(step), params, None, init_divergence_state(), average)
        found = programs._next_average(state, params, 0.9, jnp.asarray(False))["a"]
        np.testing.assert_allclose(found, decay * average["a"] + (1 - decay) * params["a"], rtol=1e-6)
        skipped = programs._next_average(state, params, 0.9, jnp.asarray(True))["a"]
        assert skipped.tobytes() == average["a"].tobytes()
    assert state.evaluated_params is average
    assert dataclasses.replace(state, average=None).evaluated_params is params
