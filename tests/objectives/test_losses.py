"""Losses of masked rows, against numpy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from bert_jax.config import Config, DataConfig, ModelConfig, ObjectiveConfig, Phase
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.objectives import masked_lm
from bert_jax.objectives.objectives import Models, active_objectives, pretraining_sums
from bert_jax.training.pretraining_task import Pretraining
from bert_jax.training.programs import combine
from tests.objectives.masking_batches import KEY, OBJECTIVE, VOCABULARY, make_batch, masked

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=24, max_positions=48)


@functools.lru_cache
def parameters(pair: bool):
    params = jax.jit(lambda key: bert.init(CONFIG, key, Heads(pair=pair)))(jax.random.key(1))
    return jax.tree.map(
        lambda x: x + 0.2 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32), params
    )


@jax.jit
def sums_of(params, batch):
    pair = "pair" in params
    objectives = active_objectives(CONFIG, ObjectiveConfig(pair="nsp" if pair else "none"))
    models = Models(bert.model_from_params(CONFIG, Heads(pair=pair), params))
    return pretraining_sums(objectives, models, batch, None)


def loss_weights(batch, objective):
    """By name of the objective."""
    return {name: float(one.weight(batch)) for name, one in active_objectives(CONFIG, objective).items()}


@jax.jit
def logits_of(params, batch):
    """Of every position, and of every slot."""
    model = bert.model_from_params(CONFIG, Heads(pair="pair" in params), params)
    output = model.encoder(EncoderInputs(*(batch[name] for name in EncoderInputs._fields)))
    return model.mlm(output.hidden, model.encoder.embeddings.word[...]), model.pair(output.pooled)


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_losses_are_sums_and_counts():
    """Against numpy, on packed rows of which one has a slot without an example."""
    before = make_batch([[(11, 20), (5, 24)], [(9, 16)], []], 48)
    batch = masked(before, KEY, OBJECTIVE, VOCABULARY)
    params = parameters(True)
    sums = jax.tree.map(float, sums_of(params, batch))
    every, pair = map(np.asarray, logits_of(params, batch))
    logits = np.take_along_axis(every, np.asarray(batch["target_positions"])[:, :, None], 1)
    real = np.asarray(batch["target_weights"]) > 0
    labels = np.asarray(batch["target_labels"])
    picked = np.take_along_axis(log_softmax(logits), labels[:, :, None], 2)[:, :, 0]
    assert real.sum() == 3 + 4 + 2
    np.testing.assert_allclose(sums["mlm_loss"], (-picked[real].sum(), 9), rtol=1e-5)
    np.testing.assert_allclose(sums["mlm_accuracy"], ((logits.argmax(-1) == labels)[real].sum(), 9))
    partitions = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(sums["mlm_z_loss"], ((partitions[real] ** 2).sum(), 9), rtol=1e-5)

    exists = np.asarray(batch["example_id"]) >= 0
    classes = np.asarray(batch["pair_labels"])
    picked = np.take_along_axis(log_softmax(pair), classes[:, :, None], 2)[:, :, 0]
    np.testing.assert_allclose(sums["pair_loss"], (-picked[exists].sum(), 3), rtol=1e-5)
    np.testing.assert_allclose(sums["pair_accuracy"], ((pair.argmax(-1) == classes)[exists].sum(), 3))
    np.testing.assert_allclose(sums["pair_negatives"], (classes[exists].sum(), 3))
    weights = loss_weights(batch, OBJECTIVE)
    assert weights == {"mlm": 9.0, "pair": 3.0}


def test_without_a_pair_objective_there_are_no_pair_terms():
    batch = masked(make_batch([[(1, 48)]], 48), KEY, OBJECTIVE, VOCABULARY)
    assert set(sums_of(parameters(False), batch)) == {"mlm_loss", "mlm_accuracy", "mlm_z_loss"}
    assert set(loss_weights(batch, ObjectiveConfig(pair="none"))) == {"mlm"}


def test_the_z_loss_is_a_term_on_request():
    """Of the loss and of its metrics; its factor divides the weight."""
    batch = masked(make_batch([[(1, 48)]], 48), KEY, OBJECTIVE, VOCABULARY)
    phase, data = Phase(seq_len=48), DataConfig(format="full_sentences")
    config = Config("z", CONFIG, objective=ObjectiveConfig(pair="none"), data=data, phases=(phase,))
    for z_loss, terms in ((0.0, {"mlm_loss"}), (1e-2, {"mlm_loss", "mlm_z_loss"})):
        objective = dataclasses.replace(config.objective, z_loss=z_loss)
        task = Pretraining(dataclasses.replace(config, objective=objective), VOCABULARY)
        weights, sums = task.loss_weight_sums(batch), task.sums(parameters(False), batch, None)
        assert set(weights) == terms and set(sums) == terms | {"mlm_accuracy"}
    mlm, z = sums["mlm_loss"], sums["mlm_z_loss"]
    np.testing.assert_allclose(combine(sums, weights), (mlm.sum + 0.01 * z.sum) / mlm.weight, rtol=1e-6)


def test_mask_rates_of_phases():
    """Each phase has its own; evaluation has 15 % in all, and FLOPs count what is predicted."""
    batch = make_batch([[(1, 46)]], 48)
    rates = Phase(seq_len=48, mask_rate=0.3), Phase(seq_len=48)
    objective = ObjectiveConfig(pair="none", mask_rate=0.1)
    config = Config("rates", CONFIG, objective=objective, data=DataConfig(format="full_sentences"), phases=rates)
    predicted, held_out = [], []
    for phase in (0, 1):
        task = Pretraining(config, VOCABULARY, phase=phase)
        predicted.append(float(task.prepare(batch, jax.numpy.uint32(7))["target_weights"].sum()))
        held_out.append(np.asarray(task.prepare(batch, None)["target_positions"]).tobytes())
    assert predicted == [round(0.3 * 48), round(0.1 * 48)] and held_out[0] == held_out[1]
    assert masked_lm.predictions_per_example(config, 0) == 14 and masked_lm.predictions_per_example(config, 1) == 5


def test_a_mask_rate_that_changes_along_a_phase():
    """Linearly, from the first step to after the last; the next phase has its own."""
    batch = make_batch([[(1, 46)]], 48)
    phases = Phase(steps=4, seq_len=48, mask_rate=0.3, end_mask_rate=0.1), Phase(seq_len=48)
    objective, data = ObjectiveConfig(pair="none", mask_rate=0.15), DataConfig(format="full_sentences")
    config = Config("rates", CONFIG, objective=objective, data=data, phases=phases)
    rates = [config.mask_rate_at(0, step) for step in range(5)]
    np.testing.assert_allclose(rates, [0.3, 0.25, 0.2, 0.15, 0.1], rtol=1e-12)
    assert rates[0] == 0.3 and config.mask_rate_at(1, 0) == config.mask_rate_at(1, 99) == 0.15
    assert masked_lm.mask_counts_at(config, 4) is None
    predicted = []
    for step in range(4):
        counts = jax.numpy.asarray(masked_lm.mask_counts_at(config, step))
        after = Pretraining(config, VOCABULARY, phase=0).prepare(batch, jax.numpy.uint32(7), counts)
        assert after["target_weights"].shape == (1, 14)
        predicted.append(int(after["target_weights"].sum()))
    assert predicted == [14, 12, 9, 7] == [round(rate * 46) for rate in rates[:4]]
    rising = dataclasses.replace(config, phases=(dataclasses.replace(phases[0], end_mask_rate=0.5),))
    for one, largest in ((config, 14), (rising, 24)):
        assert masked_lm.predictions_per_example(one, 0) == largest


def test_an_example_without_a_label_has_no_pair_loss():
    """The label is -1."""
    batch = masked(make_batch([[(11, 20), (5, 24)], [(9, 16)]], 48), KEY, OBJECTIVE, VOCABULARY)
    without = batch | {"pair_labels": batch["pair_labels"].at[0, 1].set(-1)}
    left = batch | {"example_id": batch["example_id"].at[0, 1].set(-1)}
    params = parameters(True)
    every, some, gone = (jax.tree.map(float, sums_of(params, rows)) for rows in (batch, without, left))
    for name in ("pair_loss", "pair_accuracy"):
        assert (every[name].weight, some[name].weight) == (3.0, 2.0)
        np.testing.assert_allclose(some[name], gone[name], rtol=1e-6)
    assert every["pair_loss"].sum > some["pair_loss"].sum + 0.1
    assert some["mlm_loss"] == every["mlm_loss"]
    assert loss_weights(without, OBJECTIVE)["pair"] == 2.0

    alone = {name: array[:1] for name, array in without.items()}
    nothing = alone | {"pair_labels": alone["pair_labels"].at[0, 0].set(-1)}
    assert all(float(part) == 0.0 for part in sums_of(params, nothing)["pair_loss"])


def test_empty_rows_have_weight_zero():
    full = make_batch([[(1, 48)], [(2, 30)]], 48)
    padded = make_batch([[(1, 48)], [], [(2, 30)], []], 48)
    one, two = (sums_of(parameters(True), masked(batch, KEY, OBJECTIVE, VOCABULARY)) for batch in (full, padded))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-5, err_msg=name)
    empty = sums_of(parameters(True), masked(make_batch([[], []], 48, slots=1), KEY, OBJECTIVE, VOCABULARY))
    assert all(float(part) == 0.0 for value in empty.values() for part in value)
