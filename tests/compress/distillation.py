"""A small distillation: a random teacher of four layers, and its students."""

import dataclasses

import jax
import numpy as np

from bert_jax.compress.distil_task import FROZEN_IN_THESEUS, Distillation
from bert_jax.compress.matches import RECIPES, Recipe
from bert_jax.compress.teacher_task import FROZEN
from bert_jax.config import MeshConfig, TaskHead
from bert_jax.model import bert
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import make_mesh
from bert_jax.training.state import InitialParams
from tests.finetune.tiny_task import HEAD, MODEL, make_task

TEACHER = dataclasses.replace(MODEL, num_layers=4)


def recipe_of(name: str, teacher=TEACHER, student=MODEL) -> Recipe:
    return RECIPES[name](teacher.num_layers, student.num_layers, None)


def make_distillation(recipe: Recipe, student=MODEL, head: TaskHead = HEAD, mesh: MeshConfig | None = None):
    """The task; its student has two layers."""
    frozen = FROZEN if recipe.replacement is None else FROZEN_IN_THESEUS
    task = make_task(head, student, mesh, frozen=frozen)
    return Distillation(task, TEACHER, task.heads, recipe)


def initial_params(task: Distillation, student=None) -> dict:
    """Random parameters, on the host; `student` replaces those of the student."""
    heads = task.student.heads
    teacher = jax.device_get(bert.init(task.teacher_model, jax.random.key(1), heads))
    student = student or jax.device_get(bert.init(task.config.model, jax.random.key(2), heads))
    return task.with_teacher(student, teacher, jax.random.key(3))


def make_state(task: Distillation, devices: int = 1, student=None):
    """The programs of a task, and its state before the first step."""
    programs = Programs(task, make_mesh(task.config.mesh, jax.devices()[:devices]))
    return programs, programs.state_from_initial(InitialParams(initial_params(task, student)))


def weighted_sum(metrics: dict[str, float]) -> float:
    """The loss that the terms give."""
    return float(np.sum([value for name, value in metrics.items() if name.startswith("weighted_")]))
