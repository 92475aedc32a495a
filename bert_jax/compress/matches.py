"""What a student imitates of its teacher: a list of matches between layers, and recipes that make such lists.

Layers are named as in TextBrewer (Yang et al. 2020). A hidden state counts from 0, the output of the embeddings, to L,
the output of the last of L layers. Attention scores count from 0, those of the first layer, to L - 1.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bert_jax.config import ModelConfig
from bert_jax.errors import require, short_repr
from bert_jax.field_validation import CountOrZero, NonNegative, Positive, Share, check

What = Literal["hidden", "cls", "scores"]
Loss = Literal["mse", "normalised_mse", "cosine", "similarity", "standardised_mse", "mse_of_means", "variance_l1", "kl"]
LOSSES_OF: dict[What, tuple[Loss, ...]] = {
    "hidden": ("mse", "normalised_mse", "cosine", "similarity", "standardised_mse", "mse_of_means", "variance_l1"),
    "cls": ("mse", "normalised_mse", "cosine"),
    "scores": ("mse", "kl"),
}
"""The losses that each activation has."""
ReplacementSchedule = Literal["linear", "constant"]
"""How the probability of a replacement changes (`Replacement`)."""
Start = Literal["spread", "first", "last", "new"]
"""Which of the teacher's layers a student begins with (`choose_layers`); new: random initialisation."""


@dataclass(frozen=True)
class Match:
    """One term of the loss: an activation of a student's layer should be that of a teacher's layer."""

    teacher_layer: CountOrZero
    student_layer: CountOrZero
    what: What
    """Hidden states of all tokens, hidden states of [CLS], or attention scores, which `kl` compares after softmax."""
    loss: Loss
    """Function of `compress.distillation_losses`."""
    weight: Positive = 1.0
    """Factor in the total loss."""
    project: str | None = None
    """Name of a trained linear map from the student's width to the teacher's, which is applied to the student's
    activation. Matches with the same name share the map. None: no map."""

    def __post_init__(self) -> None:
        check(self, "")
        require(
            self.project is None or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.project) is not None,
            f"project is {short_repr(self.project)}: it must have 1 to 64 letters, digits, - or _",
        )

    @property
    def name(self) -> str:
        """Name of the metric, as in ``hidden_6_3_mse`` of teacher layer 6 and student layer 3."""
        return f"{self.what}_{self.teacher_layer}_{self.student_layer}_{self.loss}"


@dataclass(frozen=True)
class Replacement:
    """The probability that a module is replaced; after a share of the run it is 1: the student trains alone."""

    rate: Share = 0.3
    """Probability b in the first step."""
    schedule: ReplacementSchedule = "linear"
    """linear: min(1, k t + b) in step t, with the k that reaches 1 at the end of the share; constant: b."""
    share: Share = 0.5
    """Share of the run's steps in which modules are replaced at random."""

    def __post_init__(self) -> None:
        check(self, "replacement.")

    def rate_at(self, step: int, steps: int) -> float:
        """The probability in a step, counted from 0, of a run of `steps`."""
        end = round(self.share * steps)
        if step >= end:
            return 1.0
        return self.rate if self.schedule == "constant" else min(1.0, self.rate + (1 - self.rate) * step / end)


class Recipe(NamedTuple):
    """The loss of a distillation, and how its student begins."""

    matches: tuple[Match, ...]
    temperature: Positive
    """T of the soft targets."""
    soft_weight: NonNegative
    """Weight of the soft targets, the teacher's distribution over labels; of a regression, of the squared difference
    from the teacher's score."""
    task_weight: NonNegative
    """Weight of the loss on the labels."""
    start: Start
    replacement: Replacement | None = None
    """Replace layers of the teacher by those of the student at random; None: train the student alone."""


