"""The command `bert-data`: train a tokenizer, build a corpus, look at one, verify one."""

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.errors import UserError
from bert_jax.tokenizer import Tokenizer
from data_prep import build, inspection, sources
from data_prep.clean import clean
from data_prep.train_tokenizer import train_wordpiece
from data_prep.verify import verify

_SOURCE_HELP = (
    "what to read, may be repeated: text:GLOB (a blank line between documents), text-files:GLOB (a file is a"
    " document), lines:GLOB (one sentence on each line, a blank line between documents), or python-docs"
    " (the documentation installed with Python)"
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 when it did its work, 2 when the user has something to change."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bert-data", description="Prepares text for pretraining with bert-jax.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("tokenizer", help="train a tokenizer")
    _add_sources(add)
    add.add_argument("--kind", choices=["wordpiece"], default="wordpiece", help="kind of tokenizer")
    add.add_argument("--vocab-size", type=_positive, default=30522, metavar="N", help="pieces (default 30522)")
    add.add_argument("--out", required=True, metavar="FILE", help="tokenizer.json to write; must not exist")
    add.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="lower-case text and strip accents, as bert-base-uncased does (the default)",
    )
    add.set_defaults(command=_train_tokenizer)

    add = commands.add_parser("build", help="build a corpus")
    _add_sources(add)
    add.add_argument("--tokenizer", required=True, metavar="FILE", help="tokenizer.json, vocab.txt, or a directory")
    add.add_argument("--out", required=True, metavar="DIR", help="directory to write; must not exist")
    add.add_argument("--name", type=_name, help="name of the corpus (default: from --out)")
    add.add_argument(
        "--validation-fraction",
        type=_fraction,
        default=build.DEFAULT_VALIDATION_FRACTION,
        metavar="F",
        help="share of documents held out (default %(default)s)",
    )
    add.add_argument("--max-shard-mb", type=_positive, default=256, metavar="MB", help="shard size (default 256)")
    add.set_defaults(command=_build)

    add = commands.add_parser("inspect", help="describe a corpus and show a sample of it")
    add.add_argument("directory", metavar="DIR")
    add.set_defaults(command=lambda arguments: print(inspection.describe(arguments.directory)))

    add = commands.add_parser("verify", help="read every byte of a corpus and compare it with its checksums")
    add.add_argument("directory", metavar="DIR")
    add.set_defaults(command=_verify)
    return parser


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, action="append", metavar="SPEC", help=_SOURCE_HELP)
    parser.add_argument(
        "--workers",
        type=_positive,
        default=os.cpu_count(),
        metavar="N",
        help="processes (default: one for each core); the result does not depend on it",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not lower-case letters, digits and _, a letter first")
    return text


def _train_tokenizer(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    out = epath.Path(arguments.out)
    if out.exists():
        raise UserError(f"{out}: exists already; choose another --out or remove it first")
    read = [sources.parse(spec, arguments.workers) for spec in arguments.source]
    tokenizer = train_wordpiece(_texts(read), arguments.vocab_size, arguments.lowercase)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    seconds = time.perf_counter() - started
    print(f"{out}: WordPiece, {tokenizer.vocab_size} pieces, {'un' * arguments.lowercase}cased, in {seconds:.0f} s")


def _texts(read: list[sources.Source]) -> Iterator[str]:
    for source in read:
        for document in source.documents():
            yield clean(document.text)


def _build(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    out = epath.Path(arguments.out)
    name = arguments.name or re.sub(r"[^a-z0-9]+", "_", f"{out.resolve().name}".lower()).strip("_")
    if not _NAME.fullmatch(name):
        raise UserError(f"--out {out}: no name for the corpus can be made of it; give one with --name")
    tokenizer = Tokenizer.load(arguments.tokenizer)
    read = [sources.parse(spec, arguments.workers) for spec in arguments.source]
    manifest = build.build(
        read,
        tokenizer,
        out,
        name,
        workers=arguments.workers,
        validation_fraction=arguments.validation_fraction,
        max_shard_bytes=arguments.max_shard_mb << 20,
    )
    print(inspection.counts(manifest))
    print(f"{out}: ready in {time.perf_counter() - started:.0f} s; look at it with `bert-data inspect {out}`")


def _verify(arguments: argparse.Namespace) -> None:
    checked = verify(arguments.directory)
    print(f"{arguments.directory}: intact; {checked} files and every record agree with corpus.json")
