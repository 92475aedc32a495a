"""Which of two sentences, and which word at a mask, a model prefers, and which activations carry that."""

from bert_jax.analysis.cloze import patching
from bert_jax.analysis.cloze.cloze import SUITE

PATCHING = patching.SUITE
__all__ = ["PATCHING", "SUITE"]
