"""Floating-point operations of a model, counted from its shapes (a multiply-add is two).

Recomputation, the optimizer, embedding lookups and elementwise operations are not counted, so that MFU is comparable
between programs (PaLM, Chowdhery et al. 2022, appendix B). For the same reason all layers are counted at all positions,
although the train step computes the last one only where it is read. Frozen parameters count as trained ones, although
their gradients are not computed; task heads are not counted.
"""

from bert_jax.config import ModelConfig
from bert_jax.model.layer_plan import layer_plans


def pretraining_flops(model: ModelConfig, rows: int, seq_len: int, predictions: int) -> float:
    """FLOPs of one training step: three times the forward pass.

    Args:
      model: the model config.
      rows: rows in the batch.
      seq_len: tokens per row, padding included.
      predictions: positions per row that the MLM head predicts.
    """
    width, heads, tables = model.hidden_size, model.num_heads * model.size_per_head, model.embedding_width
    products = 3 if model.feed_forward == "gated" else 2
    adapters = 4 * (model.adapter_size or 0)  # two per layer, of two products each
    linear = 2 * width * (4 * heads + products * model.intermediate_size + adapters)
    # A local layer is counted with the keys of its window. A causal layer without a window is counted with all keys,
    # as in PaLM, although half of them are masked.
    sides = 1 if model.direction == "causal" else 2
    keys_per_query = [
        seq_len if plan.window is None else min(seq_len, sides * plan.window + 1) for plan in layer_plans(model)
    ]
    attention = sum(4 * heads * keys for keys in keys_per_query)
    projection = 0 if model.embedding_size is None else 2 * tables * width
    per_token = projection + model.num_layers * linear + attention
    head = 2 * tables * (width + model.vocab_size)
    return 3.0 * rows * (seq_len * per_token + predictions * head)
