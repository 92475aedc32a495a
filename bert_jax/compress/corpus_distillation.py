"""Distillation on a corpus: read a teacher, pretrain a student with it, or continue the run."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.compress.compress import describe_student, read_student
from bert_jax.compress.compression_options import ON_A_CORPUS, CompressionPlan, CompressOptions
from bert_jax.compress.corpus_task import CorpusDistillation
from bert_jax.compress.students import check_teacher, check_teacher_heads, check_tokenizers, student_params
from bert_jax.compress.teacher_task import FROZEN, TEACHER, init_projections
from bert_jax.config import Config, DistilConfig, ModelConfig, StartConfig
from bert_jax.config.training import MODEL_FIELDS
from bert_jax.convert.translate import COMPUTE_FIELDS
from bert_jax.data.mixture import CorpusWeight, open_corpora
from bert_jax.errors import require
from bert_jax.finetune.finetune import read_source
from bert_jax.finetune.options import changed_flags
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.storage.paths import StoredPath
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training import loop, pretraining
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.micro_batch import MicroBatchRequest
from bert_jax.training.monitoring.event_hook import OnEvent, ignore_event
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.pretraining_task import Pretraining, heads_of
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import device_kind
from bert_jax.training.state import InitialParams
from bert_jax.training.task import Params

FROM_CONFIG = (*COMPUTE_FIELDS, "hidden_dropout", "attention_dropout", "initializer_range")
"""Fields of the config's model that the student has; all others are those of the teacher, or of the options."""
MakeDistillationPrograms = Callable[[CorpusDistillation, Mesh], Programs]


def distil_on_corpus(
    config: Config,
    parts: list[CorpusWeight],
    teacher_path: StoredPath,
    directory: StoredPath,
    compression: CompressOptions = ON_A_CORPUS,
    *,
    profile: tuple[int, int] | None = None,
    micro_batch: MicroBatchRequest = None,
    announce: Callable[[Config, str], None] = lambda config, line: None,
    make_programs: MakeDistillationPrograms = Programs,
    restart: bool = False,
    on_event: OnEvent = ignore_event,
) -> loop.Progress:
    """Pretrain a student with a teacher in a work directory, or continue its run.

    Args:
      config: of the run; of its model only `FROM_CONFIG` is used.
      parts, directory, profile, micro_batch, restart, on_event: as of `pretraining.pretrain`.
      teacher_path: any encoder that `bert-jax convert` reads, with the tokenizer of the corpora.
      compression: student and loss.
      announce: called in the first process after all checks, with the config of the run and a line about the student.
      make_programs: the programs of the run.

    Raises:
      UserError: the teacher or its tokenizer does not fit, it has not what the student needs, or as `pretraining`.
    """
    teacher = read_source(teacher_path)
    check_teacher(teacher.model.config, teacher.path)
    for corpus in open_corpora(parts)[1]:
        check_tokenizers(teacher.tokenizer, Tokenizer.load(corpus.directory), f"corpus {corpus.directory}")
    student = read_student(compression, teacher)
    plan = compression.plan(teacher.model.config, student and student.model.config)
    config = run_config(config, plan, teacher, student, compression)
    teacher_heads = Heads(mlm=plan.recipe.soft_weight > 0, mlm_activation=teacher.model.heads.mlm_activation)

    def make(task: Pretraining, mesh: Mesh) -> Programs:
        check_teacher_heads(teacher.model.config, mesh)
        model = dataclasses.replace(task.config, model=_with_fields(teacher.model.config, task.config.model))
        chosen = choose_implementation(model, device_kind(mesh)).model
        return make_programs(CorpusDistillation(task, chosen, teacher_heads, plan.recipe), mesh)

    def load_initial_params(config: Config, tokenizer: Tokenizer) -> InitialParams:
        return _initial_params(config, plan, teacher, student, teacher_heads)

    return pretraining.pretrain(
        config,
        parts,
        directory,
        profile=profile,
        micro_batch=micro_batch,
        announce=lambda: announce(config, describe_student(plan, student and student.path)),
        load_initial_params=load_initial_params,
        make_programs=make,
        restart=restart,
        on_event=on_event,
    )


