"""A model whose head has the labels of a task in another order, as published models of MNLI do."""

import dataclasses
from collections.abc import Callable

import numpy as np

from bert_jax.config import TaskHead
from bert_jax.convert.translate import NativeModel
from bert_jax.errors import require
from bert_jax.finetune.task_data import TaskData


def check_head(head: TaskHead, data: TaskData, owner: object, advice: str) -> None:
    """Raise UserError unless the outputs of a head are those of the task, in its order; see `in_order_of_task`."""
    require(_is_of_task(head, data), _other_labels(head, data, owner, advice))


def in_order_of_task(
    model: NativeModel, data: TaskData, owner: object, advice: str, announce: Callable[[str], None]
) -> NativeModel:
    """The model with the outputs of its head in the order of the task's labels.

    Labels are matched by their names; if these differ, without regard to case, which `id2label` of transformers often
    has otherwise. The only output of a regression needs no name: transformers calls it LABEL_0.

    Args:
      model: with the head of a task.
      data: of the task.
      owner: what messages call the model.
      advice: what to do if the labels differ.
      announce: called with a line if the order differs.

    Raises:
      UserError: the head is of another kind, or the names differ.
    """
    head = model.heads.task
    assert head is not None
    if (head.kind, head.labels) == (data.kind, data.labels):
        return model
    names, wanted = list(head.labels), list(data.labels)
    if _is_of_task(head, data):
        names = wanted
    elif sorted(names) != sorted(wanted):
        names, wanted = ([label.casefold() for label in labels] for labels in (names, wanted))
    require(
        head.kind == data.kind and sorted(names) == sorted(wanted) and len(set(names)) == len(names),
        _other_labels(head, data, owner, advice),
    )
    order = [names.index(label) for label in wanted]
    output = {name: np.asarray(array)[..., order] for name, array in model.params["task"]["output"].items()}
    if order != sorted(order):
        announce(
            f"the head of {owner} has the labels {', '.join(head.labels)}: matched by their names with "
            f"{', '.join(data.labels)}"
        )
    return model._replace(
        params=model.params | {"task": model.params["task"] | {"output": output}},
        heads=dataclasses.replace(model.heads, task=dataclasses.replace(head, labels=data.labels)),
    )


def _is_of_task(head: TaskHead, data: TaskData) -> bool:
    is_regression = len(head.labels) == len(data.labels) == 1
    return head.kind == data.kind and (head.labels == data.labels or is_regression)


def _other_labels(head: TaskHead, data: TaskData, owner: object, advice: str) -> str:
    return (
        f"the head of {owner} has the labels {', '.join(head.labels)} ({head.kind}), the task has "
        f"{', '.join(data.labels)} ({data.kind}): {advice}"
    )
