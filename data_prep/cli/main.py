"""The program `bert-data`: train a tokenizer; build, inspect and verify corpora."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

import tyro

from bert_jax.command import dispatch, flags
from bert_jax.errors import INTERRUPTED, TRY_AGAIN
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
    """Runs a command; returns its exit code (`dispatch.run_guarded`), 75 if SIGTERM or SIGHUP stopped it."""
    words = sys.argv[1:] if argv is None else list(argv)
    effect = "continues the build" if words[:1] == ["build"] else "starts from the beginning"
    with _signals_as_interrupt() as received:
        code = dispatch.run_guarded(
            lambda: dispatch.dispatch("bert-data", COMMANDS, _call, words), f"stopped; the same command {effect}"
        )
    return TRY_AGAIN if received and code == INTERRUPTED else code


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[list[int]]:
    """SIGTERM, which schedulers send before they kill, and SIGHUP raise KeyboardInterrupt; a second one ends it.

    Yields:
      a list of the signals that were received.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # no other thread can have handlers
        yield received
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before[number])
        if number == signal.SIGHUP:
            dispatch.leave_lost_terminal()
        received.append(number)
        raise KeyboardInterrupt

    numbers = set(dispatch.stop_signals()) - {signal.SIGINT}  # which Python turns into an exception by itself
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield received
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _call(name: str, words: Sequence[str]) -> None:
    flags.parse(COMMANDS[name], words, f"bert-data {name}").run()
