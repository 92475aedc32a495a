"""From which layer parts of speech, dependency relations, entities and trees can be read (probing)."""

from bert_jax.analysis.probes.probes import SUITE

__all__ = ["SUITE"]
