"""Which of two sentences, and which word at a mask, a masked language model prefers."""

from bert_jax.analysis.cloze.cloze import SUITE

__all__ = ["SUITE"]
