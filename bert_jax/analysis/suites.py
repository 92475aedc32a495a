"""All suites, in the order of the page."""

from bert_jax.analysis import fine_tuning, geometry, lens, probes
from bert_jax.analysis.suite import Suite

SUITES: tuple[Suite, ...] = (probes.SUITE, fine_tuning.SUITE, geometry.SUITE, lens.SUITE)
