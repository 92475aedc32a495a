"""The program ``bert-jax``: chooses a command, parses its arguments and runs it."""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Sequence

import tyro

from bert_jax.cli.ablate import Ablate
from bert_jax.cli.adapt import Adapt
from bert_jax.cli.compress import COMMANDS as COMPRESS_COMMANDS
from bert_jax.cli.doctor import Doctor
from bert_jax.cli.finetune import Finetune
from bert_jax.cli.model import Convert, Evaluate, FillMask, Merge
from bert_jax.cli.plan import Plan, Schedule
from bert_jax.cli.pretrain import Pretrain
from bert_jax.cli.report import Report
from bert_jax.command import dispatch, flags
from bert_jax.config import presets
from bert_jax.distributed import supervised
from bert_jax.errors import UserError


def launch(argv: Sequence[str]) -> None:
    """Write the launcher of a cluster: scripts for Slurm and Cloud TPU, a JobSet for Kubernetes."""
    from bert_jax import launchers

    launchers.write_launcher(argv)


def bench(argv: Sequence[str]) -> int:
    """Measure step time, tokens/s and MFU of the train step, beside limits of the device and a peer library."""
    from bert_jax.bench.bench import main as measure

    return measure(argv)


def analyse(argv: Sequence[str]) -> None:
    """Analyse attention, probes, cloze tasks, heads and more of a model, or of every checkpoint of a run."""
    from bert_jax.analysis.analyse import main as run_suites

    run_suites(argv)


def compress(argv: Sequence[str]) -> int | None:
    """Make a smaller or faster model of a large one: distillation and more, each a command of its own."""

    def call(name: str, words: list[str]) -> int | None:
        return _call(f"compress {name}", words)

    return dispatch.dispatch("bert-jax compress", COMPRESS_COMMANDS, call, argv)


COMMANDS: dict[str, type | Callable[[Sequence[str]], int | None]] = {
    "pretrain": Pretrain,
    "adapt": Adapt,
    "doctor": Doctor,
    "plan": Plan,
    "schedule": Schedule,
    "ablate": Ablate,
    "evaluate": Evaluate,
    "fill-mask": FillMask,
    "report": Report,
    "convert": Convert,
    "merge": Merge,
    "finetune": Finetune,
    "compress": compress,
    "analyse": analyse,
    "launch": launch,
    "bench": bench,
}
"""By name: a dataclass of the arguments with a method `run`, or a function that gets the arguments as typed."""
PARSED = COMMANDS | {f"compress {name}": kind for name, kind in COMPRESS_COMMANDS.items()}
"""COMMANDS and the commands of commands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; on an error, report it to the supervisor, so that other processes do not wait.

    Returns:
      the exit code: as in `dispatch.run_guarded`; also 2 if `doctor` found an error, and 75 if the run was saved
      and the same command continues it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    about = (
        f"CONFIG is a Python file with a function config(), or one of the presets {', '.join(presets.preset_files())}."
    )
    try:
        code = dispatch.run_guarded(lambda: dispatch.dispatch("bert-jax", COMMANDS, _call, words, about))
    except BaseException:
        if not supervised.must_announce_exit():
            raise
        traceback.print_exc()
        code = 1
    if supervised.must_announce_exit():
        supervised.exit_now(code)
    return code


def _call(name: str, words: list[str]) -> int | None:
    command = PARSED[name]
    return parse(name, words).run() if isinstance(command, type) else command(words)


def parse(name: str, words: Sequence[str]) -> object:
    """Parse the arguments of a command; the first one of a command with a field `config` without default is CONFIG.

    Raises:
      UserError: there is no such config, or an argument is wrong.
      SystemExit: after ``--help``.
    """
    command = PARSED[name]
    fields = {field.name: field for field in dataclasses.fields(command)}
    if "config" not in fields or fields["config"].default_factory is not dataclasses.MISSING:
        parsed = flags.parse(command, words, f"bert-jax {name}")
        return dataclasses.replace(parsed, words=tuple(words)) if "words" in fields else parsed
    given = words and not words[0].startswith("-")
    if not given and not {"-h", "--help", "--help-all"} & set(words):
        known = ", ".join(presets.preset_files())
        raise UserError(f"{name} needs a config first, a preset's name or a file: presets are {known}")
    required = [f.name for f in fields.values() if f.default is f.default_factory]
    values = dict.fromkeys(required, tyro.MISSING) | {"config": presets.load_config(words[0] if given else "bert_base")}
    if "words" in fields:
        values["words"] = tuple(words)
    prog = f"bert-jax {name} {words[0] if given else 'CONFIG'}"
    return flags.parse(command, words[1:] if given else words, prog, command(**values))
