"""Normalised [CLS] vectors in fine-tuning: their statistics, in a step, in evaluation and in files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import MeshConfig
from bert_jax.convert.formats import input_formats, native
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import UserError
from bert_jax.finetune.cls_statistics import fit_cls_norm, fit_cls_norm_to_task
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.training.micro_batch import choose_accumulations
from bert_jax.training.sharding import put_rows
from tests.finetune.tiny_task import ROWS, arrays, first_batch, make_programs, make_task, take_step, with_cls_norm

pytestmark = pytest.mark.usefixtures("quick_compilation")


def features_and_plain(task, params, rows):
    """What the head reads of all examples of a batch, and their [CLS] vectors, [examples, H]."""
    model = bert.model_from_params(task.config.model, task.heads, jax.tree.map(jnp.asarray, params))
    inputs, used = EncoderInputs(*(jnp.asarray(rows[name]) for name in EncoderInputs._fields)), rows["example_id"] >= 0
    output = model.encoder(inputs)
    cls = np.take_along_axis(np.asarray(output.hidden), rows["cls_positions"][:, :, None], 1)
    return np.asarray(model.task_features(inputs, model.encode(inputs))[0])[used], cls[used]


def all_rows(task):
    """All training rows as one batch."""
    parts = list(task.train.in_order(ROWS))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("kind", ["centre", "standardise"])
def test_statistics_of_the_training_set(kind, tmp_path):
    task = make_task(with_cls_norm(kind, reads="cls"))
    params = jax.device_get(task.init_params(jax.random.key(0)))
    rows = all_rows(task)
    before = features_and_plain(task, params, rows)[0]
    assert np.abs(before.mean(0)).max() > 0.1
    fitted = fit_cls_norm_to_task(task, make_programs(task).mesh, params)
    normalised, cls = features_and_plain(task, fitted, rows)
    assert len(cls) == len(task.train)
    np.testing.assert_allclose(normalised.mean(0), 0, atol=1e-5)
    if kind == "standardise":
        np.testing.assert_allclose(normalised.std(0), 1, atol=1e-4)
    for parts in (1, 7):
        again = fit_cls_norm(params, np.array_split(cls, parts))
        np.testing.assert_allclose(again["task"]["cls_norm"]["mean"], cls.astype(np.float64).mean(0), atol=1e-6)
    model = NativeModel("bert", task.config.model, task.heads, fitted)
    native.write(SourceModel("bert-jax", "here", model), tmp_path)
    with input_formats.open_model(str(tmp_path)) as source_model:
        read = arrays(source_model.model.params)
    assert {name: array.tobytes() for name, array in arrays(fitted).items()} == {
        name: array.tobytes() for name, array in read.items()
    }
    with pytest.raises(UserError, match="no training examples"):
        fit_cls_norm(params, [])


def test_a_step_keeps_fixed_statistics():
    programs = make_programs(make_task(with_cls_norm("standardise", mix=True)))
    state = programs.init_state()
    state.params["task"]["cls_norm"]["mean"] += 0.5
    before = arrays(state.params)
    state, _ = take_step(programs, state)
    after = arrays((state.params, state.optimizer.mu))
    for name in ("mean", "std"):
        path = f"task/cls_norm/{name}"
        assert after[f"0/{path}"].tobytes() == before[path].tobytes() and not after[f"1/{path}"].any()
    assert (after["0/task/mix/scale"] != before["task/mix/scale"]).all() and after["1/task/mix/weights"].any()


@pytest.mark.slow
def test_running_statistics_of_batches():
    programs = make_programs(make_task(with_cls_norm("batch")))
    task, state = programs.task, programs.init_state()
    start = arrays(state.params)
    _, cls = features_and_plain(task, state.params, first_batch(task))
    batch = put_rows(first_batch(task), programs.mesh, ROWS)
    evaluated, _ = programs.eval_step(0)(state.params, batch)
    state, metrics = take_step(programs, state)
    end, moments = arrays(state.params), arrays(state.optimizer.mu)
    np.testing.assert_allclose(end["task/cls_norm/mean"], 0.1 * cls.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(end["task/cls_norm/variance"], 0.9 + 0.1 * cls.var(0), rtol=1e-4)
    assert not any("cls_norm" in name for name in metrics)
    assert not moments["task/cls_norm/mean"].any() and moments["task/cls_norm/scale"].any()
    assert (end["task/cls_norm/bias"] != start["task/cls_norm/bias"]).any()
    # Evaluation does not depend on the other examples of the batch: the first row alone has the same logits.
    alone = task.train.blank_rows(ROWS)
    for name, array in first_batch(task).items():
        alone[name][0] = array[0]
    programs_state = programs.init_state()
    single, _ = programs.eval_step(0)(programs_state.params, put_rows(alone, programs.mesh, ROWS))
    np.testing.assert_allclose(single["logits"][0], evaluated["logits"][0], rtol=1e-5, atol=1e-6)


def test_a_skipped_step_keeps_running_statistics():
    programs = make_programs(make_task(with_cls_norm("batch")))
    state = programs.init_state()
    before = arrays(state.params)
    state.params["task"]["output"]["bias"] += np.nan
    state, metrics = take_step(programs, state)
    assert metrics["skipped_steps"] == 1
    for name in ("mean", "variance"):
        assert arrays(state.params)[f"task/cls_norm/{name}"].tobytes() == before[f"task/cls_norm/{name}"].tobytes()


def test_batch_normalisation_needs_the_whole_batch():
    task = make_task(with_cls_norm("batch"))
    for accumulation, request in ((2, None), (1, 4), (1, "auto")):
        phase = dataclasses.replace(task.config.phases[0], accumulation=accumulation)
        config = dataclasses.replace(task.config, phases=(phase,), mesh=MeshConfig())
        programs = make_programs(dataclasses.replace(task, config=config))
        with pytest.raises(UserError, match=r"cls_norm batch .* set phases\.0\.accumulation 1"):
            choose_accumulations(programs, 1, request)
    assert choose_accumulations(make_programs(task), 1) == (1,)
