"""The program `bert-data`: train a tokenizer; build, inspect and verify corpora."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from bert_jax import command_line, flags
from data_prep.cli.build import Build
from data_prep.cli.inspect_corpus import Inspect
from data_prep.cli.tokenizer import TrainTokenizer
from data_prep.verify import verify_corpus


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every byte of a corpus and compare it with its checksums."""

    directory: Annotated[tyro.conf.Positional[flags.DirectoryArg], tyro.conf.arg(metavar="DIR")]
    """The corpus."""

    def run(self) -> None:
        """Verify the corpus."""
        print(f"{self.directory}: {verify_corpus(self.directory)}")


COMMANDS = {"tokenizer": TrainTokenizer, "build": Build, "inspect": Inspect, "verify": Verify}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (`command_line.run_guarded`)."""
    words = sys.argv[1:] if argv is None else list(argv)
    effect = "continues the build" if words[:1] == ["build"] else "starts from the beginning"
    return command_line.run_guarded(
        lambda: command_line.dispatch("bert-data", COMMANDS, _call, words), f"stopped; the same command {effect}"
    )


def _call(name: str, words: Sequence[str]) -> None:
    flags.parse(COMMANDS[name], words, f"bert-data {name}").run()
