"""All suites, in the order of the page."""

from bert_jax.analysis import cloze, fine_tuning, geometry, lens
from bert_jax.analysis.suite import Suite

SUITES: tuple[Suite, ...] = (cloze.SUITE, fine_tuning.SUITE, geometry.SUITE, lens.SUITE)
