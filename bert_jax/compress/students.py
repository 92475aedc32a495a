"""Students from teachers: which models can be teachers, and the parameters of a student."""

import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.errors import require
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import LAYERS, map_with_paths
from bert_jax.training.task import Params


def check_teacher(model: ModelConfig, heads: Heads, path: str) -> None:
    """Raise UserError unless students can be made of the layers of this model."""
    head = heads.task
    require(
        head is not None,
        f"{path} has no head of a task: the teacher must be fine-tuned on the task first: bert-jax finetune",
    )
    require(
        model.adapter_size is None,
        f"{path} has adapters, which students do not have: use a teacher without them",
    )
    require(
        model.parameter_groups is None,
        f"{path}: its layers share parameters, so fewer layers are not a smaller model: use another teacher",
    )
    require(
        model.global_every == 1 or model.attention_window is None,
        f"{path}: its layers are local or global by their number, which changes where layers are dropped: use another "
        "teacher",
    )
    require(
        not head.mix and head.cls_norm == "none",
        f"{path}: its head has --mix or --cls-norm, whose parameters belong to the teacher's layers: fine-tune the "
        "teacher without them",
    )


def student_params(teacher: Params, layers: tuple[int, ...]) -> Params:
    """The teacher's parameters with some of its layers.

    Args:
      teacher: parameters, layers stacked on axis 0; not changed.
      layers: from 0, in the order of the student.
    """
    chosen = np.array(layers)
    return map_with_paths(lambda path, x: np.asarray(x)[chosen] if path.startswith(LAYERS) else np.asarray(x), teacher)
