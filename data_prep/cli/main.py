"""The command `bert-data`: train a tokenizer; build, inspect and verify corpora."""

import argparse
import re
import sys
from collections.abc import Sequence

from bert_jax import command_line
from bert_jax.errors import UserError, did_you_mean
from data_prep.cli import build, inspect_corpus, tokenizer
from data_prep.verify import verify_corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (`command_line.run`)."""
    words = sys.argv[1:] if argv is None else list(argv)
    effect = "continues the build" if words[:1] == ["build"] else "starts from the beginning"
    return command_line.run(lambda: _run(words), f"stopped; the same command {effect}")


def _run(words: Sequence[str]) -> None:
    command_line.check_no_empty_words(words[1:])
    end = words.index("--") if "--" in words else len(words)
    arguments = _parser().parse_args(words[:end])
    arguments.runner_flags = words[end + 1 :]
    if arguments.runner_flags and arguments.command is not build.run:
        raise UserError(f"{' '.join(words[end:])}: only `build` accepts flags after --; leave them out")
    arguments.command(arguments)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, with the closest flag or command."""

    known: tuple[str, ...] = ()
    """Flags and commands to suggest."""

    def error(self, message: str):
        wrong = re.search("(?:unrecognized arguments: |invalid choice: ')([^ ']+)", message)
        hint = did_you_mean(wrong[1].partition("=")[0], self.known) if wrong else ""
        raise UserError(f"{self.prog}: {message}{hint and f': {hint}'}; `{self.prog} --help` explains all flags")


class _Version(argparse.Action):
    def __call__(self, *_: object) -> None:
        print(command_line.version_line("bert-data"))
        raise SystemExit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("bert-data", description="Prepares text for pretraining with bert-jax.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tokenizer.add_parser(commands)
    build.add_parser(commands)
    inspect_corpus.add_parser(commands)
    add = commands.add_parser("verify", help="read every byte of a corpus and compare it with its checksums")
    add.add_argument("directory", metavar="DIR")
    add.set_defaults(command=lambda arguments: print(f"{arguments.directory}: {verify_corpus(arguments.directory)}"))
    parser.known = (
        *commands.choices,
        *(flag for one in commands.choices.values() for flag in one._option_string_actions),
    )
    return parser
