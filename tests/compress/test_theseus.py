"""BERT-of-Theseus: at rate 0 the mixed model is the teacher, at rate 1 the student, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.compress.compression_options import CompressOptions
from bert_jax.compress.distil_task import FROZEN_IN_THESEUS, REPLACED
from bert_jax.compress.matches import RECIPES, Replacement
from bert_jax.compress.teacher_task import TEACHER as TEACHER_PATH
from bert_jax.compress.teacher_task import student_of
from bert_jax.compress.theseus import applied_layers, draw_replaced, module_of_layers
from bert_jax.config import ModelConfig
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from tests.compress.distillation import TEACHER, initial_params, make_distillation, make_state, recipe_of
from tests.finetune.tiny_task import MODEL, arrays, first_batch, make_programs, make_task, take_step

pytestmark = pytest.mark.usefixtures("quick_compilation")


def with_replaced(rows, replaced):
    return rows | {REPLACED: np.tile(np.array(replaced, np.int32), (len(rows["row"]), 1))}


def mixed_logits(task, params, rows, replaced):
    """Logits of the mixed model in training, without dropout."""
    batch = jax.tree.map(jnp.asarray, with_replaced(rows, replaced))
    return np.asarray(jax.jit(lambda params, batch: task._mixed_forward(params, batch, None)[1])(params, batch))


def logits_alone(task, model_config, params, rows):
    """Logits of one model, whose last layer computes all positions."""

    def forward(params, batch):
        model = bert.model_from_params(model_config, task.student.heads, params)
        inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
        return model.task_logits(inputs, model.task_view(inputs, model.encoder(inputs, pool=False)))

    return np.asarray(jax.jit(forward)(params, jax.tree.map(jnp.asarray, rows)))


@pytest.fixture(scope="module")
def task():
    return make_distillation(recipe_of("theseus"))


@pytest.fixture(scope="module")
def params(task):
    """Embeddings and head of the student are the teacher's."""
    params = initial_params(task)
    teacher = params[TEACHER_PATH]
    encoder = teacher["encoder"] | {"layers": params["encoder"]["layers"]}
    return params | teacher | {"encoder": encoder}


def test_the_rates_of_the_two_ends(task, params):
    rows = first_batch(task.student)
    teacher = logits_alone(task, TEACHER, params[TEACHER_PATH], rows)
    student = logits_alone(task, MODEL, student_of(params), rows)
    assert np.abs(teacher - student).max() > 0.01
    assert np.array_equal(mixed_logits(task, params, rows, [0, 0]), teacher)
    assert np.array_equal(mixed_logits(task, params, rows, [1, 1]), student)


@pytest.mark.parametrize("replaced", [(1, 0), (0, 1)])
def test_a_mixed_model_has_the_layers_that_were_drawn(task, params, replaced):
    """Against a model of three layers that is put together by hand."""
    rows = first_batch(task.student)
    teacher, student = params[TEACHER_PATH]["encoder"]["layers"], params["encoder"]["layers"]
    groups = [
        (student, [0]) if replaced[0] else (teacher, [0, 1]),
        (student, [1]) if replaced[1] else (teacher, [2, 3]),
    ]
    parts = [jax.tree.map(lambda x, chosen=chosen: x[np.array(chosen)], stack) for stack, chosen in groups]
    layers = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    by_hand = student_of(params) | {"encoder": params["encoder"] | {"layers": layers}}
    three = dataclasses.replace(MODEL, num_layers=3)
    expected = logits_alone(task, three, by_hand, rows)
    assert np.array_equal(mixed_logits(task, params, rows, replaced), expected)


@pytest.mark.slow
def test_steps_at_the_two_ends(task, params):
    """With all modules replaced, a step is that of the student alone with the same parameters frozen; with none,
    there is no gradient. One compiled program has both."""
    programs, state = make_state(task)
    state = dataclasses.replace(state, params=jax.tree.map(jnp.array, params))
    before, rows = arrays(params), first_batch(task.student)
    state, kept = take_step(programs, state, rows=with_replaced(rows, [0, 0]))
    assert kept["replaced_share"] == 0 and not any(leaf.any() for leaf in arrays(state.optimizer.mu).values())
    _, state = make_state(task)
    state = dataclasses.replace(state, params=jax.tree.map(jnp.array, params))
    state, metrics = take_step(programs, state, rows=with_replaced(rows, [1, 1]))
    trained, moments = arrays(state.params), arrays(state.optimizer.mu)

    alone = make_programs(make_task(frozen=FROZEN_IN_THESEUS[1:]))
    student = dataclasses.replace(alone.init_state(), params=jax.tree.map(jnp.array, student_of(params)))
    student, expected = take_step(alone, student)
    assert metrics["replaced_share"] == 1 and abs(metrics["task_loss"] - kept["task_loss"]) > 1e-3
    assert metrics["task_loss"] == pytest.approx(expected["task_loss"], rel=1e-6)
    changed = {name for name in before if not np.array_equal(before[name], trained[name])}
    assert changed and all(name.startswith("encoder/layers/") for name in changed)
    for name, leaf in arrays(student.optimizer.mu).items():
        # Alone, the student's last layer computes [CLS] only, so sums over positions are rounded differently.
        np.testing.assert_allclose(moments[name], leaf, rtol=1e-4, atol=1e-7, err_msg=name)
    assert np.abs(moments["encoder/layers/up/kernel"]).max() > 1e-4


