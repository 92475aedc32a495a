"""Forks: a new run that continues another one from any of its checkpoints, with another rest of the schedule or other
corpora.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import Config, StartConfig
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import CorpusPosition, Cursor
from bert_jax.data.epoch_plan import STREAM_VERSION
from bert_jax.errors import UserError, require
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.training.continuation import first_difference
from bert_jax.training.run_directory.checkpoint import (
    best_checkpoint_step,
    checkpoint_directory,
    committed_checkpoint_paths,
    read_metadata,
)
from bert_jax.training.run_directory.commit import find_damage
from bert_jax.training.run_directory.retention import BEST
from bert_jax.training.run_directory.workdir import describe_config_diff, read_run
from bert_jax.training.state import Fork


def parse_fork(source: str) -> tuple[StoredPath, int | None] | None:
    """Run and step of a source ``RUN@STEP``, without a step of ``RUN@best``; None if it has another form, or is an
    existing path as a whole."""
    match = re.fullmatch(f"(.+)@([0-9]{{1,10}}|{BEST})", source)
    if match is None or to_path(source).exists():
        return None
    return to_path(match[1]), None if match[2] == BEST else int(match[2])


def open_fork(config: Config, corpora: Sequence[Corpus]) -> Fork | None:
    """The checkpoint that ``start.source RUN@STEP`` or ``RUN@best`` names, checked; None if it has another form.

    The steps of the fork count from the beginning of RUN, and its config has to be one with which they would have been
    the same. A corpus that RUN has continues at its position, others begin. All processes call this.

    Args:
      config: of the fork, with `start.source`.
      corpora: of the fork, in the order of `open_corpora`.

    Raises:
      UserError: there is no such run or checkpoint, it is damaged, or one of its steps would have been different.
    """
    source = config.start.source
    assert source is not None
    if (parsed := parse_fork(source)) is None:
        return None
    directory, step = parsed
    saved = read_run(directory)
    step = best_checkpoint_step(checkpoint_directory(directory)) if step is None else step
    require(
        config.start == StartConfig(source=source),
        f"start.source {source} keeps the whole state of the run: leave all other settings of start out",
    )
    require(
        saved["stream_version"] == STREAM_VERSION,
        f"start.source {source}: another version of bert_jax, which reads other rows, made this run: use that version",
    )
    if changed := describe_config_diff(_constants(saved["config"]), _constants(config)):
        raise UserError(
            f"start.source {source} has other settings ({'; '.join(changed[:4])}): only the steps after {step}, the "
            "corpora and their weights may differ"
        )
    checkpoint, metadata = _open_checkpoint(source, directory, step)
    require(
        metadata["tokenizer_fingerprint"] == corpora[0].tokenizer_fingerprint,
        f"start.source {source} was trained with another tokenizer than the corpus: build the corpus with its "
        "tokenizer",
    )
    if difference := first_difference(saved["config"], config, metadata, may_differ=("corpus_weights",)):
        raise UserError(f"start.source {source}: its {step} steps would not be the same: {difference}")
    require(
        step < config.total_steps,
        f"start.source {source} has done {step} steps, and the phases have {config.total_steps}: raise phases.N.steps",
    )
    cursor = Cursor.from_dict(metadata["cursor"])
    if cursor.positions:
        known = dict(zip(sorted(saved["corpora"]), cursor.positions, strict=True))  # the order of `open_corpora`
        positions = tuple(known.get(corpus.identity, CorpusPosition()) for corpus in corpora)
        cursor = dataclasses.replace(cursor, positions=positions)
    return Fork(str(checkpoint), metadata, cursor)


def _constants(config: Config) -> dict[str, Any]:
    """The settings that a fork has in common with its run, besides those of the phases so far."""
    values = config_lib.identity_fields(config)
    for name in ("name", "phases", "start"):
        del values[name]
    del values["data"]["mixture_exponent"]
    return values


def _open_checkpoint(source: str, directory: StoredPath, step: int) -> tuple[StoredPath, dict[str, Any]]:
    """The intact checkpoint of a step, and its metadata."""
    saves = {int(save.name): save for save in committed_checkpoint_paths(checkpoint_directory(directory))}
    if step not in saves:
        there = ", ".join(map(str, sorted(saves))) or "none"
        raise UserError(
            f"start.source {source}: {directory} has no checkpoint of step {step}; it has {there} "
            "(checkpoint.every and checkpoint.keep decide)"
        )
    if damage := find_damage(saves[step]):
        raise UserError(f"start.source {source}: {saves[step]} is damaged ({damage}): choose another step")
    return saves[step], read_metadata(saves[step])
