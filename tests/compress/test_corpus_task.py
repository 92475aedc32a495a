"""Distillation on a corpus as a Task: values and gradients equal those of a plain computation at all positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.compress.corpus_task import CorpusDistillation
from bert_jax.compress.matches import RECIPES, Match, Recipe
from bert_jax.compress.teacher_task import FROZEN, student_of
from bert_jax.compress.teacher_task import TEACHER as TEACHER_PATH
from bert_jax.config import Config, DataConfig, MeshConfig, ModelConfig, ObjectiveConfig, Phase
from bert_jax.data.batch import empty_rows
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.objectives.masking import Vocabulary
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import Pretraining, heads_of
from bert_jax.training.programs import Programs, put_step_inputs
from bert_jax.training.sharding import make_mesh, put_rows
from bert_jax.training.state import InitialParams

pytestmark = pytest.mark.usefixtures("quick_compilation")
STUDENT = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=32,
    initializer_range=0.2,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
TEACHER = dataclasses.replace(STUDENT, num_layers=4)
ROWS, SEQ_LEN = 8, 32


def make_task(recipe, student=STUDENT, mesh=None, pair="none"):
    phase = Phase(steps=10, seq_len=SEQ_LEN, batch_size=ROWS, warmup_steps=0, accumulation=1, frozen=FROZEN)
    sections = {"data": DataConfig(examples_per_row=2), "objective": ObjectiveConfig(pair=pair)}
    config = Config("tiny", student, phases=(phase, phase), mesh=mesh or MeshConfig(), **sections)
    pretraining = Pretraining(config, Vocabulary(40, 4, (0, 1, 2, 3, 4)))
    return CorpusDistillation(pretraining.in_phase(0), TEACHER, Heads(mlm=True), recipe)


def rows_of_step():
    """Two examples in most rows, padding at the end, and a row of padding."""
    rng, rows = np.random.default_rng(0), empty_rows(ROWS, SEQ_LEN, 2, 0)
    for row in range(ROWS - 1):
        first, second = rng.integers(8, 16, 2)
        for slot, (start, end) in enumerate(((0, first), (first, first + second))):
            rows["input_ids"][row, start:end] = rng.integers(5, 40, end - start)
            rows["input_ids"][row, start], rows["input_ids"][row, end - 1] = 2, 3
            rows["segment_ids"][row, start:end] = slot + 1
            rows["position_ids"][row, start:end] = np.arange(end - start)
            rows["cls_positions"][row, slot] = start
            rows["example_id"][row, slot] = 2 * row + slot
            rows["pair_labels"][row, slot] = slot
    return rows


def initial_params(task, student=None):
    teacher = jax.device_get(bert.init(TEACHER, jax.random.key(1), task.teacher_heads))
    student = student or jax.device_get(bert.init(task.config.model, jax.random.key(2), heads_of(task.config)))
    return task.with_teacher(student, teacher, jax.random.key(3))


def prepared(task):
    return task.prepare(jax.tree.map(jnp.asarray, rows_of_step()), jnp.uint32(0))


def loss_of(task, params, batch):
    sums, weights = task.sums(params, batch, None), task.loss_weight_sums(batch)
    return sum(sums[name].sum / weight for name, weight in weights.items())


def whole_rows(model_config, heads, params, batch):
    """The logits of all positions, and the hidden states."""
    model = bert.model_from_params(model_config, heads, params)
    inputs = EncoderInputs(*(batch[name] for name in EncoderInputs._fields))
    output = model.encoder(inputs, hidden_states=True)
    return model.mlm(output.hidden, params["encoder"]["embeddings"]["word"]), output


@pytest.mark.slow
def test_distilberts_loss():
    """Against logits of all positions, of which the masked ones are chosen by a mask, in values and gradients."""
    task = make_task(RECIPES["distilbert"](4, 2, None))
    params, batch = jax.device_put(initial_params(task)), prepared(task)
    places = np.zeros((ROWS, SEQ_LEN), np.float32)
    labels = np.zeros((ROWS, SEQ_LEN), np.int32)
    for row, position, label, weight in zip(
        np.repeat(np.arange(ROWS), batch["target_positions"].shape[1]),
        *(np.ravel(batch[name]) for name in ("target_positions", "target_labels", "target_weights")),
        strict=True,
    ):
        if weight:
            places[row, position], labels[row, position] = 1.0, label
    assert 10 < places.sum() == batch["target_weights"].sum() < batch["target_weights"].size
    tokens = np.asarray(batch["segment_ids"] > 0, np.float32)

    def by_hand(student):
        heads = heads_of(task.config)
        student_logits, output = whole_rows(STUDENT, heads, student, batch)
        teacher_logits, target = whole_rows(TEACHER, task.teacher_heads, params[TEACHER_PATH], batch)
        likelihood = jnp.take_along_axis(jax.nn.log_softmax(student_logits), labels[..., None], axis=-1)[..., 0]
        p, q = (jax.nn.softmax(x / 2) for x in (teacher_logits, student_logits))
        divergence = 4 * (p * jnp.log(p / q)).sum(-1)
        a, b = output.hidden_states[-1], target.hidden_states[-1]
        cosine = (a * b).sum(-1) / jnp.linalg.norm(a, axis=-1) / jnp.linalg.norm(b, axis=-1)
        predicted = (places * (5 * divergence - 2 * likelihood)).sum() / places.sum()
        return predicted + (tokens * (1 - cosine)).sum() / tokens.sum()

    expected, expected_gradient = jax.jit(jax.value_and_grad(by_hand))(student_of(params))
    found, gradient = jax.jit(jax.value_and_grad(lambda student: loss_of(task, params | student, batch)))(
        student_of(params)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    expected_leaves = name_leaves(expected_gradient)
    for name, leaf in name_leaves(gradient).items():
        np.testing.assert_allclose(leaf, expected_leaves[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.abs(expected_leaves["mlm/bias"]).max() > 0.01


def test_a_student_with_all_layers_has_no_loss():
    """With the teacher's weights all terms but that of the labels are 0; with other weights they are not."""
    task = make_task(RECIPES["tinybert"](4, 4, None), TEACHER)
    params, batch = initial_params(task), prepared(task)
    sums = jax.jit(lambda params: {k: v.sum / v.weight for k, v in task.sums(params, batch, None).items()})
    same, other = sums(params | params[TEACHER_PATH]), sums(params)
    matched = ["soft_loss", *(match.name for match in task.recipe.matches)]
    assert all(abs(same[term]) < 1e-6 < other[term] for term in matched)
    assert same["mlm_loss"] > 1


