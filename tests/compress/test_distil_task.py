"""Distillation as a Task: every term has its value, only the student and the maps are trained, on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.compress import distillation_losses
from bert_jax.compress.matches import RECIPES, Match, Recipe
from bert_jax.compress.students import student_params
from bert_jax.compress.teacher_task import TEACHER as TEACHER_PATH
from bert_jax.compress.teacher_task import student_of
from bert_jax.config import TaskHead
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.training.param_paths import name_leaves
from tests.compress.distillation import (
    TEACHER,
    initial_params,
    make_distillation,
    make_state,
    recipe_of,
    weighted_sum,
)
from tests.finetune.tiny_task import HEAD, MODEL, arrays, first_batch, take_step

pytestmark = pytest.mark.usefixtures("quick_compilation")
NARROW = dataclasses.replace(MODEL, hidden_size=8)


def device_batch(task):
    """The rows of the first step."""
    return jax.tree.map(jax.numpy.asarray, first_batch(task.student))


def mean_terms(task):
    """A function of parameters and batch: the mean of every quantity of `Task.sums` without dropout."""
    sums = jax.jit(lambda params, batch: task.sums(params, batch, None))
    return lambda params, batch: {name: float(one.sum / one.weight) for name, one in sums(params, batch).items()}


@pytest.mark.parametrize("name", ["tinybert", "similarity", "mobilebert"])
def test_a_student_with_all_layers_has_no_loss(name):
    """The student has the teacher's weights, so all terms but that of the labels are 0; with other weights they are
    not."""
    task = make_distillation(RECIPES[name](4, 4, None), student=TEACHER)
    rng = np.random.default_rng(0)
    # Scales and biases too: vectors of a new model have the mean 0 and the variance 1.
    params = jax.tree.map(lambda x: np.float32(x + rng.normal(0, 0.1, x.shape)), initial_params(task))
    terms = mean_terms(task)
    same, other = (terms(one, device_batch(task)) for one in (params | params[TEACHER_PATH], params))
    matched = [match.name for match in task.recipe.matches]
    assert len(matched) >= 1 and all(abs(same[term]) < 1e-6 < other[term] for term in [*matched, "soft_loss"])


def test_terms_are_the_losses_of_the_layers():
    """Against the losses of hidden states and scores that the two encoders return when they are run alone."""
    matches = (
        Match(4, 2, "hidden", "cosine", 3.0),
        Match(2, 1, "cls", "normalised_mse"),
        Match(3, 0, "scores", "mse"),
        Match(0, 0, "hidden", "similarity"),
        Match(4, 2, "hidden", "standardised_mse"),
        Match(1, 1, "hidden", "mse_of_means"),
        Match(2, 1, "hidden", "variance_l1"),
        Match(2, 1, "scores", "kl"),
    )
    task = make_distillation(Recipe(matches, 2.0, 0.5, 0.25, "first"))
    params, batch = jax.device_put(initial_params(task)), device_batch(task)
    found = mean_terms(task)(params, batch)
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))

    def run(model, one):
        encoder = bert.model_from_params(model, task.student.heads, one).encoder
        return encoder(inputs, hidden_states=True, activations=("attention.scores",))

    student, teacher = run(MODEL, student_of(params)), run(TEACHER, params[TEACHER_PATH])
    tokens = (batch["segment_ids"] > 0).astype("float32")
    used = (batch["example_id"] >= 0).astype("float32")
    pairs = distillation_losses.same_example(batch["segment_ids"])
    rows = np.arange(len(tokens))[:, None], batch["cls_positions"]
    scores = student.activations["attention.scores"][0], teacher.activations["attention.scores"][3]
    expected = {
        "hidden_4_2_cosine": distillation_losses.cosine(student.hidden_states[2], teacher.hidden_states[4], tokens),
        "cls_2_1_normalised_mse": distillation_losses.normalised_mse(
            student.hidden_states[1][rows], teacher.hidden_states[2][rows], used
        ),
        "scores_3_0_mse": distillation_losses.attention_scores_mse(*scores, pairs),
        "hidden_0_0_similarity": distillation_losses.similarity_mse(
            student.hidden_states[0], teacher.hidden_states[0], pairs
        ),
    }
    states = student.hidden_states, teacher.hidden_states
    kl = student.activations["attention.scores"][1], teacher.activations["attention.scores"][2]
    expected |= {
        "hidden_4_2_standardised_mse": distillation_losses.standardised_mse(states[0][2], states[1][4], tokens),
        "hidden_1_1_mse_of_means": distillation_losses.mse_of_means(states[0][1], states[1][1], tokens),
        "hidden_2_1_variance_l1": distillation_losses.variance_l1(states[0][1], states[1][2], tokens),
        "scores_2_1_kl": distillation_losses.attention_kl(*kl, pairs),
    }
    for name, one in expected.items():  # outputs of norms have mean 0 and variance 1: two of these losses are rounding
        np.testing.assert_allclose(found[name], one.sum / one.weight, rtol=1e-5, atol=1e-6, err_msg=name)
    items = task.loss_weight_sums(batch)["weighted_scores_2_1_kl"]
    assert items == expected["scores_2_1_kl"].weight == tokens.sum()
    np.testing.assert_allclose(found["weighted_hidden_4_2_cosine"], 3 * found["hidden_4_2_cosine"], rtol=1e-6)
    np.testing.assert_allclose(found["weighted_soft_loss"], 0.5 * found["soft_loss"], rtol=1e-6)
    np.testing.assert_allclose(found["weighted_task_loss"], 0.25 * found["task_loss"], rtol=1e-6)
    assert (
        task.score(params, batch)[0]["logits"].tolist()
        == task.student.score(student_of(params), batch)[0]["logits"].tolist()
    )


def test_only_the_student_and_the_maps_are_trained():
    recipe = RECIPES["tinybert"](4, 2, "to_teacher")
    task = make_distillation(recipe, student=NARROW)
    programs, state = make_state(task)
    before = arrays(state.params)
    assert before["projections/to_teacher/kernel"].shape == (8, 16)
    state, metrics = take_step(programs, state, rows=first_batch(programs.task.student))
    after = arrays(state.params)
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    assert all(name in unchanged for name in before if name.startswith("teacher/"))
    # The head and the pooler are trained by the soft targets; no example reaches every bias of a key.
    assert {"projections/to_teacher/kernel", "projections/to_teacher/bias", "task/output/kernel"}.isdisjoint(unchanged)
    assert unchanged == {name for name in before if name.startswith("teacher/")}
    np.testing.assert_allclose(metrics["loss"], weighted_sum(metrics), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tagging", "span", "regression"])
def test_soft_targets_of_other_heads(kind):
    """A student that is the teacher has no loss; another one has a positive, finite one."""
    head = (
        TaskHead("classification", ("score",), "pooled")
        if kind == "regression"
        else TaskHead(kind, ("a", "b"), "tokens")
    )
    task = make_distillation(Recipe((), 2.0, 1.0, 0.0, "first"), student=TEACHER, head=head)
    batch, params = first_batch(task.student), initial_params(task)
    shape = {"tagging": (len(batch["row"]), 32), "span": (*batch["example_id"].shape, 2)}.get(kind)
    if kind == "regression":
        batch["labels"] = np.where(batch["example_id"] >= 0, 0.5, np.nan).astype(np.float32)
    else:
        has_one = batch["segment_ids"] > 0 if kind == "tagging" else (batch["example_id"] >= 0)[..., None]
        batch["labels"] = np.broadcast_to(np.where(has_one, 0, -1), shape).astype(np.int32)
    batch = jax.tree.map(jax.numpy.asarray, batch)
    terms = mean_terms(task)
    assert abs(terms(params | params[TEACHER_PATH], batch)["soft_loss"]) < 1e-6
    assert 1e-4 < terms(params, batch)["soft_loss"] < 1e3
    gradients = jax.jit(jax.grad(lambda params: task.sums(params, batch, None)["soft_loss"].sum))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_layers_of_the_teacher():
    task = make_distillation(recipe_of("drop"))
    teacher = initial_params(task)[TEACHER_PATH]
    student = student_params(teacher, (0, 3))
    for name, leaf in name_leaves(student).items():
        source = name_leaves(teacher)[name]
        expected = source[[0, 3]] if name.startswith("encoder/layers/") else source
        assert np.array_equal(leaf, expected)
    assert HEAD.labels == task.head.labels
