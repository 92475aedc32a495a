"""BERT-of-Theseus: in training, modules of the teacher are replaced at random by layers of the student.

Module m of the student, one layer, replaces a group of consecutive layers of the teacher (Xu et al. 2020, section 3;
JetRunner/BERT-of-Theseus). The mixed model is one encoder whose stack has the layers of both, of which a step applies
those that were drawn.
"""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array, Bool
from bert_jax.data.hash_random import bernoulli_threshold, draw_bernoulli, make_key
from bert_jax.training.task import Params

REPLACEMENT = 0x7E5
"""Word of keys: what the random numbers are for."""


def draw_replaced(seed: int, step: int, rate: float, modules: int) -> np.ndarray:
    """Which modules are replaced in a step, bool [modules]: one draw per module for the whole batch.

    A draw depends on nothing but (seed, step, module), so it is the same on all devices and in all micro-batches.
    """
    limit = bernoulli_threshold(rate)
    states = (np.array([make_key(seed, REPLACEMENT, step, module), 0], np.uint64) for module in range(modules))
    return np.array([draw_bernoulli(state, limit) for state in states])


def module_of_layers(teacher: int, student: int) -> np.ndarray:
    """The module of each of the teacher's layers, ascending: groups of equal size, or of sizes that differ by 1."""
    return np.arange(teacher) * student // teacher


def mixed_stack(teacher: Params, student: Params) -> Params:
    """The student's parameters, but with the layers of both models: those of the teacher's first group, the student's
    first layer, those of the second group, and so on.

    Args:
      teacher: parameters, layers stacked on axis 0.
      student: the same with at most as many layers.
    """
    layers = teacher["encoder"]["layers"], student["encoder"]["layers"]
    order = _order(*(len(jax.tree.leaves(stack)[0]) for stack in layers))
    mixed = jax.tree.map(lambda *stacks: jnp.concatenate(stacks)[order], *layers)
    return student | {"encoder": student["encoder"] | {"layers": mixed}}


def applied_layers(replaced: Bool[Array, " M"], teacher: int) -> Bool[Array, " L"]:
    """Which layers of a `mixed_stack` a step applies.

    Args:
      replaced: whether each module is replaced.
      teacher: number of the teacher's layers.
    """
    kept = ~replaced[module_of_layers(teacher, len(replaced))]
    return jnp.concatenate([kept, replaced])[_order(teacher, len(replaced))]


def _order(teacher: int, student: int) -> np.ndarray:
    """The layers of a mixed stack, bottom first: layers of the teacher from 0, then those of the student."""
    modules = np.concatenate([module_of_layers(teacher, student), np.arange(student)])
    return np.argsort(modules, kind="stable")  # the student's layer follows those that it replaces
