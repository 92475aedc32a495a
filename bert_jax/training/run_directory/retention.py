"""Which checkpoints of a run are kept, and which has the best held-out score.

A checkpoint of a step that was evaluated has the value of `checkpoint.keep_best` in its run.json, as its score. The
best one follows from the checkpoints that are there, so that restarts and rollbacks need no further record.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from etils import epath

from bert_jax.errors import UserError
from bert_jax.storage.json_files import read_json_as

BEST = "best"
"""What users write for the step of the best checkpoint."""
SCORE = "score"
"""Key of the score in run.json."""


class Score(TypedDict):
    """The value of a held-out metric after the step of a checkpoint."""

    metric: str
    value: float


def is_better(metric: str, value: float, best: float | None) -> bool:
    """Whether a value of a metric is better than another one, or than none; NaN is never better.

    Losses and perplexities are better when they are lower, all other metrics when they are higher.
    """
    lower = metric.partition("/")[0].endswith(("_loss", "_perplexity"))
    return not math.isnan(value) and (best is None or (value < best if lower else value > best))


def best_step(metric: str, scores: Mapping[int, float]) -> int | None:
    """The step with the best score, of equal ones the first; None if there is no score but NaN.

    Args:
      metric: that of the scores.
      scores: by step.
    """
    best = None
    for step in sorted(scores):
        if is_better(metric, scores[step], None if best is None else scores[best]):
            best = step
    return best


def read_scores(saves: Iterable[epath.Path], metric: str | None) -> dict[int, float]:
    """The scores of checkpoints by step; those without one in this metric are left out. None: no metric, no scores."""
    scores = {}
    for save in saves if metric is not None else ():
        if (score := read_score(save)) is not None and score["metric"] == metric:
            scores[int(save.name)] = score["value"]
    return scores


def read_score(save: epath.Path) -> Score | None:
    """The score of a checkpoint; None if it has none, or its run.json is damaged."""
    with contextlib.suppress(UserError):
        return read_json_as(save / "run.json", dict[str, Any], "").get(SCORE)
    return None


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: see `CheckpointConfig`."""

    keep: int
    every: int = 1
    keep_every: int | None = None
    keep_best: str | None = None

    def kept_steps(self, newest_first: Sequence[int], good: int | None, scores: Mapping[int, float]) -> set[int]:
        """The steps of the checkpoints that are kept when a new one has been saved.

        Args:
          newest_first: steps of all checkpoints.
          good: checkpoints up to this step are good. The newest good one is kept in addition to the newest `keep`, and
            so is the next candidate: the oldest of the others. None: there is no such rule.
          scores: of checkpoints, in the metric `keep_best`.
        """
        kept = [step for step in newest_first if step == newest_first[0] or step % self.every == 0][: self.keep]
        if good is not None:
            newer = [step for step in newest_first if step > good]
            kept += newer[-1:] + list(newest_first[len(newer) :][:1])
        kept += [step for step in newest_first if self.keep_every and step % self.keep_every == 0]
        if self.keep_best is not None and (best := best_step(self.keep_best, scores)) is not None:
            kept.append(best)
        return set(kept)
