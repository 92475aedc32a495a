"""Initial parameters of a run from another run or an exported model."""

import sys
from typing import Any

import jax
import numpy as np

from bert_jax.config import Config, ModelConfig
from bert_jax.convert.formats import input_formats
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import COMPUTE_FIELDS, TRAINING_FIELDS, first_architecture_difference
from bert_jax.convert.vocabulary_transfer import source_pieces, transfer_rows
from bert_jax.errors import UserError, require
from bert_jax.model.generator import GENERATOR
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.state import InitialParams, Moments, repeat_stack

Params = dict[str, Any]
MAY_DIFFER = ("num_layers", "vocab_size", *TRAINING_FIELDS, *COMPUTE_FIELDS)
"""Fields of `ModelConfig` on which no parameter depends, or only its first or last axis."""
VOCABULARY_PARAMS = ("encoder/embeddings/word", "mlm/bias", "mlm/extra_columns")
"""Parameters with a row for each token id, which start.embeddings is about."""


def load_initial_params(config: Config, tokenizer: Tokenizer) -> InitialParams:
    """Read the parameters and, with start.optimizer_state keep, the optimizer's moments that a run starts from.

    Layers are repeated or dropped to match the phase's depth (`repeat_stack`). Parameters that the source lacks,
    such as a pair head, and with start.embeddings new those of the vocabulary, are initialized at random; their moments
    are 0. With start.embeddings transfer, a token that the source lacks gets the mean of the rows of its pieces there.

    Args:
      config: with `start.source`.
      tokenizer: tokenizer of the run's corpora.

    Raises:
      UserError: the source has no model, other widths, another vocabulary although the embeddings are kept, or no
        moments although they are kept.
    """
    source, keep = config.start.source, config.start.optimizer_state == "keep"
    assert source is not None
    options = input_formats.ReadOptions(optimizer_state=keep, part="both" if config.generator_of(0) else "model")
    with input_formats.open_model(source, options) as source_model:
        _check_source(source_model, config, tokenizer)
        initialized = model_spec(config, 0).init(jax.random.key(config.seed))
        _check_tables(source_model.model.params, initialized, config)
        pieces = _pieces(source_model, config, tokenizer)
        params, fresh = _fit(source_model.model.params, initialized, config, pieces)
        unused = sorted(name_leaves(source_model.model.params).keys() - name_leaves(params).keys())
        print(
            f"starting from {source}; initialized at random: {', '.join(fresh) or 'nothing'}; "
            f"not used: {', '.join(unused) or 'nothing'}{_describe(pieces)}",
            file=sys.stderr,
        )
        if source_model.optimizer_state is None:
            return InitialParams(params, None)
        if fresh:
            raise UserError(
                f"start.source {source} lacks {fresh[0]}: its moments would be 0 with the kept step count: "
                "set start.optimizer_state new"
            )
        zeros = jax.tree.map(np.zeros_like, params)
        mu, nu = (_fit(tree, zeros, config)[0] for tree in source_model.optimizer_state[1:])
        return InitialParams(params, Moments(source_model.optimizer_state.step, mu, nu))


def check_source(config: Config, tokenizer: Tokenizer) -> None:
    """Check that a run can start from `start.source`, as far as its shapes and settings show it.

    Raises:
      UserError: as `load_initial_params`.
    """
    assert config.start.source is not None
    keep = config.start.optimizer_state == "keep"
    with input_formats.open_model(config.start.source, input_formats.ReadOptions(optimizer_state=keep)) as source_model:
        _check_source(source_model, config, tokenizer)


def _check_source(source_model: SourceModel, config: Config, tokenizer: Tokenizer) -> None:
    source = config.start.source
    assert source is not None
    _check_vocabulary(source_model, config, tokenizer)
    if config.start.optimizer_state == "keep" and source_model.optimizer_state is None:
        raise UserError(f"start.source {source} has no optimizer moments: set start.optimizer_state new")
    _check_architecture(source_model.model.config, config.model_of(0), source)
    if (activation := source_model.model.heads.mlm_activation) is not None:
        raise UserError(
            f"start.source {source} has an MLM head with {activation}, this run's has {config.model.activation}: "
            "convert it with --drop to leave the head out"
        )


