"""Describes corpora: `statistics` measures, as JSON values; `report` makes sections of them for `bert_jax.report`."""
