"""What the MLM head says of every layer, and since which layer the masked word leads (the logit lens)."""

from bert_jax.analysis.lens.lens import SUITE

__all__ = ["SUITE"]
