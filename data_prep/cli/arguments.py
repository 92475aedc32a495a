"""What several commands of `bert-data` have: types of arguments, sources from flags, words about lost text."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import tyro

from bert_jax.errors import UserError
from bert_jax.field_validation import Interval
from data_prep import languages, sources
from data_prep.sources import KINDS_HELP, encodings, hub_folder
from data_prep.sources.base import DamagedFileError

Specs = tyro.conf.UseAppendAction[tuple[str, ...]]
Sources = Annotated[Specs, tyro.conf.arg(metavar="SPEC", help=KINDS_HELP)]
File = Annotated[str, tyro.conf.arg(metavar="FILE")]
Workers = Annotated[int, Interval("[1, 1000]")]
Fraction = Annotated[float, Interval("(0, 1)")]
Encodings = Annotated[Specs, tyro.conf.arg(metavar="NAME")]
Switch = tyro.conf.FlagCreatePairsOff[bool]
"""A flag without a negation."""


@contextlib.contextmanager
def damage_explained() -> Iterator[None]:
    """Adds the flag that leaves out damaged files to the error about one."""
    try:
        yield
    except DamagedFileError as error:
        raise UserError(f"{error}; or add --skip-damaged") from error


def parse_sources(
    specs: Sequence[str],
    workers: int,
    language: Sequence[str] = (),
    encoding: Sequence[str] = (),
    license_ids: Sequence[str] = (),
    names: Sequence[str] = (),
    scores: Sequence[str] = (),
    *,
    held_out: Sequence[str] = (),
    own_validation: bool = False,
) -> list[sources.Source]:
    """The sources of SPECs, those of validation first: of two equal texts, the later one is removed, from training.

    Prints notes on what is read of a folder of the Hugging Face Hub.

    Args:
      specs: of `--source`.
      workers: processes that read.
      language, encoding, license_ids, names, scores: one for all, or one for each of `specs` and then of `held_out`; or
        none.
      held_out: of `--validation-source`.
      own_validation: hold out the validation splits of `hub:` sources.

    Raises:
      UserError: the number of languages, encodings, licenses, names or scores is another one, or a value is unusable.
    """
    ordered = (*held_out, *specs)
    columns = []
    for flag, given, default in (
        ("--language", language, languages.DEFAULT),
        ("--encoding", encoding, encodings.UTF_8),
        ("--license", license_ids, None),
        ("--source-name", names, None),
        ("--score", scores, None),
    ):
        chosen = tuple(given) or (default,)
        if len(chosen) not in (1, len(ordered)):
            raise UserError(
                f"{len(chosen)} {flag} for {len(specs)} --source"
                f"{f' and {len(held_out)} --validation-source' if held_out else ''}: give one for all, or one for each"
            )
        every = chosen * len(ordered) if len(chosen) == 1 else chosen
        columns.append((*every[len(specs) :], *every[: len(specs)]))
    read = [sources.parse(spec, workers, *chosen) for spec, *chosen in zip(ordered, *columns, strict=True)]
    if own_validation:
        read = [*hub_folder.validation_splits(read), *read]
    for note in hub_folder.notes(read):
        print(f"note: {note}", file=sys.stderr)
    return read


def lost_bytes_clause(lost_bytes: int, readable_bytes: int) -> str:
    """A clause for the last line of a command: the share of text that could not be read; empty if there is none."""
    if not lost_bytes:
        return ""
    share = lost_bytes / (lost_bytes + readable_bytes)
    percent = f"{share:.1%}" if share >= 0.001 else "under 0.1%"
    return f", without {percent} of the text ({lost_bytes:,} bytes could not be read)"