def _pieces(source_model: SourceModel, config: Config, tokenizer: Tokenizer) -> list[list[int]] | None:
    """The source's pieces of every token with start.embeddings transfer."""
    if config.start.embeddings != "transfer":
        return None
    known = source_model.loaded_tokenizer
    assert known is not None  # _check_vocabulary
    return source_pieces(known, tokenizer)


def _describe(pieces: list[list[int]] | None) -> str:
    if pieces is None:
        return ""
    means = sum(len(ids) > 1 for ids in pieces)
    return f"; of {len(pieces):,} tokens, {means:,} have the mean embedding of several pieces of the source"


def _fit(
    source_params: Params, default: Params, config: Config, pieces: list[list[int]] | None = None
) -> tuple[Params, list[str]]:
    """Fit the parameters of a source to the shapes of a run.

    Args:
      source_params: of the source.
      default: tree with the shapes of the run.
      config: of the run.
      pieces: with start.embeddings transfer, those of `source_pieces`.

    Returns:
      a tree like `default`, with the source's leaves where it has them; and the paths that it does not have.

    Raises:
      UserError: a leaf has another width.
    """
    named, start = name_leaves(source_params), config.start
    fresh = []

    def choose(path: str, leaf: jax.Array | np.ndarray) -> np.ndarray:
        of_vocabulary = path.removeprefix(f"{GENERATOR}/") in VOCABULARY_PARAMS
        if path not in named or (start.embeddings == "new" and of_vocabulary):
            fresh.append(path)
            return np.asarray(leaf)
        array = np.asarray(named[path])
        if pieces is not None and of_vocabulary and array.shape[1:] == leaf.shape[1:]:
            array = transfer_rows(array, pieces, np.asarray(leaf))
        if "/layers/" in path:
            array = repeat_stack(array, len(leaf))
        if array.shape != leaf.shape:
            raise UserError(
                f"start.source {start.source}: {path} has shape {list(array.shape)}, this run needs "
                f"{list(leaf.shape)}: only the depth and, with start.embeddings new or transfer, the vocabulary may "
                "differ"
            )
        return array

    return map_with_paths(choose, default), fresh


def _check_tables(source_params: Params, initialized: Params, config: Config) -> None:
    """Raise UserError if only one of source and run has tables that are differences to a generator's."""
    source, run = (f"{GENERATOR}/encoder/embeddings/word" in name_leaves(x) for x in (source_params, initialized))
    has, wanted = ("disentangled" if apart else "shared" for apart in (source, run))
    require(
        source == run,
        f"start.source {config.start.source} has no {wanted} embeddings of a generator, which "
        f"objective.generator_embeddings asks for: set objective.generator_embeddings {has}",
    )


def _check_vocabulary(source_model: SourceModel, config: Config, tokenizer: Tokenizer) -> None:
    if config.start.embeddings == "new":
        return
    source = config.start.source
    if source_model.tokenizer_path is None:
        raise UserError(f"start.source {source} has no tokenizer to compare: put its tokenizer.json in its directory")
    loaded = source_model.loaded_tokenizer
    if config.start.embeddings == "transfer":
        require(
            loaded.kind == tokenizer.kind,
            f"start.source {source} has a {loaded.kind} tokenizer, the corpus {tokenizer.kind}, whose pieces cannot be "
            "compared: set start.embeddings new",
        )
    elif loaded.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"start.source {source} was trained with another tokenizer than the corpus: build the corpus with its "
            "tokenizer, or set start.embeddings transfer or new"
        )


def _check_architecture(source_config: ModelConfig, config: ModelConfig, source: str) -> None:
    """Raise UserError if a field differs: weights of equal shapes would compute something else."""
    name = first_architecture_difference(source_config, config, MAY_DIFFER)
    if name is not None:
        raise UserError(
            f"start.source {source} has model.{name} {getattr(source_config, name)}, this run {getattr(config, name)}: "
            "only the depth and, with start.embeddings new or transfer, the vocabulary may differ"
        )
