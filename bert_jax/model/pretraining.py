"""The pretraining model: an encoder with its MLM head and, if the objective has one, a pair head.

`init` and `bind` are the only doors between the training system, whose state is a nested dict of arrays,
and the module library.
"""

import functools
from typing import Any

import jax
from flax import nnx

from bert_jax.config import ModelConfig
from bert_jax.model.encoder import Encoder
from bert_jax.model.heads import MlmHead, PairHead
from bert_jax.shapes import Array, Key

Params = dict[str, Any]


class PretrainingModel(nnx.Module):
    """Encoder and heads, as in BertForPreTraining (or BertForMaskedLM when there is no pair head)."""

    def __init__(self, config: ModelConfig, key: Key[Array, ""], *, pair: bool):
        encoder, mlm, pair_key = jax.random.split(key, 3)
        self.encoder = Encoder(config, encoder, pooler=pair)
        self.mlm = MlmHead(config, mlm)
        self.pair = PairHead(config, pair_key) if pair else None


def init(config: ModelConfig, key: Key[Array, ""], *, pair: bool) -> Params:
    """Fresh parameters as a nested dict of float32 arrays.

    Layers are stacked on a leading axis, so ``params["encoder"]["layers"]["qkv"]["kernel"]`` is
    [L, H, 3, N, D]. Weights are truncated normal, biases 0, norm scales 1.
    """
    _, state = nnx.split(PretrainingModel(config, key, pair=pair))
    return nnx.to_pure_dict(state)


def bind(config: ModelConfig, params: Params) -> PretrainingModel:
    """The model that applies these parameters; whether it has a pair head is read off them."""
    return nnx.merge(_graph(config, "pair" in params), params)


@functools.lru_cache(maxsize=8)
def _graph(config: ModelConfig, pair: bool) -> nnx.GraphDef:
    model = nnx.eval_shape(lambda: PretrainingModel(config, jax.random.key(0), pair=pair))
    return nnx.split(model)[0]
