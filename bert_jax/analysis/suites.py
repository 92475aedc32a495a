"""All suites, in the order of the page."""

from bert_jax.analysis import attention, cloze, fine_tuning, geometry, heads, lens, probes
from bert_jax.analysis.suite import Suite

SUITES: tuple[Suite, ...] = (
    attention.SUITE,
    probes.SUITE,
    cloze.SUITE,
    cloze.PATCHING,
    heads.SUITE,
    fine_tuning.SUITE,
    geometry.SUITE,
    lens.SUITE,
)
