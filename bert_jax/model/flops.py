"""Floating-point operations of a model, counted from its shapes (a multiply-add is two).

Recomputation, the optimizer, embedding lookups and elementwise operations are not counted, so that MFU is comparable
between programs (PaLM, Chowdhery et al. 2022, appendix B). For the same reason all layers are counted at all positions,
although the train step computes the last one only where it is read. Frozen parameters count as trained ones, although
their gradients are not computed; task heads are not counted.
"""

from typing import NamedTuple

from bert_jax.config import ModelConfig
from bert_jax.model.layer_plan import layer_plans


class LayerWeights(NamedTuple):
    """Weights of the dense layers of one encoder layer, without biases and adapters; two FLOPs each per position."""

    enter: int
    """Projections into a bottleneck."""
    keys_and_values: int
    others: int
    """Queries, output of the attention, feed-forward."""
    leave: int
    """Projection out of a bottleneck."""


def layer_weights(
    model: ModelConfig, heads_width: int | None = None, intermediate_width: int | None = None
) -> LayerWeights:
    """The weights of a layer.

    Args:
      model: shapes.
      heads_width: of all attention heads of one device; None: of the model.
      intermediate_width: of a feed-forward layer of one device; None: of the model.
    """
    outside, inside = model.hidden_size, model.layer_width
    heads = model.num_heads * model.size_per_head if heads_width is None else heads_width
    intermediate = model.intermediate_size if intermediate_width is None else intermediate_width
    products = 3 if model.feed_forward == "gated" else 2
    others = inside * (heads + products * model.feed_forward_networks * intermediate)
    if model.bottleneck_size is None:
        return LayerWeights(0, 2 * inside * heads, inside * heads + others, 0)
    query, value = {
        "shared": (inside, outside),
        "bottleneck": (inside, inside),
        "input": (outside, outside),
    }[model.bottleneck_attention]
    projections = 2 if model.bottleneck_attention == "shared" else 1
    through = outside * inside
    return LayerWeights(projections * through, (query + value) * heads, query * heads + others, through)


def projection_weights(model: ModelConfig) -> int:
    """Weights of the projection of the embeddings to the hidden size."""
    tokens = 3 if model.embeddings == "trigrams" else 1
    return 0 if model.embedding_size is None else tokens * model.embedding_width * model.hidden_size


def pretraining_flops(model: ModelConfig, rows: int, seq_len: int, predictions: int) -> float:
    """FLOPs of one training step: three times the forward pass.

    Args:
      model: the model config.
      rows: rows in the batch.
      seq_len: tokens per row, padding included.
      predictions: positions per row that the MLM head predicts.
    """
    heads = model.num_heads * model.size_per_head
    adapters = 4 * model.layer_width * (model.adapter_size or 0)  # two per layer, of two products each
    linear = 2 * (sum(layer_weights(model)) + adapters)
    # A local layer is counted with the keys of its window. A causal layer without a window is counted with all keys,
    # as in PaLM, although half of them are masked.
    sides = 1 if model.direction == "causal" else 2
    keys_per_query = [
        seq_len if plan.window is None else min(seq_len, sides * plan.window + 1) for plan in layer_plans(model)
    ]
    attention = sum(4 * heads * keys for keys in keys_per_query)
    per_token = 2 * projection_weights(model) + model.num_layers * linear + attention
    head = 2 * model.decoder_width * (model.hidden_size + model.vocab_size)
    return 3.0 * rows * (seq_len * per_token + predictions * head)
