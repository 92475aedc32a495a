"""Reports of runs: what a work directory recorded, as sections of `bert_jax.report`."""
