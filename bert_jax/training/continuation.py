"""Continuing a run with other phases, e.g. with more steps: allowed if all steps so far stay the same."""

from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.config.training import SCHEDULE_FIELDS
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath
from bert_jax.training import time_budget
from bert_jax.training.run_directory.checkpoint import checkpoint_directory, newest_intact, read_metadata
from bert_jax.training.run_directory.workdir import describe_config_diff


def check_phase_changes(workdir: StoredPath, before: Config, config: Config) -> None:
    """Check that a run may continue with other phases. All processes call this.

    Args:
      workdir: of the run.
      before: its config so far.
      config: its new config, with equal `identity_fields` except for the phases.

    Raises:
      UserError: a step up to the newest intact checkpoint would have been different.
    """
    old, new = (config_lib.identity_fields(one)["phases"] for one in (before, config))
    if old == new or (checkpoint := newest_intact(checkpoint_directory(workdir))) is None:
        return
    metadata = read_metadata(checkpoint)
    if difference := first_difference(before, config, metadata):
        changed = "; ".join(describe_config_diff({"phases": old}, {"phases": new})[:3])
        step = metadata["cursor"]["step"]
        raise UserError(
            f"work directory {workdir} holds a run with other phases ({changed}), and its {step} steps so far would "
            f"not be the same: {difference}. Continue with its own phases, or start another run from it with "
            f"--init-from {workdir}. Steps can only be added with decay constant or before decay_start, and without "
            "end_mask_rate"
        )


def first_difference(before: Config, config: Config, metadata: dict[str, Any], may_differ: tuple[str, ...] = ()) -> str:
    """The first difference between two configs in the steps up to a checkpoint; empty if there is none.

    Args:
      before, config: the two configs.
      metadata: of the checkpoint.
      may_differ: fields of phases that are not compared.
    """
    cursor = Cursor.from_dict(metadata["cursor"])
    decisions = [entry for entry in metadata["ledger"] if entry["event"] == time_budget.EVENT]
    old, new = (config_lib.identity_fields(one)["phases"] for one in (before, config))
    begin = 0
    for i in range(cursor.phase + 1):
        completed = i < cursor.phase
        done = old[i]["steps"] if completed else cursor.step - begin
        if done == 0:
            break
        if i == len(new):
            return f"phases.{i} is missing"
        for name in old[i]:
            if name not in (*SCHEDULE_FIELDS, *may_differ) and old[i][name] != new[i][name]:
                return f"phases.{i}.{name} was {old[i][name]}, not {new[i][name]}"
        if new[i]["steps"] < done or (completed and new[i]["steps"] > done):
            return f"phases.{i} had {done} steps, not {new[i]['steps']}"
        for step in range(begin, begin + done):
            was, now = (time_budget.timed_learning_rate_at(one, decisions, step) for one in (before, config))
            if was != now:
                return f"the learning rate of step {step + 1} was {was:.6g}, not {now:.6g}"
            was, now = (one.mask_rate_at(i, step - begin) for one in (before, config))
            if was != now:
                return f"the mask rate of step {step + 1} was {was:.6g}, not {now:.6g}"
        begin += done
    return ""
