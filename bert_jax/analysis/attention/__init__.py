"""Where heads attend, which dependency relations they follow, and which tokens contribute to which."""

from bert_jax.analysis.attention.attention import SUITE

__all__ = ["SUITE"]
