"""Which heads matter, how many can be removed, and a model without them."""

from bert_jax.analysis.heads.heads import SUITE

__all__ = ["SUITE"]
