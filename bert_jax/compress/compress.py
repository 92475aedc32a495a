"""The compression job: read a teacher and the data of its task, train a smaller student, compare the two."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bert_jax.compress.compression_options import NOT_OF_STUDENTS, CompressionPlan, CompressOptions
from bert_jax.compress.compression_run import CompressionRun
from bert_jax.compress.students import check_task_teacher, check_teacher, check_teacher_heads, check_tokenizers
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import require
from bert_jax.finetune.finetune import (
    FinetuneResult,
    describe,
    read_source,
    summary_lines,
    train_runs,
    write_results,
)
from bert_jax.finetune.label_order import in_order_of_task
from bert_jax.finetune.options import FinetuneOptions, changed_flags
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import baseline_score
from bert_jax.finetune.tasks import check_task, open_task
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.sharding import make_mesh
from bert_jax.training.shared_programs import MakePrograms, share_programs


class CompressResult(NamedTuple):
    """Scores of teacher and students."""

    teacher_score: float
    teacher_parameters: int
    """Of encoder and head."""
    student_parameters: int
    plan: CompressionPlan
    students: FinetuneResult

    def to_dict(self) -> dict[str, Any]:
        """The results of the students, as of `bert-jax finetune`, and what they are compared with."""
        results = self.students.to_dict()
        share = None if results["mean"] is None or self.teacher_score <= 0 else results["mean"] / self.teacher_score
        student = {"parameters": self.student_parameters, "num_layers": self.plan.model.num_layers}
        return results | {
            "share_of_teacher": share,
            "teacher": {"score": self.teacher_score, "parameters": self.teacher_parameters},
            "student": student | {"layers_of_teacher": list(self.plan.layers)},
        }

    def summary_lines(self) -> list[str]:
        """The scores of students and teacher, and their sizes, as a table."""
        share = self.to_dict()["share_of_teacher"]
        lines = [
            *summary_lines(self.students),
            f"  teacher {self.teacher_score:.4f}, {self.teacher_parameters:,} parameters",
            f"  student {self.student_parameters:,} parameters, "
            f"{self.student_parameters / self.teacher_parameters:.1%} of the teacher's",
        ]
        return lines if share is None else [*lines, f"  share of the teacher's score {share:.1%}"]


def compress(
    source: StoredPath,
    task: str,
    data_directory: StoredPath,
    workdir: StoredPath,
    compression: CompressOptions = CompressOptions(),  # noqa: B008 (frozen)
    options: FinetuneOptions = FinetuneOptions(),  # noqa: B008 (frozen)
    *,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 (frozen)
    announce: Callable[[str], None] = lambda line: None,
    make_programs: MakePrograms | None = None,
) -> CompressResult | None:
    """Train smaller students of a fine-tuned model, one per seed; the same call continues what was stopped.

    The files in `workdir` are those of `finetune.finetune`; ``results.json`` has the teacher's score, too.

    Args:
      source: the teacher: any model that `bert-jax convert` reads, with a head of the task.
      task, data_directory, workdir: as of `finetune.finetune`.
      compression: student and loss.
      options: columns of the data, and the recipe of fine-tuning.
      mesh, announce, make_programs: as of `finetune.finetune`.

    Returns:
      scores of teacher and students; None: SIGTERM stopped a run, which was saved.

    Raises:
      UserError: the source is no teacher of this task, has not what the student needs, or as `finetune.finetune`.
    """
    check_task(task)
    changed = [name for name in NOT_OF_STUDENTS if getattr(options, name) != getattr(FinetuneOptions(), name)]
    flag = f"--{changed[0].replace('_', '-')}" if changed else ""
    require(not changed, f"{flag}: a student has the form of its teacher and is that of the last step: leave it out")
    teacher = read_source(source)
    check_task_teacher(teacher.model.config, teacher.model.heads, teacher.path)
    student = read_student(compression, teacher)
    plan = compression.plan(teacher.model.config, student and student.model.config)
    data, options = open_task(task, data_directory, options, teacher)
    advice = "give a teacher that was fine-tuned on this task"
    teacher = teacher._replace(model=in_order_of_task(teacher.model, data, teacher.path, advice, announce))
    options = dataclasses.replace(options.with_recipe(data.train.count), keep_head=True)
    for line in (*describe(options, data), describe_student(plan, student and student.path)):
        announce(line)

    def make_run(seed: int) -> CompressionRun:
        start, flags = (plan, student), changed_flags(compression)
        return CompressionRun(teacher, start, flags, task, data, str(data_directory), options, seed, **programs)

    programs = {"mesh": make_mesh(mesh), "make_programs": make_programs or share_programs()}
    check_teacher_heads(teacher.model.config, programs["mesh"])
    teacher_score = make_run(options.seed).teacher_score()
    announce(f"teacher: score {teacher_score:.4f}")
    results = train_runs(make_run, workdir, data, options, announce)
    if results is None:
        return None
    students = FinetuneResult(task, baseline_score(data), tuple(results))
    sizes = [_num_parameters(model, teacher.model.heads) for model in (teacher.model.config, plan.model)]
    result = CompressResult(teacher_score, *sizes, plan, students)
    write_results(workdir, result.to_dict(), data, data_directory)
    return result


def read_student(compression: CompressOptions, teacher: SourceEncoder) -> SourceEncoder | None:
    """Read the model that --student names; None without this option.

    Raises:
      UserError: it is no encoder, has another tokenizer than the teacher, or layers that share parameters.
    """
    if compression.student is None:
        return None
    student = read_source(to_path(compression.student))
    check_tokenizers(teacher.tokenizer, student.tokenizer, f"--student {student.path}")
    check_teacher(student.model.config, student.path)
    return student


def describe_student(plan: CompressionPlan, student: str | None) -> str:
    """A line about the student and its loss; `student` is the path of the model that it begins with."""
    recipe, model = plan.recipe, plan.model
    begins = f"layers {', '.join(map(str, plan.layers))} of the teacher" if plan.layers else "random parameters"
    begins = student or begins
    loss = [f"{recipe.task_weight:g} x labels"] if recipe.task_weight else []
    if recipe.soft_weight:
        loss.append(f"{recipe.soft_weight:g} x soft targets of temperature {recipe.temperature:g}")
    loss += [f"{match.weight:g} x {match.name}" for match in recipe.matches]
    line = f"student: {model.num_layers} layers of width {model.hidden_size} from {begins}; loss: {' + '.join(loss)}"
    if (replacement := recipe.replacement) is None:
        return line
    rate = f"{replacement.rate:g}{' rising to 1' if replacement.schedule == 'linear' else ''}"
    return f"{line}; layers replaced with probability {rate} in the first {replacement.share:.0%} of the steps"


def _num_parameters(model: ModelConfig, heads: Heads) -> int:
    """Parameters of an encoder with the head of its task."""
    shapes = bert.shapes(model, Heads(mlm=False, task=heads.task))
    return sum(int(np.prod(leaf.shape)) for leaf in name_leaves(shapes).values())
