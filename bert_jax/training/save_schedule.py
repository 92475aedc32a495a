"""After which steps a run saves a checkpoint."""

import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from bert_jax.config import CheckpointConfig
from bert_jax.distributed.agreement import compute_and_broadcast
from bert_jax.errors import UserError, did_you_mean
from bert_jax.training.programs import Programs
from bert_jax.training.run_directory.retention import Score, is_better


class SaveSchedule:
    """Multiples of `every`, steps after `every_minutes`, and evaluations with the best value of `keep_best` so far.

    All processes of a run make the same calls. For `every_minutes` the clock of the first one counts: the others get
    from it after how many steps they ask again, half of those that it expects until the time has passed. So they
    exchange a message about 10 times per checkpoint, and not after every step.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        step: int,
        best: float | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """The run continues from a step.

        Args:
          settings: of the run.
          step: number of steps done.
          best: best score of the checkpoints that are there; None: there is none.
          clock: seconds.
        """
        self._settings, self._best, self._clock = settings, best, clock
        self.mark_saved(step)

    def mark_saved(self, step: int) -> None:
        """A checkpoint of this step is saved: `every_minutes` begins again."""
        self._saved, self._saved_time, self._ask_at = step, self._clock(), step + 1

    def is_due(self, step: int, score: Score | None) -> bool:
        """Whether to save after a step. Called once after every step.

        Args:
          step: number of steps done.
          score: of an evaluation after this step; None: there was none.
        """
        best = score is not None and is_better(score["metric"], score["value"], self._best)
        if score is not None and best:
            self._best = score["value"]
        timed = False
        if self._settings.every_minutes is not None and step >= self._ask_at:
            steps = compute_and_broadcast("the time of a checkpoint", lambda: self._steps_to_wait(step))
            timed, self._ask_at = steps == 0, step + steps
        return best or timed or step % self._settings.every == 0

    def _steps_to_wait(self, step: int) -> int:
        """Steps after which to look at the clock again; 0: the time has passed."""
        assert self._settings.every_minutes is not None
        seconds = self._clock() - self._saved_time
        share = seconds / (60 * self._settings.every_minutes)  # of the time
        if share >= 1:
            return 0
        return max(1, int((step - self._saved) * (1 - share) / (2 * share))) if share > 0 else 1


def score_of(settings: CheckpointConfig, evaluation: Mapping[str, float]) -> Score | None:
    """The value of `keep_best` in held-out metrics; None if it is not set, or they do not have it."""
    metric = settings.keep_best
    return {"metric": metric, "value": evaluation[metric]} if metric is not None and metric in evaluation else None


def check_keep_best(programs: Programs) -> None:
    """Raise UserError if `checkpoint.keep_best` is no held-out metric of the run in any phase. Nothing is computed."""
    config = programs.task.config
    metric, known = config.checkpoint.keep_best, set()
    for phase in range(len(config.phases)) if metric is not None else ():
        known |= _held_out_metrics(programs, phase)
    if metric is not None and metric not in known:
        hint = " ".join(filter(None, [did_you_mean(metric, known), f"It has {', '.join(sorted(known))}"]))
        raise UserError(f"checkpoint.keep_best {metric!r} is not a held-out metric of this run: {hint}")


def _held_out_metrics(programs: Programs, phase: int) -> set[str]:
    """Names of the held-out metrics in a phase, from the shapes of their sums."""
    params, step = programs.abstract_state(phase).evaluated_params, programs.eval_step(phase)
    _, rows = programs.scorer(params, phase)

    def score(batch: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict]:
        shapes = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
        return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(step, params, shapes))

    return set(programs.task.in_phase(phase).evaluate(score, rows))
