"""Where a run's parameters come from if they are not drawn: another run, or an exported model."""

import sys
from typing import Any

import jax
import numpy as np

from bert_jax.config import Config, ModelConfig
from bert_jax.convert.formats import input_formats
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import first_different_field
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.pretraining_task import heads_of
from bert_jax.training.stacking import repeat_stack
from bert_jax.training.state import InitialParams, Moments

Params = dict[str, Any]
MAY_DIFFER = {
    *("num_layers", "vocab_size", "initializer_range", "hidden_dropout", "attention_dropout"),
    *("attention", "compute_dtype", "remat", "scan_unroll"),
}
"""Fields of the model that no weight depends on, but for its first or last axis."""
OF_VOCABULARY = ("encoder/embeddings/word", "mlm/bias")
"""What `start.embeddings new` draws anew: all that has a row for each token id."""


def load_initial_params(config: Config, tokenizer: Tokenizer) -> InitialParams:
    """Parameters and, if the config says so, moments to start a run from.

    Layers are repeated or left out up to the phase's depth (training/stacking.py); a part that the source does not
    have, such as a pair head, is drawn, and so is what belongs to the vocabulary if the config says so; its
    moments are 0.

    Args:
      config: with `start.source`.
      tokenizer: of the run's corpora.

    Raises:
      UserError: no model at the source, one of other widths, one with another vocabulary whose embeddings are to be
        kept, or one without moments that are to be kept.
    """
    source, keep = config.start.source, config.start.moments == "keep"
    assert source is not None
    with input_formats.open_model(source, input_formats.ReadOptions(optimizer_state=keep)) as source_model:
        _refuse_other_vocabulary(source_model, config, tokenizer)
        if keep and source_model.optimizer_state is None:
            raise UserError(f"start.source {source} has no moments of an optimizer: set start.moments new")
        _refuse_other_kinds(source_model.model.config, config.model_of(0), source)
        if (activation := source_model.model.heads.mlm_activation) is not None:
            raise UserError(
                f"start.source {source} has an MLM head with {activation}, this run's has {config.model.activation}: "
                "convert it with --drop to leave the head out"
            )
        drawn = bert.init(config.model_of(0), jax.random.key(config.seed), heads_of(config))
        fitting = _Fitting(config)
        params = fitting.fit(source_model.model.params, drawn)
        unused = sorted(name_leaves(source_model.model.params).keys() - name_leaves(params).keys())
        print(
            f"starting from {source}; drawn anew: {', '.join(fitting.fresh) or 'nothing'}; "
            f"not taken over: {', '.join(unused) or 'nothing'}",
            file=sys.stderr,
        )
        if source_model.optimizer_state is None:
            return InitialParams(params, None)
        if fitting.fresh:
            raise UserError(
                f"start.source {source} lacks {fitting.fresh[0]}, whose moments would be fresh ones beside old ones: "
                "set start.moments new"
            )
        zeros = jax.tree.map(np.zeros_like, params)
        mu, nu = (fitting.fit(tree, zeros) for tree in source_model.optimizer_state[1:])
        return InitialParams(params, Moments(source_model.optimizer_state.step, mu, nu))


class _Fitting:
    """Puts what a source has into the shapes of a run.

    Attributes:
      fresh: paths of what it did not have.
    """

    def __init__(self, config: Config):
        self._config = config
        self.fresh: list[str] = []

    def fit(self, there: Params, otherwise: Params) -> Params:
        """A tree of the source's leaves, or of those of `otherwise` where it has none.

        Raises:
          UserError: a leaf has another width.
        """
        named, start = name_leaves(there), self._config.start
        self.fresh = []

        def choose(path: str, leaf: jax.Array | np.ndarray) -> np.ndarray:
            if path not in named or (start.embeddings == "new" and path in OF_VOCABULARY):
                self.fresh.append(path)
                return np.asarray(leaf)
            found = np.asarray(named[path])
            if "/layers/" in path:
                found = repeat_stack(found, len(leaf))
            if found.shape != leaf.shape:
                raise UserError(
                    f"start.source {start.source}: {path} has shape {list(found.shape)}, this run needs "
                    f"{list(leaf.shape)}: only the depth and, with start.embeddings new, the vocabulary may differ"
                )
            return found

        return map_with_paths(choose, otherwise)


def _refuse_other_vocabulary(source_model: SourceModel, config: Config, tokenizer: Tokenizer) -> None:
    if config.start.embeddings == "new":
        return
    source = config.start.source
    if source_model.tokenizer_path is None:
        raise UserError(f"start.source {source} has no tokenizer to compare: put its tokenizer.json beside it")
    if Tokenizer.load(source_model.tokenizer_path).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"start.source {source} was trained with another tokenizer than the corpus: build the corpus with its "
            "tokenizer, or set start.embeddings new"
        )


def _refuse_other_kinds(there: ModelConfig, here: ModelConfig, source: str) -> None:
    """Weights fit by shape only would compute something else in another kind of model."""
    name = first_different_field(there, here, MAY_DIFFER)
    if name is not None:
        raise UserError(
            f"start.source {source} has model.{name} {getattr(there, name)}, this run {getattr(here, name)}: only the "
            "depth and, with start.embeddings new, the vocabulary may differ"
        )
