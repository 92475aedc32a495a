"""A whole model: an encoder and its heads.

Only `init` and `model_from_params` convert between nested dicts of arrays, which all other packages use, and Flax
modules.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Float, Key
from bert_jax.config import ModelConfig
from bert_jax.model.encoder import Encoder, EncoderInputs, EncoderOutput
from bert_jax.model.heads import Heads, MlmHead, PairHead, TaskHeadModule, mean_pool_examples

Params = dict[str, Any]


class BertModel(nnx.Module):
    """An encoder and its heads; an absent head is None."""

    def __init__(self, config: ModelConfig, heads: Heads, key: Key[Array, ""]):
        encoder, mlm, pair = jax.random.split(key, 3)
        task = jax.random.fold_in(key, 3)
        self.encoder = Encoder(config, encoder, pooler=heads.has_pooler)
        self.mlm = MlmHead(config, mlm, heads.mlm_activation) if heads.mlm else None
        self.pair = PairHead(config, pair) if heads.pair else None
        self.task = TaskHeadModule(config, heads.task, task) if heads.task else None
        self.heads = heads

    def task_logits(self, inputs: EncoderInputs, output: EncoderOutput) -> Float[Array, "B n C"]:
        """Logits of the task head for each packed example (n = K) or each token (n = S), float32."""
        assert self.task is not None and self.heads.task is not None
        reads = self.heads.task.reads
        if reads == "tokens":
            return self.task(output.hidden)
        if reads == "pooled":
            return self.task(output.pooled)
        if reads == "mean":
            means = mean_pool_examples(output.hidden, inputs.segment_ids, inputs.cls_positions.shape[1])
            return self.task(means.astype(output.hidden.dtype))
        cls_BKH = jnp.take_along_axis(output.hidden, inputs.cls_positions[:, :, None], axis=1, mode="clip")
        return self.task(cls_BKH)


def init(config: ModelConfig, key: Key[Array, ""], heads: Heads) -> Params:
    """Initial parameters as a nested dict of float32 arrays.

    Layers are stacked on a leading axis: ``params["encoder"]["layers"]["qkv"]["kernel"]`` is
    [L, H, 3, N, D]. Weights are truncated normal, biases 0, norm scales 1.
    """
    _, state = nnx.split(BertModel(config, heads, key))
    return nnx.to_pure_dict(state)


def shapes(config: ModelConfig, heads: Heads) -> Params:
    """The tree that `init` returns, with `jax.ShapeDtypeStruct` leaves."""
    return jax.eval_shape(lambda: init(config, jax.random.key(0), heads))


def model_from_params(config: ModelConfig, heads: Heads, params: Params) -> BertModel:
    """The model with these parameters."""
    return nnx.merge(_graph(config, heads), params)


@functools.lru_cache(maxsize=8)
def _graph(config: ModelConfig, heads: Heads) -> nnx.GraphDef:
    model = nnx.eval_shape(lambda: BertModel(config, heads, jax.random.key(0)))
    return nnx.split(model)[0]
