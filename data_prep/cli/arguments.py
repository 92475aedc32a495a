"""Flags that several commands of `bert-data` share."""

import argparse
import os
import re
from collections.abc import Callable

from data_prep.sources import KINDS_HELP


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Adds --source and --workers."""
    parser.add_argument("--source", required=True, action="append", metavar="SPEC", help=KINDS_HELP)
    add_workers(parser)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds --workers."""
    parser.add_argument(
        "--workers",
        type=int_up_to(1000),
        default=os.cpu_count(),
        metavar="N",
        help="processes (default: one per core); the result does not depend on it",
    )


def int_up_to(high: int) -> Callable[[str], int]:
    """A parser of integers from 1 to `high`."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not a positive number up to {high:,}")
        return int(text)

    return read


positive_int = int_up_to(2**31 - 1)
"""Parses a positive integer."""


def fraction(text: str) -> float:
    """Parses a number strictly between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and below 1")
    return value


def exponent(text: str) -> float:
    """Parses a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 (equal shares) and 1 (by size)")
    return value
