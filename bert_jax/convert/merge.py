"""The weighted mean of several models: of checkpoints of a run, or of runs that began with the same parameters
(Wortsman et al. 2022, "Model soups").
"""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from bert_jax.convert.formats import input_formats
from bert_jax.convert.source_model import RunCorpora, SourceModel
from bert_jax.convert.translate import COMPUTE_FIELDS, TRAINING_FIELDS, first_architecture_difference
from bert_jax.data.corpus_description import CorpusDescription
from bert_jax.errors import UserError, require
from bert_jax.storage.paths import StoredPath
from bert_jax.training.param_paths import map_with_paths, name_leaves


def merge_models(sources: Sequence[StoredPath], weights: Sequence[float] | None, stack: ExitStack) -> SourceModel:
    """The weighted mean of the parameters, computed in float64, and the corpora of all; all else is the first model's.

    Args:
      sources: at least two runs, checkpoints or models (formats/input_formats.py).
      weights: one per source; they are divided by their sum. None: equal ones.
      stack: closes the first source's files.

    Raises:
      UserError: fewer than two sources; weights that are negative, all 0, or of another number; models whose
        architecture, heads or tokenizers differ.
    """
    require(len(sources) > 1, f"merging needs at least two models, {len(sources)} given")
    weights = [1.0] * len(sources) if weights is None else list(weights)
    if len(weights) != len(sources):
        raise UserError(f"--weights has {len(weights)} numbers for {len(sources)} models: give one for each")
    valid = all(0 <= weight < np.inf for weight in weights) and 0 < sum(weights) < np.inf
    require(valid, f"--weights {' '.join(map(str, weights))}: weights must not be negative, and one must be above 0")
    shares = [weight / sum(weights) for weight in weights]
    first = stack.enter_context(input_formats.open_model(sources[0]))
    corpora = [first.corpora]
    sums = {name: shares[0] * np.asarray(leaf, np.float64) for name, leaf in name_leaves(first.model.params).items()}
    for source, share in zip(sources[1:], shares[1:], strict=True):
        with input_formats.open_model(source) as other:
            _check_alike(first, other)
            corpora.append(other.corpora)
            for name, leaf in name_leaves(other.model.params).items():
                sums[name] += share * np.asarray(leaf, np.float64)
    params = map_with_paths(lambda path, leaf: sums[path].astype(np.float32), first.model.params)
    parts = ", ".join(f"{source} ({share:.3g})" for source, share in zip(sources, shares, strict=True))
    note = f"Its parameters are the weighted mean of those of {parts}."
    return dataclasses.replace(
        first,
        model=first.model._replace(params=params),
        hf_model=None,
        notes=(*first.notes, note),
        corpora=_joint_corpora(corpora, shares),
    )


def _joint_corpora(corpora: Sequence[RunCorpora], shares: Sequence[float]) -> RunCorpora:
    """The corpora of all models, each with its mean share of the rows; none unless all models have recorded theirs."""
    joint: dict[str, tuple[float, CorpusDescription]] = {}
    for of_model, weight in zip(corpora, shares, strict=True):
        for share, corpus in of_model:
            key = json.dumps(corpus, sort_keys=True)
            joint[key] = weight * share + joint.get(key, (0.0,))[0], corpus
    return tuple(joint.values()) if all(corpora) else ()


def _check_alike(first: SourceModel, other: SourceModel) -> None:
    """Raise UserError unless the parameters of two models mean the same."""
    configs, may_differ = (first.model.config, other.model.config), (*TRAINING_FIELDS, *COMPUTE_FIELDS)
    if (name := first_architecture_difference(*configs, may_differ)) is not None:
        values = [getattr(config, name) for config in configs]
        raise UserError(f"{first} and {other} are different models: {name} is {values[0]} and {values[1]}")
    if first.model.heads != other.model.heads:
        raise UserError(f"{first} and {other} have different heads: leave them out with bert-jax convert --drop")
    prints = [None if (one := model.loaded_tokenizer) is None else one.fingerprint for model in (first, other)]
    if prints[0] != prints[1]:
        raise UserError(f"{first} and {other} have different tokenizers: a token id means something else in each")