def layer_dropping(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """No teacher in the loss (Sajjad et al. 2020): the first layers, fine-tuned on the labels."""
    return Recipe((), 1.0, 0.0, 1.0, "first")


def distilbert(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Soft targets, labels, and the cosine of the last hidden states (Sanh et al. 2019), with its weights 5, 2 and 1.

    DistilBERT is distilled in pretraining: its labels are masked tokens, here they are the task's.
    """
    return Recipe((Match(teacher_depth, student_depth, "hidden", "cosine", 1.0, map_name),), 2.0, 5.0, 2.0, "spread")


def pkd_skip(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Patient knowledge distillation (Sun et al. 2019), PKD-skip: [CLS] of every L / l-th teacher layer.

    The student's hidden states 1 to l - 1 are matched: with 12 and 6 layers to 2, 4, 6, 8, 10.
    """
    return _pkd([round(layer * teacher_depth / student_depth) for layer in range(1, student_depth)], map_name)


def pkd_last(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """As `pkd_skip`, with the last layers: with 12 and 6 layers 7 to 11."""
    return _pkd([layer + teacher_depth - student_depth for layer in range(1, student_depth)], map_name)


def _pkd(teacher_layers: list[int], map_name: str | None) -> Recipe:
    require(
        len(teacher_layers) > 0,
        "--student-layers 1: pkd-skip and pkd-last match layers below the student's last one: give at least 2 layers, "
        "or another --recipe, such as distilbert",
    )
    # The loss is the mean over layers in PKD's code; its grid: alpha 0.2, 0.5, 0.7; beta 10 to 1000; T 5, 10, 20.
    weight = 100.0 / len(teacher_layers)
    matches = [Match(layer, i, "cls", "normalised_mse", weight, map_name) for i, layer in enumerate(teacher_layers, 1)]
    return Recipe(tuple(matches), 10.0, 0.5, 0.5, "first")


def tinybert(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Attention scores, embeddings, hidden states and soft targets (Jiao et al. 2020, equation 11), in one stage.

    Layer m of the student, from 1, is matched to layer m L / l of the teacher; one map is shared by all hidden states.
    """
    layers = [round(layer * teacher_depth / student_depth) for layer in range(student_depth + 1)]
    scores = [Match(layer - 1, i - 1, "scores", "mse") for i, layer in enumerate(layers) if i]
    hidden = [Match(layer, i, "hidden", "mse", 1.0, map_name) for i, layer in enumerate(layers)]
    return Recipe((*scores, *hidden), 1.0, 1.0, 0.0, "spread")


def similarity(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Hidden states, their similarity matrices and soft targets (TextBrewer's T6; Yang et al. 2020), from the
    embeddings to the last layer.
    """
    layers = [round(layer * teacher_depth / student_depth) for layer in range(student_depth + 1)]
    hidden = [Match(layer, i, "hidden", "mse", 1.0, map_name) for i, layer in enumerate(layers)]
    similarities = [Match(layer, i, "hidden", "similarity") for i, layer in enumerate(layers)]
    return Recipe((*hidden, *similarities), 8.0, 1.0, 0.0, "spread")


def mobilebert(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Feature maps, their means and variances, attention, soft targets and labels (MobileBERT; Sun et al. 2020).

    Weights of google-research/mobilebert README.md: 100, 5000, 5 and 1, each divided by the number of layers; the soft
    targets and the labels have half of the weight each. All layers are matched at once: the paper transfers one after
    the other, and has labels afterwards.
    """
    matches = []
    for i in range(1, student_depth + 1):
        layer = round(i * teacher_depth / student_depth)
        for loss, weight in (("standardised_mse", 100.0), ("mse_of_means", 5000.0), ("variance_l1", 5.0)):
            matches.append(Match(layer, i, "hidden", loss, weight / student_depth, map_name))
        matches.append(Match(layer - 1, i - 1, "scores", "kl", 1.0 / student_depth))
    return Recipe(tuple(matches), 1.0, 0.5, 0.5, "new")


def theseus(teacher_depth: int, student_depth: int, map_name: str | None) -> Recipe:
    """Layers of the teacher are replaced at random, the loss is that of the labels (Xu et al. 2020)."""
    return Recipe((), 1.0, 0.0, 1.0, "first", Replacement())


RecipeName = Literal["drop", "distilbert", "pkd-skip", "pkd-last", "tinybert", "similarity", "mobilebert", "theseus"]
RECIPES: dict[RecipeName, Callable[[int, int, str | None], Recipe]] = {
    "drop": layer_dropping,
    "distilbert": distilbert,
    "pkd-skip": pkd_skip,
    "pkd-last": pkd_last,
    "tinybert": tinybert,
    "similarity": similarity,
    "mobilebert": mobilebert,
    "theseus": theseus,
}
"""By name: functions of the depths of teacher and student, and of the name of the map, None without one."""


def check_matches(matches: Sequence[Match], teacher: ModelConfig, student: ModelConfig) -> None:
    """Check that both models have what is matched.

    Raises:
      UserError: a layer that does not exist, an activation without this loss, sizes that differ, a map that is not
        needed, or a match that is given twice.
    """
    for name, count in Counter(match.name for match in matches).items():
        require(count == 1, f"match {name} is given {count} times: give it once, with the sum of the weights")
    for match in matches:
        where = f"match {match.name}"
        for side, layer, model in (
            ("teacher", match.teacher_layer, teacher),
            ("student", match.student_layer, student),
        ):
            last = model.num_layers - (match.what == "scores")
            require(
                layer <= last, f"{where}: the {side} has no layer {layer}: with {match.what}, give one from 0 to {last}"
            )
        known = LOSSES_OF[match.what]
        require(match.loss in known, f"{where}: {match.what} have no loss {match.loss}: use {' or '.join(known)}")
        _check_sizes(match, where, teacher, student)


def _check_sizes(match: Match, where: str, teacher: ModelConfig, student: ModelConfig) -> None:
    if match.what == "scores":
        require(match.project is None, f"{where}: scores cannot be projected: leave project out")
        require(
            teacher.num_heads == student.num_heads,
            f"{where}: the teacher has {teacher.num_heads} attention heads and the student {student.num_heads}, whose "
            "scores cannot be matched: use --num-heads of the teacher, or another recipe",
        )
        plain = [model.attention_window is None and model.direction == "bidirectional" for model in (teacher, student)]
        require(
            match.loss != "kl" or all(plain),
            f"{where}: kl compares attention to all tokens of a text, and this model's is local or causal: use mse",
        )
        return
    require(
        match.loss != "similarity" or match.project is None,
        f"{where}: similarity does not depend on the width: leave project out",
    )
    require(
        teacher.hidden_size == student.hidden_size or match.project is not None or match.loss == "similarity",
        f"{where}: the teacher's hidden states have {teacher.hidden_size} numbers and the student's "
        f"{student.hidden_size}: give the match a name for project",
    )


def choose_layers(start: Start, teacher: int, student: int) -> tuple[int, ...]:
    """The teacher's layers that a student begins with, from 0, bottom first; none with `new`.

    Args:
      start: spread: evenly from the first to the last, 0, 2, 4, 7, 9, 11 of 12 (DistilBERT's code); first: PKD, and
        the "top-layer dropping" of Sajjad et al. (2020), which they find best; last: their "bottom-layer dropping".
      teacher: number of its layers.
      student: number of its layers, at most as many.
    """
    if start == "new":
        return ()
    if start == "first":
        return tuple(range(student))
    if start == "last":
        return tuple(range(teacher - student, teacher))
    return tuple(round(i * (teacher - 1) / max(student - 1, 1)) for i in range(student))
