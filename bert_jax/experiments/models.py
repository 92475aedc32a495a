"""Studies of models that exist: nothing is pretrained. Levels name runs, checkpoints of runs or exported models."""

from typing import NamedTuple

import jax

from bert_jax.convert.formats import run as run_format
from bert_jax.errors import require
from bert_jax.experiments.budget import Cell, Cost, check_margins
from bert_jax.experiments.study import METRICS, Study
from bert_jax.finetune.finetune import read_source
from bert_jax.storage.paths import to_path
from bert_jax.training.job import run_directory_of
from bert_jax.training.run_directory.workdir import read_config


class StudiedModel(NamedTuple):
    """What is known of a model before anything is computed."""

    sha256: str
    """Of its config and parameters."""
    tokenizer: str
    """Fingerprint."""
    seed: int | None
    """Of the run that it is of; None: an exported model."""
    parameters: int


def open_models(study: Study, corpus_tokenizer: str) -> dict[str, StudiedModel]:
    """Read every model that a study names, once each.

    Args:
      study: a study of models.
      corpus_tokenizer: fingerprint of the corpora's; empty if there are none.

    Raises:
      UserError: a model does not exist or is no encoder with a tokenizer, or held-out losses are compared and it has no
        MLM head, too few positions, or another tokenizer than the corpora.
    """
    paths = dict.fromkeys(path for levels in study.combinations() for path in study.models_of(levels))
    models = {}
    for path in paths:
        encoder = read_source(to_path(path))
        model, fingerprint = encoder.model, encoder.tokenizer.fingerprint
        if not {*study.margins}.isdisjoint(METRICS):
            where = f"study {study.name}: {path}"
            require(model.heads.mlm, f"{where} has no MLM head, so it has no held-out loss: leave mlm_* out of margins")
            require(
                study.rows.seq_len <= model.config.max_positions,
                f"{where} has {model.config.max_positions} positions: lower rows.seq_len {study.rows.seq_len}",
            )
            require(
                fingerprint == corpus_tokenizer,
                f"{where} has another tokenizer than the corpora, and losses of different tokens cannot be compared: "
                "leave mlm_* out of margins, or give models with one tokenizer, and corpora that were built with it",
            )
        source = to_path(path)
        seed = read_config(run_directory_of(source)).seed if run_format.matches(source) else None
        size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
        models[path] = StudiedModel(encoder.sha256, fingerprint, seed, size)
    return models


def make_model_cells(study: Study, models: dict[str, StudiedModel]) -> list[Cell]:
    """All cells of a study of models, the baseline first.

    Runs of two levels with the same index are paired if each level is one model, which they fine-tune with the same
    seed, or if the models are of runs with the same seed.

    Raises:
      UserError: a wrong number of models or seeds, metrics that models do not have, or two cells with equal runs.
    """
    where = f"study {study.name}"
    require(study.seeds >= 2, f"{where}: seeds is 1: an interval needs at least 2 seeds, and a verdict 3")
    allowed = ("mlm_loss", "mlm_accuracy", *study.tasks)
    for metric in study.margins:
        require(metric in allowed, f"{where}: margins.{metric}: a study of models compares {', '.join(allowed)}")
    cells: list[Cell] = []
    for levels in study.combinations():
        study.check_changes(levels)
        name, paths, tasks = study.cell_name(levels), study.models_of(levels), study.finetune_options(levels)
        at = f"{where}, {name}"
        require(bool(paths), f"{at} has no models, and others have: name some, or pretrain all levels")
        require(
            len(paths) in (1, study.seeds) and len({*paths}) == len(paths),
            f"{at} has {len(paths)} models for {study.seeds} seeds: give one, which all seeds fine-tune, or a "
            "different one for each seed",
        )
        require(
            len(paths) > 1 or {*study.margins}.isdisjoint(METRICS),
            f"{at} is one model, whose held-out loss has no spread over seeds: leave mlm_* out of margins, and compare "
            "two models over items with bert-jax analyse A --compare B",
        )
        for one in cells:
            require(
                paths != one.models or tasks != one.tasks,
                f"{at} and {one.name} would have equal runs (the same models and tasks): change a level, or remove it",
            )
        same = next((one.name for one in cells if one.models == paths), name)
        cost = Cost(0, 0, 0.0, models[paths[0]].parameters)
        seeds = _seeds(paths, models, study.seeds)
        cells.append(Cell(name, levels, study.base, cost, tasks, same, tuple(study.margins), seeds, paths))
    check_margins(study, cells)
    return cells


def _seeds(paths: tuple[str, ...], models: dict[str, StudiedModel], count: int) -> tuple[str, ...]:
    """What tells the runs of a cell apart: two cells with the same ones are paired."""
    if len(paths) == 1:
        return tuple(f"fine-tuning {index}" for index in range(count))
    return tuple(path if models[path].seed is None else f"pretraining {models[path].seed}" for path in paths)
