"""Floating-point operations that a model needs, counted from its shapes (a multiply-add is two).

Recomputation, optimizer, embeddings and everything elementwise count nothing, so that MFU is comparable
between programs (PaLM, Chowdhery et al. 2022, appendix B).
"""

from bert_jax.config import ModelConfig


def pretraining_flops(model: ModelConfig, rows: int, seq_len: int, predictions: int) -> float:
    """FLOPs of one training step: three times the forward pass.

    Args:
      model: shapes.
      rows: rows in the batch.
      seq_len: tokens per row; all count, padding too.
      predictions: positions per row that pass through the head over the vocabulary.
    """
    width, heads, tables = model.hidden_size, model.num_heads * model.size_per_head, model.embedding_width
    products = 3 if model.feed_forward == "gated" else 2
    linear = 2 * width * (4 * heads + products * model.intermediate_size)
    # Local layers need less; what they need is bounded by their window. A causal layer that sees everything
    # counts whole, as in PaLM, though half its keys are masked.
    sides = 1 if model.direction == "causal" else 2
    seen = [
        seq_len
        if model.attention_window is None or layer % model.global_every == 0
        else min(seq_len, sides * model.attention_window + 1)
        for layer in range(model.num_layers)
    ]
    attention = sum(4 * heads * keys for keys in seen)
    projection = 0 if model.embedding_size is None else 2 * tables * width
    per_token = projection + model.num_layers * linear + attention
    head = 2 * tables * (width + model.vocab_size)
    return 3.0 * rows * (seq_len * per_token + predictions * head)