def make_state(task, devices=1):
    programs = Programs(task, make_mesh(task.config.mesh, jax.devices()[:devices]))
    return programs, programs.state_from_initial(InitialParams(initial_params(task)))


def take_step(programs, state, rate=0.01):
    rows = put_rows(rows_of_step(), programs.mesh, ROWS)
    state, metrics = programs.train_step(0, 1)(state, rows, put_step_inputs(rate, 1, 0, programs.mesh))
    return state, {name: float(value) for name, value in metrics.items()}


def arrays(tree):
    return {name: np.asarray(leaf) for name, leaf in name_leaves(jax.device_get(tree)).items()}


@pytest.mark.slow
def test_only_the_student_is_trained():
    """Also where a phase begins: the teacher is deeper than the student, and keeps its layers."""
    matches = (Match(4, 2, "hidden", "mse", 1.0, "map"), Match(3, 1, "scores", "mse"))
    narrow = dataclasses.replace(STUDENT, hidden_size=8)
    task = make_task(Recipe(matches, 2.0, 1.0, 0.5, "new"), narrow, pair="nsp")
    programs, state = make_state(task)
    before = arrays(state.params)
    state, metrics = take_step(programs, state)
    terms = [value for name, value in metrics.items() if name.startswith("weighted_")]
    assert len(terms) == 5
    np.testing.assert_allclose(metrics["loss"], sum(terms), rtol=1e-5)
    np.testing.assert_allclose(metrics["weighted_pair_loss"], 0.5 * metrics["pair_loss"], rtol=1e-6)
    after = arrays(programs.enter_phase(state, 1).params)
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    teachers = {name for name in before if name.startswith("teacher/")}
    assert teachers and teachers <= unchanged
    assert {"mlm/bias", "projections/map/kernel", "encoder/layers/up/kernel"}.isdisjoint(unchanged)


def test_flops():
    """The teacher's forward pass is counted where it is computed, with its head where that is read."""
    drop, soft, matched = (
        make_task(recipe).step_flops(0)
        for recipe in (
            RECIPES["drop"](4, 2, None),
            RECIPES["distilbert"](4, 2, None),
            Recipe((Match(4, 2, "cls", "mse"),), 1.0, 0.0, 1.0, "first"),
        )
    )
    assert drop == make_task(RECIPES["drop"](4, 2, None)).student.step_flops(0) < matched < soft < 2 * drop
