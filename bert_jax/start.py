"""Where a run's parameters come from if they are not drawn: another run, or an exported model."""

import dataclasses
import sys
from typing import Any

import jax
import numpy as np

from bert_jax import inference
from bert_jax.config import Config, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import whole
from bert_jax.tokenizer import Tokenizer
from bert_jax.training.growth import repeat_stack
from bert_jax.training.paths import map_with_paths, name_leaves
from bert_jax.training.pretraining_task import heads_of

Params = dict[str, Any]
MAY_DIFFER = {
    *("num_layers", "vocab_size", "initializer_range", "hidden_dropout", "attention_dropout"),
    *("attention", "compute_dtype", "remat", "scan_unroll"),
}
"""Fields of the model that no weight depends on, but for its first or last axis."""
OF_VOCABULARY = ("encoder/embeddings/word", "mlm/bias")
"""What `start.embeddings new` draws anew: all that has a row for each token id."""


def read_start(config: Config, tokenizer: Tokenizer) -> Params:
    """Parameters to start a run from, as numpy arrays of the shapes of its first phase.

    Layers are repeated or left out up to the phase's depth (growth.py); a part that the source does not have, such as
    a pair head, is drawn, and so is what belongs to the vocabulary if the config says so.

    Args:
      config: with `start.source`.
      tokenizer: of the run's corpora.

    Raises:
      UserError: no model at the source, one of other widths, or one with another vocabulary whose embeddings are to be
        kept.
    """
    source = config.start.source
    assert source is not None
    model = inference.load(source)
    if config.start.embeddings == "keep" and model.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"start.source {source} was trained with another tokenizer than the corpus: build the corpus with its "
            "tokenizer, or set start.embeddings new"
        )
    _refuse_other_kinds(model.config, config.model_of(0), source)
    drawn = whole.init(config.model_of(0), jax.random.key(config.seed), heads_of(config))
    there, fresh = name_leaves(model.params), []

    def choose(path: str, leaf: jax.Array) -> np.ndarray:
        if path not in there or (config.start.embeddings == "new" and path in OF_VOCABULARY):
            fresh.append(path)
            return np.asarray(leaf)
        found = np.asarray(there[path])
        if "/layers/" in path:
            found = repeat_stack(found, len(leaf))
        if found.shape != leaf.shape:
            raise UserError(
                f"start.source {source}: {path} has shape {list(found.shape)}, this run needs {list(leaf.shape)}: "
                "only the depth and, with start.embeddings new, the vocabulary may differ"
            )
        return found

    params = map_with_paths(choose, drawn)
    unused = sorted(there.keys() - name_leaves(params).keys())
    print(
        f"starting from {source}; drawn anew: {', '.join(fresh) or 'nothing'}; "
        f"not taken over: {', '.join(unused) or 'nothing'}",
        file=sys.stderr,
    )
    return params


def _refuse_other_kinds(there: ModelConfig, here: ModelConfig, source: str) -> None:
    """Weights fit by shape only would compute something else in another kind of model."""
    for field in dataclasses.fields(ModelConfig):
        was, now = getattr(there, field.name), getattr(here, field.name)
        if was != now and field.name not in MAY_DIFFER:
            raise UserError(
                f"start.source {source} has model.{field.name} {was}, this run {now}: only the depth and, with "
                "start.embeddings new, the vocabulary may differ"
            )
