"""A model whose head has the labels of a task in another order, as published models of MNLI do."""

import dataclasses
from collections.abc import Callable

import numpy as np

from bert_jax.config import TaskHead
from bert_jax.errors import require
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import TaskData


def is_of_task(head: TaskHead, data: TaskData) -> bool:
    """Whether the outputs of a head are those of the task, in its order."""
    is_regression = len(head.labels) == len(data.labels) == 1
    return head.kind == data.kind and (head.labels == data.labels or is_regression)


def in_order_of_task(
    encoder: SourceEncoder, data: TaskData, advice: str, announce: Callable[[str], None]
) -> SourceEncoder:
    """The model with the outputs of its head in the order of the task's labels.

    Labels are matched by their names; if these differ, without regard to case, which `id2label` of transformers often
    has otherwise. The only output of a regression needs no name: transformers calls it LABEL_0.

    Args:
      encoder: with the head of a task.
      data: of the task.
      advice: what to do if the labels differ.
      announce: called with a line if the order differs.

    Raises:
      UserError: the head is of another kind, or the names differ.
    """
    head = encoder.model.heads.task
    assert head is not None
    if (head.kind, head.labels) == (data.kind, data.labels):
        return encoder
    names, wanted = list(head.labels), list(data.labels)
    if is_of_task(head, data):
        names = wanted
    elif sorted(names) != sorted(wanted):
        names, wanted = ([label.casefold() for label in labels] for labels in (names, wanted))
    require(
        head.kind == data.kind and sorted(names) == sorted(wanted) and len(set(names)) == len(names),
        f"the head of {encoder.path} is one of {head.kind} with the labels {', '.join(head.labels)}, the task has "
        f"{', '.join(data.labels)}: {advice}",
    )
    order = [names.index(label) for label in wanted]
    params, heads = encoder.model.params, encoder.model.heads
    output = {name: np.asarray(array)[..., order] for name, array in params["task"]["output"].items()}
    if order != sorted(order):
        announce(
            f"the head of {encoder.path} has the labels {', '.join(head.labels)}: matched by their names with "
            f"{', '.join(data.labels)}"
        )
    model = encoder.model._replace(
        params=params | {"task": params["task"] | {"output": output}},
        heads=dataclasses.replace(heads, task=dataclasses.replace(head, labels=data.labels)),
    )
    return encoder._replace(model=model)
