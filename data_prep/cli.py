"""The command `bert-data`: train a tokenizer, build a corpus, look at one, verify one."""

import argparse
import os
import sys
from collections.abc import Sequence

from bert_jax import storage
from bert_jax.errors import UserError
from data_prep import build_command, disk, inspect_command, tokenizer_command
from data_prep.verify import verify


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 when it did its work, 2 when the user has something to change."""
    argv = sys.argv[1:] if argv is None else list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:end])
    arguments.behind_dashes = argv[end + 1 :]
    try:
        if arguments.behind_dashes and arguments.command is not build_command.run:
            raise UserError(f"{' '.join(argv[end:])}: only `build` passes flags behind -- on; leave them out")
        arguments.command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "continues where it was" if arguments.command is build_command.run else "starts from the beginning"
        print(f"stopped; the same command {again}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `bert-data inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        described = storage.trouble(error) or disk.as_user_error(error)
        if described is None:
            raise
        print(f"error: {described}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bert-data", description="Prepares text for pretraining with bert-jax.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    tokenizer_command.add_parser(commands)
    build_command.add_parser(commands)
    inspect_command.add_parser(commands)
    add = commands.add_parser("verify", help="read every byte of a corpus and compare it with its checksums")
    add.add_argument("directory", metavar="DIR")
    add.set_defaults(command=lambda arguments: print(f"{arguments.directory}: {verify(arguments.directory)}"))
    return parser
