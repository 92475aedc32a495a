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
from bert_jax.model.generator import GENERATOR, SHARED, generator_heads, join_trained_params
from bert_jax.tokenizers.tokenizer import Tokenizer
from bert_jax.training.param_paths import LAYERS, map_with_paths, name_leaves
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
        source_params = _with_generator(source_model, config)
        _check_tables(source_params, initialized, config)
        _check_generator_depth(source_params, initialized, config)
        pieces = _pieces(source_model, config, tokenizer)
        params, fresh = _fit(source_params, initialized, config, pieces)
        unused = sorted(name_leaves(source_params).keys() - name_leaves(params).keys())
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
        _with_generator(source_model, config)


def _with_generator(source_model: SourceModel, config: Config) -> Params:
    """The parameters of the source, with those of `start.generator` if there is one.

    Raises:
      UserError: the generator does not belong to the source, or is not the one that the objective describes.
    """
    path, mode = config.start.generator, config.objective.generator_embeddings
    params = source_model.model.params
    if path is None:
        return params
    require(GENERATOR not in params, f"start.source {config.start.source} has a generator: leave start.generator out")
    with input_formats.open_model(path) as generator:
        _check_generator(generator, source_model, config)
        own, params = (jax.tree.map(np.asarray, tree) for tree in (generator.model.params, params))
        if mode == "shared":
            first, second = name_leaves(params), name_leaves(own)
            shared = tuple(f"encoder/embeddings/{name}" for name in SHARED)
            names = (name for name in second if name.startswith(shared))
            differing = next((name for name in names if not np.array_equal(first.get(name), second[name])), None)
            require(
                differing is None,
                f"start.generator {path}: {differing} is not that of start.source: set objective.generator_embeddings "
                "disentangled",
            )
        return join_trained_params(params, own, mode)


def _check_generator(generator: SourceModel, source_model: SourceModel, config: Config) -> None:
    """Raise UserError if a generator is not the one of the objective, or has another tokenizer than the source."""
    expected, path = config.generator_of(0), config.start.generator
    if expected is None:
        raise UserError("start.generator: only replaced-token detection has a generator: set objective.token rtd")
    found, heads = generator.model.config, generator.model.heads
    require(heads.mlm, f"start.generator {path} has no MLM head: give the model that fills masks")
    ignored = ("vocab_size", *TRAINING_FIELDS, *COMPUTE_FIELDS)
    if (name := first_architecture_difference(found, expected, ignored)) is not None:
        share = found.hidden_size / config.model.hidden_size
        raise UserError(
            f"start.generator {path} has model.{name} {getattr(found, name)}, this run's generator "
            f"{getattr(expected, name)}: set objective.generator_width {share:.4g} and objective.generator_layers "
            f"{found.num_layers}, or leave it out"
        )
    require(
        heads.mlm_activation == generator_heads(expected).mlm_activation,
        f"start.generator {path} has an MLM head with {heads.mlm_activation}, which no generator has: leave it out",
    )
    tokenizers = (generator.loaded_tokenizer, source_model.loaded_tokenizer)
    prints = {None if one is None else one.fingerprint for one in tokenizers}
    require(
        len(prints) == 1,
        f"start.generator {path} has another tokenizer than start.source {config.start.source}: give the one that was "
        "trained with it",
    )


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


def _check_generator_depth(source_params: Params, initialized: Params, config: Config) -> None:
    """Raise UserError if a generator would get another depth, unless it follows that of its discriminator."""
    (model, generator), (wanted_model, wanted) = (
        [_depth(params, f"{of}{LAYERS}") for of in ("", f"{GENERATOR}/")] for params in (source_params, initialized)
    )
    require(
        generator in (None, wanted) or (generator, wanted) == (model, wanted_model),
        f"start.source {config.start.source} has a generator of {generator} layers, this run's has {wanted}: set "
        f"objective.generator_layers {generator}",
    )


def _depth(params: Params, layers: str) -> int | None:
    """Layers below a path; None: there are none."""
    return next((len(leaf) for path, leaf in name_leaves(params).items() if path.startswith(layers)), None)


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
