"""Flags that several commands of `bert-data` share."""

import argparse
import os

from data_prep.sources import KINDS_HELP


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Adds --source and --workers."""
    parser.add_argument("--source", required=True, action="append", metavar="SPEC", help=KINDS_HELP)
    add_workers(parser)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds --workers."""
    parser.add_argument(
        "--workers",
        type=positive,
        default=os.cpu_count(),
        metavar="N",
        help="processes (default: one for each core); the result does not depend on it",
    )


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def fraction(text: str) -> float:
    """A number strictly between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def exponent(text: str) -> float:
    """A number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 (all alike) and 1 (by size)")
    return value
