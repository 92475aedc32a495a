"""A whole model: an encoder and its heads.

Only `init` and `model_from_params` convert between nested dicts of arrays, which all other packages use, and Flax
modules.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.array_types import Array, Bool, Float, Key
from bert_jax.config import ModelConfig
from bert_jax.model.activations import Edits
from bert_jax.model.cls_norm import Statistics, SumOverDevices
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.embeddings import Embeddings
from bert_jax.model.encoder import Encoder, EncoderInputs, EncoderOutput
from bert_jax.model.heads import Heads, MlmHead, PairHead, TaskHeadModule, mean_pool_examples
from bert_jax.model.layers import Dense, gather_positions, normal, truncated_normal

Params = dict[str, Any]


class BertModel(nnx.Module):
    """An encoder and its heads; an absent head is None."""

    def __init__(self, config: ModelConfig, heads: Heads, key: Key[Array, ""]):
        encoder, mlm, pair = jax.random.split(key, 3)
        task = jax.random.fold_in(key, 3)
        # A pooler that is new in fine-tuning is initialised like the task head that reads it.
        init = (normal if heads.task else truncated_normal)(config.initializer_range)
        self.encoder = Encoder(config, encoder, pooler_init=init if heads.has_pooler else None)
        self.mlm = MlmHead(config, mlm, heads.mlm_activation) if heads.mlm else None
        self.pair = PairHead(config, pair) if heads.pair else None
        self.task = TaskHeadModule(config, heads.task, task) if heads.task else None
        self.heads = heads

    @property
    def _reads_cls(self) -> bool:
        """Whether the task head reads nothing of the encoder's output but [CLS] vectors of the last layer."""
        head = self.heads.task
        return head is not None and not head.mix and head.reads in ("cls", "pooled")

    def encode(
        self, inputs: EncoderInputs, dropout_key: DropoutKey | None = None, edits: Edits | None = None
    ) -> EncoderOutput:
        """Encode a batch for `task_features`, with no more than the task head reads; arguments as of `Encoder`."""
        if self._reads_cls:
            # `task_features` applies the pooler.
            positions = inputs.cls_positions
            return self.encoder(inputs, dropout_key=dropout_key, edits=edits, positions=positions, pool=False)
        mixes = self.heads.task is not None and self.heads.task.mix
        read_state = functools.partial(self._read_state, inputs) if mixes else None
        return self.encoder(inputs, dropout_key=dropout_key, edits=edits, read_state=read_state)

    def task_view(self, inputs: EncoderInputs, output: EncoderOutput) -> EncoderOutput:
        """What `encode` returns, from an output with all positions and all hidden states."""
        if self._reads_cls:
            return output._replace(hidden=gather_positions(output.hidden, inputs.cls_positions))
        if self.heads.task is not None and self.heads.task.mix:
            return output._replace(readouts=jax.vmap(functools.partial(self._read_state, inputs))(output.hidden_states))
        return output

    def task_features(
        self, inputs: EncoderInputs, output: EncoderOutput, sum_over_devices: SumOverDevices | None = None
    ) -> tuple[Float[Array, "B n H"], Statistics]:
        """What the task head reads for each packed example (n = K) or each token (n = S).

        Args:
          inputs: a batch.
          output: of `encode`.
          sum_over_devices: in training, for batch normalisation of [CLS]; None: use its running statistics.

        Returns:
          the vectors, and new values of running statistics (`ClsNorm`).
        """
        assert self.task is not None and self.heads.task is not None
        if self.task.mix is not None:
            features = self.task.mix(output.readouts)
        else:
            features = output.hidden if self._reads_cls else self._read_state(inputs, output.hidden)
        statistics: Statistics = {}
        if self.task.cls_norm is not None:
            features, statistics = self.task.normalise(features, _has_example(inputs), sum_over_devices)
        if self.heads.task.reads == "pooled":
            features = self.encoder.pool(features)
        return features, statistics

    def task_logits(self, inputs: EncoderInputs, output: EncoderOutput) -> Float[Array, "B n C"]:
        """Logits of the task head, float32, without dropout; arguments as of `task_features`."""
        return self.task(self.task_features(inputs, output)[0])

    def _read_state(self, inputs: EncoderInputs, hidden: Float[Array, "B S H"]) -> Float[Array, "B n H"]:
        """What the task head, or its pooler, reads of one hidden state."""
        reads = self.heads.task.reads
        if reads == "tokens":
            return hidden
        if reads == "mean":
            means = mean_pool_examples(hidden, inputs.segment_ids, inputs.cls_positions.shape[1])
            return means.astype(hidden.dtype)
        return gather_positions(hidden, inputs.cls_positions)


def _has_example(inputs: EncoderInputs) -> Bool[Array, "B K"]:
    """Whether a slot of a row has an example: its number is that of the segment at its [CLS]."""
    segments = gather_positions(inputs.segment_ids, inputs.cls_positions)
    return segments == jnp.arange(1, segments.shape[1] + 1)[None]


def init(config: ModelConfig, key: Key[Array, ""], heads: Heads) -> Params:
    """Initial parameters as a nested dict of float32 arrays.

    Layers are stacked on a leading axis: ``params["encoder"]["layers"]["qkv"]["kernel"]`` is
    [L, H, 3, N, D]. Weights are truncated normal, those of task heads and of a pooler beside one
    normal, biases 0, norm scales 1.
    """
    _, state = nnx.split(BertModel(config, heads, key))
    return nnx.to_pure_dict(state)


def shapes(config: ModelConfig, heads: Heads) -> Params:
    """The tree that `init` returns, with `jax.ShapeDtypeStruct` leaves."""
    return jax.tree.map(lambda leaf: leaf, _shapes(config, heads))  # a tree that the caller may change


@functools.lru_cache(maxsize=32)
def _shapes(config: ModelConfig, heads: Heads) -> Params:
    return jax.eval_shape(lambda: init(config, jax.random.key(0), heads))


def int8_axes(config: ModelConfig, heads: Heads) -> dict[str, tuple[int, ...]]:
    """By path, the parameters that `model.dense_dtype int8` rounds, and the axes along which elements share a scale.

    Kernels have a scale per layer and output channel, tables one per row. The layers say themselves what they round.
    """
    axes: dict[str, tuple[int, ...]] = {}
    model = nnx.eval_shape(lambda: BertModel(dataclasses.replace(config, dense_dtype="int8"), heads, jax.random.key(0)))
    for path, module in nnx.iter_graph(model):
        if isinstance(module, Dense) and module.dtype == "int8":
            first = 1 if "layers" in path else 0  # stacked on axis 0
            axes["/".join((*map(str, path), "kernel"))] = tuple(range(first, first + module.num_inputs))
        elif isinstance(module, Embeddings):
            tables = (name for name in ("word", "position", "token_type") if getattr(module, name) is not None)
            axes |= {"/".join((*map(str, path), name)): (1,) for name in tables}
        elif isinstance(module, MlmHead) and module.extra_columns is not None:
            axes["/".join((*map(str, path), "extra_columns"))] = (1,)
    return axes


def model_from_params(config: ModelConfig, heads: Heads, params: Params) -> BertModel:
    """The model with these parameters."""
    return nnx.merge(_graph(config, heads), params)


@functools.lru_cache(maxsize=8)
def _graph(config: ModelConfig, heads: Heads) -> nnx.GraphDef:
    model = nnx.eval_shape(lambda: BertModel(config, heads, jax.random.key(0)))
    return nnx.split(model)[0]
