"""Students from teachers: which models can be teachers, and the parameters of a student."""

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.config import ModelConfig
from bert_jax.errors import require
from bert_jax.model.heads import Heads
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import LAYERS, map_with_paths
from bert_jax.training.task import Params


def check_task_teacher(model: ModelConfig, heads: Heads, path: str) -> None:
    """Raise UserError unless this model is fine-tuned, and students can be made of its layers."""
    head = heads.task
    require(
        head is not None,
        f"{path} has no head of a task: the teacher must be fine-tuned on the task first: bert-jax finetune",
    )
    require(head.kind != "multilabel", f"{path}: several labels of a text have no soft targets: give another teacher")
    check_teacher(model, path)
    require(
        not head.mix and head.cls_norm == "none",
        f"{path}: its head has --mix or --cls-norm, whose parameters belong to the teacher's layers: fine-tune the "
        "teacher without them",
    )


def check_teacher(model: ModelConfig, path: str) -> None:
    """Raise UserError unless students can be made of the layers of this model."""
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


def check_tokenizers(teacher: Tokenizer, other: Tokenizer, name: str) -> None:
    """Raise UserError unless what `name` names has the teacher's tokenizer."""
    require(
        teacher.fingerprint == other.fingerprint,
        f"{name} has another tokenizer than the teacher, so the same ids are other words: both need the same "
        "tokenizer.json",
    )


def check_teacher_heads(teacher: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise UserError unless all devices of the tensor axis get the same number of the teacher's attention heads."""
    tensor = mesh.shape["tensor"]
    require(
        teacher.num_heads % tensor == 0,
        f"mesh.tensor {tensor} does not divide the teacher's {teacher.num_heads} attention heads: use a divisor",
    )


def student_params(teacher: Params, layers: tuple[int, ...]) -> Params:
    """The teacher's parameters with some of its layers.

    Args:
      teacher: parameters, layers stacked on axis 0; not changed.
      layers: from 0, in the order of the student.
    """
    chosen = np.array(layers)
    return map_with_paths(lambda path, x: np.asarray(x)[chosen] if path.startswith(LAYERS) else np.asarray(x), teacher)
