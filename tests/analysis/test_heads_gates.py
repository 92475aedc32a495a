"""Gates of heads: formulas against NumPy, open gates change nothing, the penalty closes gates, frozen weights stay."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from bert_jax.analysis.heads import SUITE, gates
from bert_jax.analysis.heads.gate_training import GateTraining, train_gates
from bert_jax.analysis.heads.heads import HeadsSettings
from bert_jax.analysis.result_files import _plain
from bert_jax.analysis.suite import SuiteInputs
from bert_jax.config import TaskHead
from bert_jax.convert.formats import input_formats
from bert_jax.errors import UserError
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves
from tests.finetune import task_files, tiny_task
from tests.interventions.models import small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")
HEADS = Heads(mlm=False, task=TaskHead("classification", ("0", "1"), "pooled"))
OPTIONS = FinetuneOptions(steps=12, batch_size=8, learning_rate=0.0, keep_head=True, dropout=0.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def test_formulas():
    rng = np.random.default_rng(0)
    log_alpha, uniform = (jnp.asarray(x, jnp.float32) for x in (rng.normal(0, 2, (3, 4)), rng.random((3, 4))))
    stretched = sigmoid((np.log(uniform / (1 - uniform)) + log_alpha) / 0.33) * 1.2 - 0.1
    np.testing.assert_allclose(gates.sample_gates(log_alpha, uniform), np.clip(stretched, 0, 1), atol=1e-5)
    np.testing.assert_allclose(gates.fixed_gates(log_alpha), np.clip(sigmoid(log_alpha) * 1.2 - 0.1, 0, 1), atol=1e-6)
    expected = sigmoid(log_alpha - 0.33 * np.log(0.1 / 1.1))
    np.testing.assert_allclose(gates.open_probabilities(log_alpha), expected, atol=1e-6)


def test_samples_are_open_as_often_as_the_probability_says():
    log_alpha = jnp.array([[-3.0, -1.5], [-0.5, 0.5]])
    seeds = jnp.arange(3000, dtype=jnp.uint32)
    uniform = jax.vmap(lambda seed: gates.uniform_numbers(DropoutKey(seed, jnp.arange(2)), (2, 2)))(seeds)
    assert uniform.min() > 0 and uniform.max() < 1 and np.ptp(np.asarray(uniform.mean(0))) < 0.05
    share = (jax.vmap(lambda one: gates.sample_gates(log_alpha, one))(uniform) > 0).mean(0)
    np.testing.assert_allclose(share, gates.open_probabilities(log_alpha), atol=0.03)


@pytest.fixture(scope="module")
def tasks():
    """Fine-tuning, and the same task with gates; a batch."""
    plain = tiny_task.make_task(tiny_task.HEAD)
    fields = (getattr(plain, field.name) for field in dataclasses.fields(plain))
    batch = next(iter(plain.train.in_order(8)))
    return plain, gates.GatedFineTuning(*fields, penalty=0.5), jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("key", [None, DropoutKey(jnp.uint32(0), jnp.arange(2))])
def test_gates_with_large_log_alpha_change_nothing(tasks, key):
    plain, gated, batch = tasks
    params = gated.init_params(jax.random.key(0))
    assert params["gates"]["log_alpha"].shape == (2, 2)
    key = key and key._replace(rows=jnp.arange(len(batch["input_ids"])))
    without = FineTuning.sums(plain, {k: v for k, v in params.items() if k != "gates"}, batch, key)
    found = {}
    for value in (20.0, -20.0, 0.0):
        params["gates"]["log_alpha"] = jnp.full((2, 2), value)
        found[value] = gated.sums(params, batch, key)
    np.testing.assert_array_equal(found[20.0]["task_loss"].sum, without["task_loss"].sum)
    assert abs(found[-20.0]["task_loss"].sum - without["task_loss"].sum) > 1e-3
    total, weight = found[0.0]["gate_penalty"]
    assert weight == without["task_loss"].weight == gated.loss_weight_sums(batch)["gate_penalty"]
    expected = 4 * sigmoid(-0.33 * np.log(0.1 / 1.1))
    np.testing.assert_allclose(
        [total / weight, found[0.0]["expected_open_heads"].sum / weight], [expected / 2, expected]
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("gates")
    task_files.write_glue(directory / "task", "sst2")
    return SuiteInputs(small_model(HEADS), epath.Path(directory), 0, False)


def train(inputs, workdir, penalty, weights_rate):
    options = dataclasses.replace(OPTIONS, learning_rate=weights_rate)
    return train_gates(inputs, GateTraining("sst2", options, 24, penalty, 1.0), epath.Path(workdir))


@pytest.mark.slow
def test_the_penalty_closes_gates_of_frozen_weights(inputs, tmp_path):
    found = train(inputs, tmp_path / "run", 100.0, 0.0)
    assert found["closed"] == 6 and not np.any(found["gates"]) and not found["weights_trained"]
    assert found["under_gates"] == found["closed_removed"] == found["random_removed"] != found["all_open"]
    with input_formats.open_model(tmp_path / "run") as opened:
        before, after = name_leaves(inputs.model.params), name_leaves(opened.model.params)
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[path], leaf) for path, leaf in after.items())
    again = train(inputs, tmp_path / "run", 100.0, 0.0)
    assert json.dumps(_plain(again, "")) == json.dumps(_plain(found, ""))
    with pytest.raises(UserError, match="gate-penalty"):
        train(inputs, tmp_path / "run", 1.0, 0.0)


@pytest.mark.slow
def test_without_penalty_weights_are_trained_and_gates_stay_open(inputs, tmp_path):
    found = train(inputs, tmp_path / "run", 0.0, 1e-3)
    assert found["closed"] == 0 and found["weights_trained"]
    with input_formats.open_model(tmp_path / "run") as opened:
        before, after = name_leaves(inputs.model.params), name_leaves(opened.model.params)
        assert not np.array_equal(before["encoder/layers/up/kernel"], after["encoder/layers/up/kernel"])


@pytest.mark.slow
def test_the_suite_trains_gates(inputs, tmp_path):
    settings = HeadsSettings(
        task="sst2", examples=4, random_orders=1, step=1.0, gates_to=str(tmp_path / "run"), gate_steps=2
    )
    result = _plain(SUITE.run(inputs, settings), "heads")
    assert np.shape(result["gates"]["gates"]) == (3, 2) and result["gates"]["steps"] == 2
    assert len(SUITE.blocks(result)) == len(SUITE.blocks(result | {"gates": None})) + 3
    assert "give --heads.task" in SUITE.obstacle(inputs, dataclasses.replace(settings, task=""))
