"""Held-out losses of a model of any format on corpora that were built with its tokenizer."""

from typing import Any

import jax
import numpy as np

from bert_jax.config import Config, DataConfig, ObjectiveConfig, Phase
from bert_jax.convert.formats import input_formats, run
from bert_jax.convert.source_model import SourceModel
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import UserError
from bert_jax.storage.paths import StoredPath, to_path
from bert_jax.training import pretraining
from bert_jax.training.param_paths import map_with_paths, name_leaves
from bert_jax.training.pretraining import EvaluationResult, evaluate_model
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import put_equal
from bert_jax.training.task import Params

SEQ_LEN = 128
"""Tokens per row by default, if the model has that many positions."""


def score(source: StoredPath, parts: list[CorpusWeight], **options: Any) -> EvaluationResult:
    """Held-out metrics of a run, of a checkpoint of a run, or of a model of any format.

    Args:
      source: its directory.
      parts: corpora with the validation splits to score.
      options: as of `evaluate_model`; by default those of the run, or those of `score_model`.
    """
    if run.matches(source):
        return pretraining.evaluate(source, parts, **options)
    with input_formats.open_model(source) as source_model:
        return score_model(source_model, parts, **options)


def score_model(source_model: SourceModel, parts: list[CorpusWeight], **options: Any) -> EvaluationResult:
    """Held-out metrics of a model, by default on rows of full sentences.

    Args:
      source_model: an open model with an MLM head.
      parts: corpora with the validation splits to score.
      options: as of `evaluate_model`.

    Raises:
      UserError: the model has no tokenizer, no MLM head, or one with another activation than its layers; and as
        `evaluate_model`.
    """
    model, tokenizer = source_model.model, source_model.loaded_tokenizer
    if tokenizer is None:
        raise UserError(f"{source_model} has no tokenizer, so it is not known which corpus fits it")
    if not model.heads.mlm:
        raise UserError(f"{source_model} has no head for masked language modelling, so it predicts no tokens")
    if model.heads.mlm_activation not in (None, model.config.activation):
        raise UserError(f"{source_model}: an MLM head with {model.heads.mlm_activation} is not supported here")
    phase = Phase(seq_len=min(SEQ_LEN, model.config.max_positions), warmup_steps=0)
    config = Config(
        name="held_out",
        model=model.config,
        objective=ObjectiveConfig(pair="none"),
        data=DataConfig(format="full_sentences"),
        phases=(phase,),
    )
    named = name_leaves(model.params)

    def load(programs: Programs) -> tuple[Params, int]:
        abstract = programs.abstract_state(0).params
        params = map_with_paths(lambda path, leaf: np.asarray(named[path], np.float32), abstract)
        return put_equal(params, jax.tree.map(lambda leaf: leaf.sharding, abstract), source_model.source), 0

    return evaluate_model(config, tokenizer, load, to_path(source_model.source), parts, **options)
