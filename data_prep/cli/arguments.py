"""Types of arguments that several commands of `bert-data` have."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import tyro

from bert_jax.errors import UserError
from bert_jax.field_validation import Interval
from data_prep.sources import KINDS_HELP
from data_prep.sources.base import DamagedFileError

Specs = tyro.conf.UseAppendAction[tuple[str, ...]]
Sources = Annotated[Specs, tyro.conf.arg(metavar="SPEC", help=KINDS_HELP)]
File = Annotated[str, tyro.conf.arg(metavar="FILE")]
Workers = Annotated[int, Interval("[1, 1000]")]
Fraction = Annotated[float, Interval("(0, 1)")]
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag without a negation."""


@contextlib.contextmanager
def damage_explained() -> Iterator[None]:
    """Adds the flag that leaves out damaged files to the error about one."""
    try:
        yield
    except DamagedFileError as error:
        raise UserError(f"{error}; or add --skip-damaged") from error
