"""All suites, in the order of the page."""

from bert_jax.analysis.suite import Suite

SUITES: tuple[Suite, ...] = ()
