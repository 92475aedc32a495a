"""Parameters of a discriminator and its generator in one tree (ELECTRA, Clark et al. 2020; DeBERTa-v3, He et al. 2023).

The tree is that of the discriminator, with the generator's parameters under ``generator/``. So both are sharded,
decayed and saved by the same tables, and the discriminator is read from a checkpoint as the model of any run. With
shared embeddings, the generator's tables and their norm are the discriminator's. With disentangled embeddings, the
tables of the discriminator's tree are differences to the generator's.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.array_types import Array, Key
from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.heads import Heads

Params = dict[str, Any]
GENERATOR = "generator"
TABLES = ("word", "position", "token_type")
SHARED = (*TABLES, "norm")
"""Parameters of the embeddings that both models have in common; each has its own projection."""

_GENERATOR_KEY = 4
"""Folded into the key of initial parameters; `bert.init` folds in smaller numbers."""


class ModelSpec(NamedTuple):
    """What the tree of a run's parameters depends on."""

    model: ModelConfig
    heads: Heads
    generator: ModelConfig | None = None
    """None: the run has no generator, and its tree is that of the model."""
    embeddings: str = "shared"
    """`ObjectiveConfig.generator_embeddings`."""

    def init(self, key: Key[Array, ""]) -> Params:
        """New parameters."""
        params = bert.init(self.model, key, self.heads)
        if self.generator is None:
            return params
        of_generator = bert.init(
            self.generator, jax.random.fold_in(key, _GENERATOR_KEY), generator_heads(self.generator)
        )
        return join_params(params, of_generator, self.embeddings)

    def shapes(self) -> Params:
        """The tree that `init` returns, with `jax.ShapeDtypeStruct` leaves."""
        if self.generator is None:
            return bert.shapes(self.model, self.heads)
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))


def generator_heads(model: ModelConfig) -> Heads:
    """The heads of a generator. Its MLM head has `gelu` whatever the layers have, as in transformers."""
    return Heads(mlm_activation=None if model.activation == "gelu" else "gelu")


def join_params(discriminator: Params, generator: Params, embeddings: str) -> Params:
    """The tree of both models in their initial state; differences of tables begin at 0.

    Args:
      discriminator: its parameters.
      generator: its parameters.
      embeddings: `ObjectiveConfig.generator_embeddings`.
    """
    if embeddings == "shared":
        kept = {name: x for name, x in _embeddings(generator).items() if name not in SHARED}
        return {**discriminator, GENERATOR: _with_embeddings(generator, kept)}
    zeros = {name: jax.numpy.zeros_like(x) for name, x in _embeddings(discriminator).items() if name in TABLES}
    return {**_with_embeddings(discriminator, _embeddings(discriminator) | zeros), GENERATOR: generator}


def join_trained_params(discriminator: Params, generator: Params, embeddings: str) -> Params:
    """The tree of two trained models: the inverse of `discriminator_params` and `generator_params`.

    Args:
      discriminator: its parameters, numpy arrays.
      generator: its parameters; with shared embeddings, those that both have are equal.
      embeddings: `ObjectiveConfig.generator_embeddings`.
    """
    joined = join_params(discriminator, generator, embeddings)
    if embeddings == "shared":
        return joined
    first, second = _embeddings(discriminator), _embeddings(generator)
    differences = {name: first[name] - second[name] for name in TABLES if name in first}
    return _with_embeddings(joined, _embeddings(joined) | differences)


def discriminator_params(params: Params, embeddings: str) -> Params:
    """The parameters of the discriminator; tables of differences are added to the generator's, which get no gradient.

    Args:
      params: of both models, as jax or numpy arrays.
      embeddings: `ObjectiveConfig.generator_embeddings`.
    """
    own = {name: x for name, x in params.items() if name != GENERATOR}
    if embeddings == "shared":
        return own
    tables, differences = _embeddings(params[GENERATOR]), _embeddings(own)
    folded = {name: _without_gradient(tables[name]) + differences[name] for name in TABLES if name in tables}
    return _with_embeddings(own, differences | folded)


def generator_params(params: Params, embeddings: str) -> Params:
    """The parameters of the generator; arguments as of `discriminator_params`."""
    own = params[GENERATOR]
    if embeddings != "shared":
        return own
    shared = {name: x for name, x in _embeddings(params).items() if name in SHARED}
    return _with_embeddings(own, _embeddings(own) | shared)


def _without_gradient(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else jax.lax.stop_gradient(x)


def _embeddings(params: Params) -> Params:
    return params["encoder"].get("embeddings", {})


def _with_embeddings(params: Params, embeddings: Params) -> Params:
    """The same tree with other embeddings, without the node if there are none."""
    encoder = {name: x for name, x in params["encoder"].items() if name != "embeddings"}
    return {**params, "encoder": {**encoder, "embeddings": embeddings} if embeddings else encoder}
