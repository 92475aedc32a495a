"""Reads a model from a run's work directory."""

import json
from pathlib import Path

import jax
import numpy as np

from bert_jax.convert.formats.format import InputFormat, ReadOptions, refuse_drop_and_trim
from bert_jax.convert.name_map import check_finite
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, infer_model_type
from bert_jax.errors import UserError
from bert_jax.model.generator import ModelSpec, Params, discriminator_params, generator_heads, generator_params
from bert_jax.storage.paths import StoredPath
from bert_jax.training.job import intact_checkpoint, run_directory_of
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.run_directory import checkpoint, workdir
from bert_jax.training.run_directory.run_tokenizer import load_tokenizer
from bert_jax.training.state import Moments

PAIR_LABELS = {
    "nsp": "whether the second text follows the first (label 0) or is a random one (label 1)",
    "sop": "whether the two texts are in their original order (label 0) or were swapped (label 1)",
}
"""What the pair head predicts, by objective.pair. transformers always calls it next-sentence prediction."""


def matches(source: StoredPath) -> bool:
    """Whether a directory is a run's work directory, or one checkpoint of a run."""
    return _is_workdir(run_directory_of(source))


def _is_workdir(source: StoredPath) -> bool:
    if (source / workdir.LEDGER).exists():
        return True
    try:
        return "stream_version" in json.loads((source / workdir.CONFIG).read_text())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read(directory: StoredPath, options: ReadOptions, scratch: Path) -> SourceModel:
    """Read the newest intact checkpoint of a run, or the given one, with the depth of its phase.

    With `optimizer.ema_decay` the parameters are the moving average, without it or with moments the trained ones.

    Raises:
      UserError: no run, no intact checkpoint, another tokenizer than that of the checkpoint, or a value that is not
        finite.
    """
    refuse_drop_and_trim(directory, options)
    source, directory = directory, run_directory_of(directory)
    run = workdir.read_run(directory)
    config = run["config"]
    if options.optimizer_state and config.optimizer.name == "muon":
        raise UserError(
            f"{directory} was trained with muon, whose matrices have no moments of Adam: leave its optimizer state out "
            "(--optimizer-state drop, start.optimizer_state new)"
        )
    save = intact_checkpoint(source)
    if (directory / workdir.TOKENIZER).exists():
        load_tokenizer(directory, save)
    spec = model_spec(config, checkpoint.read_metadata(save)["phase"])
    if options.part == "generator" and spec.generator is None:
        raise UserError(f"--part generator: the run in {directory} has no generator (objective.token): leave it out")
    shapes = spec.shapes()
    # Moments are those of the trained parameters.
    averaged = config.optimizer.ema_decay is not None and not options.optimizer_state
    part = "average" if averaged else "params"
    params = _part_of(checkpoint.restore_parts(save, {part: shapes})[part], spec, spec.embeddings, options.part)
    moments = None
    if options.optimizer_state:
        state = {"count": jax.ShapeDtypeStruct((), np.int32), "mu": shapes, "nu": shapes}
        restored = checkpoint.restore_parts(save, {"optimizer": state})["optimizer"]
        # The moments of a difference of tables are those of the discriminator's table.
        mode = spec.embeddings if options.part == "generator" else "shared"
        trees = (_part_of(restored[name], spec, mode, options.part) for name in ("mu", "nu"))
        moments = Moments(int(restored["count"]), *trees)
    model, heads = spec.model, spec.heads
    notes = ()
    if heads.pair:
        notes = (f"Its sentence-pair head predicts {PAIR_LABELS[config.objective.pair]}.",)
    if averaged:
        notes += (f"Its parameters are the moving average of a run's (decay {config.optimizer.ema_decay:g} per step).",)
    for tree in (params, *(moments[1:] if moments else ())):
        for name, leaf in name_leaves(tree).items():
            check_finite(name, np.asarray(leaf), str(save))
    family = config.finetune.family if config.finetune else infer_model_type(model, heads)
    if options.part == "generator":
        model, heads = spec.generator, generator_heads(spec.generator)
    translated = NativeModel(family, model, heads, params)
    descriptions = run.get("corpus_descriptions", {})
    return SourceModel(
        "run",
        str(source),
        translated,
        directory / workdir.TOKENIZER,
        optimizer_state=moments,
        notes=notes,
        corpora=tuple((share, descriptions[one]) for one, share in run["corpora"].items() if one in descriptions),
    )


def _part_of(tree: Params, spec: ModelSpec, embeddings: str, part: str) -> Params:
    if spec.generator is None or part == "both":
        return tree
    return (generator_params if part == "generator" else discriminator_params)(tree, embeddings)


INPUT = InputFormat("a work directory", matches, read)
