"""How contextual the vectors are, how they fill the space, and what they know of the language of a sentence."""

from bert_jax.analysis.geometry.geometry import SUITE

__all__ = ["SUITE"]
