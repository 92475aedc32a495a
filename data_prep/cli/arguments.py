"""Types of arguments that several commands of `bert-data` have."""

from typing import Annotated

import tyro

from bert_jax.field_validation import Interval
from data_prep.sources import KINDS_HELP

Specs = tyro.conf.UseAppendAction[tuple[str, ...]]
Sources = Annotated[Specs, tyro.conf.arg(metavar="SPEC", help=KINDS_HELP)]
File = Annotated[str, tyro.conf.arg(metavar="FILE")]
Workers = Annotated[int, Interval("[1, 1000]")]
Fraction = Annotated[float, Interval("(0, 1)")]
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag without a negation."""