def run_config(
    config: Config,
    plan: CompressionPlan,
    teacher: SourceEncoder,
    student: SourceEncoder | None,
    compression: CompressOptions,
) -> Config:
    """The config of the run: that of the command with the student's model, and the teacher frozen.

    Raises:
      UserError: a recipe that is not for corpora, settings that a student cannot have, or the teacher has no MLM head
        where one is needed.
    """
    recipe, heads = plan.recipe, teacher.model.heads
    require(
        recipe.replacement is None,
        "--recipe theseus trains on the labels of a task: use bert-jax compress distil, or another recipe",
    )
    require(config.start.source is None, "--start.source: a student begins as --start or --student says: leave it out")
    for i, phase in enumerate(config.phases):
        for name in MODEL_FIELDS:
            require(
                getattr(phase, name) is None,
                f"phases.{i}.{name} {getattr(phase, name)}: a student is the same model in all phases: leave it out",
            )
    require(
        heads.mlm or not recipe.soft_weight,
        f"{teacher.path} has no MLM head, so it has no soft targets: give --soft-weight 0 and matches, or another "
        "teacher",
    )
    require(
        heads.mlm_activation in (None, plan.model.activation) or not heads.mlm,
        f"{teacher.path} has an MLM head with {heads.mlm_activation}, a student's has {plan.model.activation}: convert "
        "it with --drop to leave the head out",
    )
    require(
        plan.model.vocab_size == teacher.model.config.vocab_size or not recipe.soft_weight,
        f"the student has {plan.model.vocab_size} token embeddings and the teacher {teacher.model.config.vocab_size}: "
        "give --soft-weight 0, or a student with as many",
    )
    model = _with_fields(plan.model, config.model)
    if any(match.what == "scores" for match in recipe.matches):
        require(
            model.attention in ("auto", "reference"),
            f"model.attention '{model.attention}' does not keep the scores that a match compares: set model.attention "
            "reference, or use another recipe",
        )
        model = dataclasses.replace(model, attention="reference")
    sha256 = teacher.sha256 if student is None else f"{teacher.sha256} {student.sha256}"
    phases = tuple(dataclasses.replace(phase, frozen=(*phase.frozen, *FROZEN)) for phase in config.phases)
    start = StartConfig(source=teacher.path)
    distil = DistilConfig(changed_flags(compression), sha256)
    return dataclasses.replace(config, model=model, phases=phases, start=start, distil=distil)


def _initial_params(
    config: Config, plan: CompressionPlan, teacher: SourceEncoder, student: SourceEncoder | None, teacher_heads: Heads
) -> InitialParams:
    """Parameters of student, teacher and maps, on the host."""
    key = jax.random.key(config.seed)
    params = jax.device_get(bert.init(config.model, key, heads_of(config)))
    if student is not None:
        params = _take_known(student.model.params, params)
    elif plan.layers:
        params = _take_known(student_params(teacher.model.params, plan.layers), params)
    frozen = _take_known(teacher.model.params, bert.shapes(teacher.model.config, teacher_heads))
    maps = jax.device_get(init_projections(plan.recipe, config.model, teacher.model.config, key))
    return InitialParams(params | {TEACHER: frozen} | maps)


def _with_fields(model: ModelConfig, settings: ModelConfig) -> ModelConfig:
    """A model with the settings of computation and dropout of another one."""
    return dataclasses.replace(model, **{name: getattr(settings, name) for name in FROM_CONFIG})


def _take_known(source: Params, fresh: Params) -> Params:
    """A tree like `fresh` on the host, with the leaves that the source has."""
    named = name_leaves(source)
    return map_with_paths(lambda path, leaf: np.asarray(named.get(path, leaf)), fresh)
