"""All suites, in the order of the page."""

from bert_jax.analysis import fine_tuning, geometry, heads, lens
from bert_jax.analysis.suite import Suite

SUITES: tuple[Suite, ...] = (heads.SUITE, fine_tuning.SUITE, geometry.SUITE, lens.SUITE)
