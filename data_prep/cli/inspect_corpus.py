"""`bert-data inspect`: describes a corpus in the terminal, as JSON, or as an HTML page."""

import argparse
import json

from etils import epath

from bert_jax.errors import UserError
from bert_jax.report import html, text
from data_prep.cli import arguments as flags
from data_prep.inspection import report
from data_prep.inspection.statistics import measure_corpus, weight_corpora


def add_parser(commands) -> None:
    """Adds the command to `commands`, the result of `add_subparsers`."""
    add = commands.add_parser(
        "inspect",
        help="describe corpora: counts, lengths, what was removed, samples, weights for training on several",
    )
    add.add_argument("directories", nargs="+", metavar="DIR", help="a corpus; several are compared and weighted")
    add.add_argument("--json", action="store_true", help="print the same as JSON")
    add.add_argument("--html", metavar="FILE", help="also write an HTML page with plots; FILE must not exist")
    add.add_argument(
        "--sampling-exponent",
        type=flags.exponent,
        default=0.7,
        metavar="X",
        help="with several corpora: weights are shares of tokens to this power (default 0.7, multilingual BERT's)",
    )
    add.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> None:
    page = epath.Path(arguments.html) if arguments.html else None
    if page is not None:
        _check_free(page)
    corpora = [measure_corpus(directory) for directory in arguments.directories]
    mixed = weight_corpora(corpora, arguments.sampling_exponent) if len(corpora) > 1 else None
    sections = report.sections(corpora, mixed)
    if page is not None:
        try:
            page.write_bytes(html.render(sections).encode())
        except OSError as error:
            raise UserError(f"--html {page}: cannot be written ({error.strerror}); choose another file") from error
    if arguments.json:
        print(json.dumps({"corpora": corpora, "mixture": mixed}, indent=1, ensure_ascii=False))
    else:
        print(text.render(sections))


def _check_free(page: epath.Path) -> None:
    if page.exists():
        raise UserError(f"--html {page}: exists already; choose another file or remove it first")
    if not page.parent.is_dir():
        raise UserError(f"--html {page}: there is no directory {page.parent}; make it first")