def test_draws(task):
    """They depend on seed, step and module, and their share is the rate."""
    assert not draw_replaced(1, 5, 0.0, 100).any() and draw_replaced(1, 5, 1.0, 100).all()
    drawn = np.array([draw_replaced(0, step, 0.3, 6) for step in range(2000)])
    assert np.array_equal(drawn[7], draw_replaced(0, 7, 0.3, 6))
    assert np.all(np.abs(drawn.mean(0) - 0.3) < 0.04)
    other = np.array([draw_replaced(1, step, 0.3, 6) for step in range(2000)])
    for first, second in ((drawn[:, 0], drawn[:, 1]), (drawn[:-1, 0], drawn[1:, 0]), (drawn[:, 0], other[:, 0])):
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.08


def test_the_batches_of_a_run_continue(task):
    """A batch has one draw for all its rows, which depends on the step alone."""
    recipe = task.recipe._replace(replacement=Replacement(0.5, "constant", 0.5))
    task = dataclasses.replace(task, recipe=recipe)
    batches = [batch.rows[REPLACED] for batch in task.batches(Cursor())]
    assert len(batches) == 10 and batches[0].shape == (8, 2)
    assert all((one == one[0]).all() for one in batches) and all(one.all() for one in batches[5:])
    assert len({tuple(one[0]) for one in batches}) > 1
    resumed = [batch.rows[REPLACED] for batch in task.batches(Cursor(step=3, rows=24))]
    assert all(np.array_equal(a, b) for a, b in zip(resumed, batches[3:], strict=True))
    assert task.blank_row()[REPLACED].shape == (1, 2)


def test_rates():
    linear = Replacement(0.2, "linear", 0.4)
    assert [linear.rate_at(step, 20) for step in (0, 4, 8, 19)] == pytest.approx([0.2, 0.6, 1.0, 1.0])
    constant = Replacement(0.5, "constant", 0.5)
    assert [constant.rate_at(step, 10) for step in (0, 4, 5, 9)] == [0.5, 0.5, 1.0, 1.0]
    assert Replacement(0.0, "constant", 1.0).rate_at(9, 10) == 0 and Replacement(0.5, "linear", 0.0).rate_at(0, 10) == 1


def test_modules():
    assert module_of_layers(12, 6).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert module_of_layers(12, 5).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    applied = applied_layers(jnp.array([True, False]), 5)
    assert applied.tolist() == [False, False, False, True, True, True, False]


def test_flops(task):
    """At rate 1 those of the student alone; at rate 0 those of the teacher's layers."""
    at = {
        rate: dataclasses.replace(task, recipe=task.recipe._replace(replacement=Replacement(rate, "constant", 0.5)))
        for rate in (0.0, 1.0)
    }
    assert at[1.0].step_flops(0) == task.student.step_flops(0) == at[0.0].step_flops(9)
    assert at[0.0].step_flops(0) == 2 * at[1.0].step_flops(0)


def test_options():
    plan = CompressOptions(recipe="theseus", replace_rate=0.5, replace_schedule="constant").plan(ModelConfig())
    assert plan.recipe.replacement == Replacement(0.5, "constant", 0.5) and plan.layers == (0, 1, 2, 3, 4, 5)
    assert RECIPES["theseus"](12, 6, None).replacement == Replacement()


def test_refused_models(tmp_path):
    matches = tmp_path / "matches.json"
    matches.write_text('[{"teacher_layer": 6, "student_layer": 3, "what": "cls", "loss": "cosine"}]')
    with pytest.raises(UserError, match="has no matches: leave --matches out"):
        CompressOptions(recipe="theseus", matches=str(matches)).plan(ModelConfig())
    with pytest.raises(UserError, match="the teacher's first layer differs"):
        CompressOptions(recipe="theseus").plan(ModelConfig(norm_placement="pre"))
