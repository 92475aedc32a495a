"""Options of `bert-jax compress distil` and `compress pretrain`: the student, and what it learns from the teacher."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from bert_jax.compress.matches import (
    RECIPES,
    Match,
    Recipe,
    RecipeName,
    Replacement,
    ReplacementSchedule,
    Start,
    check_matches,
    choose_layers,
)
from bert_jax.config import ModelConfig
from bert_jax.errors import require
from bert_jax.field_validation import CountOrZero, Interval, Layers, NonNegative, Share, Size, check, from_json
from bert_jax.model.families import mobilebert_layers
from bert_jax.model.layer_plan import layer_plans
from bert_jax.storage.json_files import parse_json
from bert_jax.storage.paths import to_path

PROJECTION = "to_teacher"
"""Name of the linear map that the matches of a recipe share where the widths differ."""
NOT_OF_STUDENTS = (
    "freeze_encoder",
    "adapter_size",
    "new_layers",
    "keep_head",
    "pooling",
    "mix",
    "cls_norm",
    "selection_share",
)
"""Options of fine-tuning that change the model or choose an epoch: a student has the form of its teacher and the
weights of the last step."""
WIDTHS = ("hidden_size", "num_heads", "intermediate_size", "bottleneck_size")
ADVICE = "docs/compression/distillation.md has the form of the file"


class CompressionPlan(NamedTuple):
    """The student, and what it learns from the teacher."""

    model: ModelConfig
    """Of the student."""
    layers: tuple[int, ...]
    """The teacher's layers that it begins with; empty: all its parameters are new."""
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """The student, and what it learns. None: the default of the recipe."""

    recipe: RecipeName = "pkd-skip"
    """What the student imitates of the teacher (docs/compression/distillation.md)."""
    student_layers: Layers | None = None
    """Depth of the student. Default: half of the teacher's; for mobilebert, the teacher's."""
    start: Start | None = None
    """Which of the teacher's layers the student begins with: evenly spread ones, the first, the last; or new: all its
    parameters are initialised at random."""
    layers: tuple[CountOrZero, ...] = ()
    """The teacher's layers that the student begins with, from 0, bottom first, instead of --student-layers and
    --start."""
    hidden_size: Size | None = None
    """Width of a student with --start new. Default: the teacher's."""
    num_heads: Size | None = None
    """Attention heads of a student with --start new. Default: the teacher's."""
    intermediate_size: Size | None = None
    """Width of the feed-forward layers of a student with --start new. Default: the teacher's; for mobilebert, the
    student's hidden size."""
    bottleneck_size: Size | None = None
    """For mobilebert: width inside the student's layers. Default: a quarter of the hidden size."""
    student: str | None = None
    """Model that the student begins with and whose sizes it has, e.g. the result of another recipe, instead of layers
    of the teacher. It needs the teacher's tokenizer."""
    matches: str | None = None
    """JSON file with a list of matches that replace those of the recipe (docs/compression/distillation.md)."""
    temperature: Annotated[float, Interval("(0, 1000]")] | None = None
    """T: logits are divided by it for soft targets."""
    soft_weight: NonNegative | None = None
    """Weight of the soft targets in the loss."""
    task_weight: NonNegative | None = None
    """Weight of the loss on the labels."""
    replace_rate: Share | None = None
    """For theseus: probability that a layer of the student replaces its group of layers of the teacher in the first
    step. Default: 0.3."""
    replace_schedule: ReplacementSchedule | None = None
    """For theseus: whether the probability rises linearly to 1 (default), or is constant."""
    replace_share: Share | None = None
    """For theseus: share of the steps with replacement at random; afterwards the student trains alone. Default: 0.5."""

    def __post_init__(self) -> None:
        check(self, "--")
        others = [name for name in ("student_layers", "start") if getattr(self, name) is not None]
        require(
            not (self.layers and others),
            f"--layers and --{'-'.join(others[:1]).replace('_', '-')} exclude each other: give one of them",
        )
        names = ("layers", "student_layers", "start", *WIDTHS)
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]
        require(
            self.student is None or not given,
            f"--student and {', '.join(given[:1])} exclude each other: the sizes are those of the given model",
        )

    def plan(self, teacher: ModelConfig, student: ModelConfig | None = None) -> CompressionPlan:
        """The student of a teacher, and its loss.

        Args:
          teacher: the encoder.
          student: that of the model that `student` names.

        Raises:
          UserError: the student is deeper than the teacher, has other sizes without --start new, a match that is not
            possible, or a loss without a term.
        """
        if student is not None:
            require(
                student.max_positions >= teacher.max_positions,
                f"--student {self.student} has {student.max_positions} positions and the teacher "
                f"{teacher.max_positions}: use a student with as many",
            )
            return CompressionPlan(student, (), self._recipe(teacher, student))
        is_mobile = self.recipe == "mobilebert"
        default = teacher.num_layers if is_mobile else max(teacher.num_layers // 2, 1)
        depth = len(self.layers) or self.student_layers or default
        flag = f"--layers {' '.join(map(str, self.layers))}" if self.layers else f"--student-layers {depth}"
        require(
            depth <= teacher.num_layers,
            f"{flag}: the teacher has {teacher.num_layers} layers: use at most {teacher.num_layers}",
        )
        changes = {name: value for name in WIDTHS if (value := getattr(self, name)) is not None}
        require(
            is_mobile or self.bottleneck_size is None,
            "--bottleneck-size belongs to --recipe mobilebert: leave it out, or give that recipe",
        )
        form = mobilebert_layers(self.hidden_size or teacher.hidden_size) if is_mobile else {}
        model = dataclasses.replace(teacher, num_layers=depth, scan_unroll=None, **form | changes)
        recipe = self._recipe(teacher, model)
        require(
            not is_mobile or (recipe.start == "new" and not self.layers),
            "--recipe mobilebert: the student's layers have another form than the teacher's, so it begins at random: "
            "leave --start and --layers out",
        )
        layers = self.layers or choose_layers(recipe.start, teacher.num_layers, depth)
        given = ", ".join(f"--{name.replace('_', '-')}" for name in changes)
        require(
            not (layers and changes), f"{given}: only a new student can have other sizes than the teacher: --start new"
        )
        missing = [layer for layer in layers if layer >= teacher.num_layers]
        require(
            not missing,
            f"--layers {' '.join(map(str, layers))}: the teacher's layers are 0 to {teacher.num_layers - 1}",
        )
        return CompressionPlan(model, layers, recipe)

    def _recipe(self, teacher: ModelConfig, student: ModelConfig) -> Recipe:
        project = PROJECTION if teacher.hidden_size != student.hidden_size else None
        recipe = RECIPES[self.recipe](teacher.num_layers, student.num_layers, project)
        names = "temperature", "soft_weight", "task_weight", "start"
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        recipe = recipe._replace(**changes)
        if self.matches is not None:
            recipe = recipe._replace(matches=read_matches(self.matches))
        recipe = recipe._replace(replacement=self._replacement(recipe, teacher))
        check_matches(recipe.matches, teacher, student)
        require(
            bool(recipe.matches or recipe.soft_weight or recipe.task_weight),
            "--soft-weight 0 and --task-weight 0 without matches leave no loss: give one of them a weight",
        )
        return recipe

    def _replacement(self, recipe: Recipe, teacher: ModelConfig) -> Replacement | None:
        """The recipe's replacement with the options' values."""
        names = ("rate", "schedule", "share")
        changes = {name: value for name in names if (value := getattr(self, f"replace_{name}")) is not None}
        if recipe.replacement is None:
            require(
                not changes,
                f"--replace-{next(iter(changes), '')} belongs to --recipe theseus: leave it out, or give that recipe",
            )
            return None
        require(not recipe.matches, "--recipe theseus trains a mixed model, which has no matches: leave --matches out")
        require(
            recipe.start != "new" and self.student is None,
            "--recipe theseus trains layers only, embeddings and head are the teacher's: --start new and --student are "
            "not possible",
        )
        require(
            len(set(layer_plans(teacher))) == 1,
            "--recipe theseus replaces layers by layers of the same kind, and the teacher's first layer differs from "
            "the others (pre-norm): use another recipe",
        )
        return dataclasses.replace(recipe.replacement, **changes)


ON_A_CORPUS = CompressOptions(recipe="distilbert")
"""The default of `bert-jax compress pretrain`."""


def read_matches(path: str) -> tuple[Match, ...]:
    """Read a JSON list of matches.

    Raises:
      UserError: there is no such file, or it is not a list of matches.
    """
    file = to_path(path)
    require(file.is_file(), f"--matches {path} does not exist or is no file: {ADVICE}")
    values = parse_json(file.read_bytes(), path, ADVICE, list)
    return tuple(from_json(Match, value, f"{path}, match {i}", ADVICE) for i, value in enumerate(values))
