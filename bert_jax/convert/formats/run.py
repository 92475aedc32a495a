"""A model out of a run's work directory."""

import jax
import numpy as np

from bert_jax.convert.name_map import check_finite
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel, family_of
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.storage import StoredPath
from bert_jax.training.param_paths import name_leaves
from bert_jax.training.pretraining_task import heads_of
from bert_jax.training.run_directory import checkpoint, workdir
from bert_jax.training.state import Moments

PAIR_LABELS = {
    "nsp": "whether the second text follows the first (label 0) or is a random one (label 1)",
    "sop": "whether the two texts stand in their order (label 0) or were swapped (label 1)",
}
"""What the pair head tells, by objective.pair. The class in transformers calls it next-sentence prediction always."""


def read(directory: StoredPath, *, optimizer_state: bool) -> SourceModel:
    """Model, as deep as it was then, tokenizer and, if wanted, moments of a run's newest intact checkpoint.

    Raises:
      UserError: the directory holds no run, the run no intact checkpoint, or the checkpoint a value that is not finite.
    """
    config = workdir.read_config(directory)
    found = checkpoint.verified(checkpoint.directory_of(directory))
    if found is None:
        raise UserError(f"{directory} has no finished checkpoint yet: train it further with bert-jax pretrain")
    model, heads = config.model_of(checkpoint.read_about(found)["phase"]), heads_of(config)
    shapes = bert.shapes(model, heads)
    params = checkpoint.restore_parts(found, {"params": shapes})["params"]
    kept = None
    if optimizer_state:
        state = {"count": jax.ShapeDtypeStruct((), np.int32), "mu": shapes, "nu": shapes}
        there = checkpoint.restore_parts(found, {"optimizer": state})["optimizer"]
        kept = Moments(int(there["count"]), there["mu"], there["nu"])
    notes = ()
    if heads.pair:
        notes = (f"Its sentence-pair head tells {PAIR_LABELS[config.objective.pair]}.",)
    for tree in (params, *(kept[1:] if kept else ())):
        for name, leaf in name_leaves(tree).items():
            check_finite(name, np.asarray(leaf), str(found))
    translated = NativeModel(family_of(model, heads), model, heads, params)
    return SourceModel(
        "run", str(directory), translated, directory / workdir.TOKENIZER, optimizer_state=kept, notes=notes
    )
