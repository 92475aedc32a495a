"""The compression run of one seed: a fine-tuning run whose task has a teacher."""

import dataclasses
import hashlib
import json
import sys
from typing import Any

import jax

from bert_jax.compress.compression_options import CompressionPlan
from bert_jax.compress.distil_task import FROZEN_IN_THESEUS, Distillation
from bert_jax.compress.students import student_params
from bert_jax.compress.teacher_task import FROZEN
from bert_jax.config import Config
from bert_jax.distributed.agreement import is_first
from bert_jax.finetune.initial_params import fit_params
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.seed_run import FinetuneRun, SourceEncoder
from bert_jax.finetune.task_data import TaskData, metric_prefix, score
from bert_jax.model import bert
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.sharding import device_kind, put_equal
from bert_jax.training.shared_programs import MakePrograms
from bert_jax.training.state import InitialParams
from bert_jax.training.task import Params


class CompressionRun(FinetuneRun):
    """The run of one seed."""

    def __init__(
        self,
        teacher: SourceEncoder,
        start: tuple[CompressionPlan, SourceEncoder | None],
        flags: tuple[str, ...],
        task: str,
        data: TaskData,
        data_path: str,
        options: FinetuneOptions,
        seed: int,
        mesh: jax.sharding.Mesh,
        make_programs: MakePrograms,
    ):
        """Packs the batches; compiles nothing yet.

        Args:
          teacher: fine-tuned on the task.
          start: student and loss, and the model that the student begins with, if it is not the teacher.
          flags: of the plan, for the config of the run.
          task, data, data_path, options, seed, mesh, make_programs: as of `FinetuneRun`, with `keep_head`.
        """
        plan, self._student = start
        self._teacher, self._plan, self._plan_flags = teacher, plan, flags
        self._mesh, self._make_programs = mesh, make_programs
        sources = teacher.sha256 if self._student is None else f"{teacher.sha256} {self._student.sha256}"
        digest = hashlib.sha256(f"{sources} {json.dumps(plan_dict(plan), sort_keys=True)}".encode())
        student = teacher._replace(model=teacher.model._replace(config=plan.model), sha256=digest.hexdigest())
        super().__init__(student, task, data, data_path, options, seed, mesh, make_programs)

    def make_config(self, rows: int, steps_per_epoch: int) -> Config:
        """As of `FinetuneRun`; the teacher is frozen, with replacement all but the student's layers."""
        config = super().make_config(rows, steps_per_epoch)
        assert config.finetune is not None
        given = (flag for flag in config.finetune.flags if flag != "--keep-head")
        finetune = dataclasses.replace(config.finetune, flags=(*self._plan_flags, *given), command="compress distil")
        frozen = FROZEN if self._plan.recipe.replacement is None else FROZEN_IN_THESEUS
        phases = (dataclasses.replace(config.phases[0], frozen=frozen),)
        return dataclasses.replace(config, name=f"compress_{finetune.task}", finetune=finetune, phases=phases)

    def make_task(self, *fields: Any) -> Distillation:
        """The task with the teacher, which is in int8 only if it was before."""
        task, options = super().make_task(*fields), dataclasses.replace(self.options, dense_dtype=None)
        teacher = dataclasses.replace(task.config, model=options.model_config(self._teacher.model.config))
        chosen = choose_implementation(teacher, device_kind(self._mesh)).model
        return Distillation(task, chosen, task.heads, self._plan.recipe)

    def initial_params(self) -> InitialParams:
        """Parameters of student, teacher and maps, on the host."""
        key = jax.random.fold_in(jax.random.key(self.seed), int(self.encoder.sha256[:8], 16))
        teacher, layers = self._teacher_params(), self._plan.layers
        fresh = jax.device_get(bert.init(self.config.model, key, self.task.student.heads))
        if self._student is not None:
            given = self._student.model
            new_head = given.heads.task != self.task.head
            student, new = fit_params(given.params, fresh, new_layers=0, new_head=new_head)
            source = f"{self._student.path}; initialised at random: {', '.join(new) or 'nothing'}; teacher:"
        elif layers:
            student, source = student_params(teacher, layers), f"layers {', '.join(map(str, layers))} of"
        else:
            student, source = fresh, "random parameters; teacher:"
        if is_first():
            print(f"starting from {source} {self._teacher.path}", file=sys.stderr)
        return InitialParams(self.task.with_teacher(student, teacher, key), None)

    def teacher_score(self) -> float:
        """The teacher's score on the data."""
        task = self.task.student
        phases = (dataclasses.replace(self.config.phases[0], frozen=()),)
        config = dataclasses.replace(self.config, model=self.task.teacher_model, phases=phases)
        programs = self._make_programs(dataclasses.replace(task, config=config), self._mesh)
        shardings = jax.tree.map(lambda x: x.sharding, programs.abstract_state(0).params)
        params = put_equal(self._teacher_params(), shardings, self._teacher.path)
        metrics = programs.evaluate(params, 0)

        def of_split(name: str) -> dict[str, float]:
            return {metric: metrics[f"{metric_prefix(name)}{metric}"] for metric in self.data.main_metrics}

        return score(self.data, of_split)

    def _teacher_params(self) -> Params:
        """The teacher's encoder and head, without heads that the task does not have."""
        heads = self.task.student.heads
        shapes = jax.device_get(bert.init(self.task.teacher_model, jax.random.key(0), heads))
        params, _ = fit_params(self._teacher.model.params, shapes, new_layers=0, new_head=False)
        return params


def plan_dict(plan: CompressionPlan) -> dict[str, Any]:
    """The plan as plain values."""
    replacement = plan.recipe.replacement
    recipe = plan.recipe._asdict() | {"matches": [dataclasses.asdict(match) for match in plan.recipe.matches]}
    recipe["replacement"] = replacement and dataclasses.asdict(replacement)
    return {"model": dataclasses.asdict(plan.model), "layers": plan.layers, "recipe": recipe}
