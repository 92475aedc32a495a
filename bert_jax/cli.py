"""The commands of ``bert-jax``: parse, call, print, exit code."""

import contextlib
import dataclasses
import difflib
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bert_jax import presets, storage
from bert_jax.config import Config
from bert_jax.data import parts
from bert_jax.errors import TRY_AGAIN, PeerError, UserError
from bert_jax.runtime import cluster, supervisor
from bert_jax.runtime.cluster import ClusterConfig
from bert_jax.runtime.report import make_report

_MISSING: Any = tyro.MISSING


ENDED = {"steps": "finished", "time": "finished, its time is over", "target": "finished, target reached"}
"""What is said of a run that is over, by why it is (training/loop.py)."""

Place = Annotated[
    storage.StoredPath,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DIR",
        instance_from_str=lambda words: storage.path(words[0]),
        is_instance=lambda value: isinstance(value, storage.StoredPath),
        str_from_instance=lambda value: [str(value)],
    ),
]
Corpora = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR[=WEIGHT]")]


@dataclass(frozen=True, kw_only=True)
class Pretrain(Config):
    """Pretrain CONFIG on a corpus; the same command continues a run that was stopped.

    Every field of the config can be set: --model.num-layers 6 --phases.0.steps 100 --objective.pair none.
    """

    corpus: Corpora
    """Directory that `bert-data build` made, and how many of its rows are read per row of a corpus with weight 1.
    Give it once for each corpus of a mixture; without weights, data.mixture-exponent says what each gets."""
    workdir: Place
    """Directory of the run: checkpoints, metrics.jsonl, TensorBoard events. Like a corpus, it may lie in a bucket:
    gs://BUCKET/NAME or s3://BUCKET/NAME."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device, or `auto` for as many as fit into the memory at hand (ledger.jsonl has
    what was found). Without it, phases.N.accumulation says how an update is cut. Results do not depend on it."""
    profile: str | None = None
    """Trace updates A up to B, written A:B, into WORKDIR/profile."""
    compilation_cache: str | None = None
    """Directory in which compiled programs are kept for the next start, or `none`. Without it, the environment's
    JAX_COMPILATION_CACHE_DIR, else bert_jax/compiled in the user's cache directory."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Check a run before it is paid for: what CONFIG makes of these corpora. Nothing is trained or kept.

    It takes every flag of the config that `pretrain` takes.
    """

    corpus: Corpora
    """As for `bert-jax pretrain`; once for each corpus of a mixture."""
    against: bool = False
    """Instead, train 200 updates of a small fixed run on this set-up, and compare them with a shipped curve: CONFIG is
    bert_tiny or bert_mini, and the corpus the reference corpus (docs/reference.md)."""
    json: bool = False
    """Print JSON instead of lines: a list of {level, name, text, values}."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Config):
    """Show what the phases of CONFIG make of batch size, sequence length and learning rate. It needs no corpus.

    It takes every flag of the config that `pretrain` takes.
    """

    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """Also draw it into this PNG file (needs the extra `plot`)."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out metrics of a run's newest checkpoint, beside the unigram baseline."""

    workdir: tyro.conf.Positional[Place]
    """Directory of the run."""
    corpus: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Corpus whose validation split is scored; built with the run's tokenizer. Give it once for each of several."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class FillMask:
    """Fill the [MASK]s of a text."""

    model: tyro.conf.Positional[Place]
    """Work directory of a run, or an exported model."""
    text: tyro.conf.Positional[str]
    """Text with one or more [MASK]."""
    top: int = 5
    """Candidates per [MASK]."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Convert:
    """Write a trained model in another format."""

    source: tyro.conf.Positional[Place]
    """Work directory of a run, or an exported model."""
    destination: tyro.conf.Positional[Place]
    """Directory to make; it must not exist."""
    to: Literal["huggingface"] = "huggingface"
    """Format to write."""


def pretrain(arguments: Sequence[str]) -> int:
    """``bert-jax pretrain CONFIG --corpus DIR[=WEIGHT] --workdir DIR [--FIELD VALUE ...]``."""
    config, asked = _configured(Pretrain, arguments, "pretrain")
    window = None if asked.profile is None else _window(asked.profile)
    micro_batch = None if asked.micro_batch is None else _micro_batch(asked.micro_batch)
    mixture = [parts.parse(text) for text in asked.corpus]
    if supervisor.WORKER not in os.environ and (seat := cluster.find(asked.cluster)) is not None:
        report = make_report(config, corpus=asked.corpus, workdir=asked.workdir, micro_batch=micro_batch)
        command = [sys.executable, "-m", "bert_jax", "pretrain", *arguments]
        return supervisor.supervise(command, seat, report, asked.cluster.timeout)

    from bert_jax import pretraining  # jax is loaded when it is needed, not for --help
    from bert_jax.runtime import together, worker
    from bert_jax.training import goodput

    worker.keep_programs(asked.compilation_cache)
    if supervisor.WORKER in os.environ:
        worker.join(asked.cluster.timeout)
    place = pretraining.pretrain(config, mixture, asked.workdir, profile=window, micro_batch=micro_batch)
    done = f"{place.cursor.step} updates, {place.cursor.rows:,} rows, {place.tokens_seen:,} tokens"
    worker.leave()
    code = 0 if place.ended else TRY_AGAIN
    if not together.is_first():
        return code
    if not place.ended:
        print(f"stopped and saved at update {place.cursor.step} of {config.total_steps}; the same command continues")
        return code
    print(f"{ENDED[place.ended]}: {done}; everything is in {asked.workdir}")
    _print_table(place.evaluation)
    print(goodput.describe(goodput.summary(asked.workdir)))
    return code


def doctor(arguments: Sequence[str]) -> int:
    """``bert-jax doctor CONFIG --corpus DIR[=WEIGHT] [--against] [--FIELD VALUE ...]``."""
    config, asked = _configured(Doctor, arguments, "doctor")
    mixture = [parts.parse(text) for text in asked.corpus]
    if asked.against:
        from bert_jax.planning.reference import follow as check  # loads jax, as the other does not
    else:
        from bert_jax.planning.doctor import examine as check

    lines = []
    for line in check(config, mixture):
        lines.append(line)
        if not asked.json:
            print(line, flush=True)
    if asked.json:
        print(json.dumps([line._asdict() for line in lines]))
    return 2 if any(line.level == "error" for line in lines) else 0


def schedule(arguments: Sequence[str]) -> None:
    """``bert-jax schedule CONFIG [--plot FILE.png] [--FIELD VALUE ...]``."""
    config, asked = _configured(Schedule, arguments, "schedule")
    from bert_jax.planning import schedule

    found = schedule.describe(config)
    print(json.dumps(found) if asked.json else "\n".join(schedule.lines(found)))
    if asked.plot is not None:
        schedule.plot(config, asked.plot)


def evaluate(arguments: Sequence[str]) -> None:
    """``bert-jax evaluate WORKDIR --corpus DIR``."""
    asked = _parse(Evaluate, arguments, "evaluate")
    # Validation splits are scored one by one, so shares mean nothing; equal ones are never too small.
    mixture = [parts.Part(storage.path(text), 1.0) for text in asked.corpus]
    from bert_jax import pretraining

    metrics = pretraining.evaluate(asked.workdir, mixture)
    if asked.json:
        print(json.dumps(metrics))
    else:
        _print_table(metrics)


def fill_mask(arguments: Sequence[str]) -> None:
    """``bert-jax fill-mask MODEL "text with [MASK]"``."""
    asked = _parse(FillMask, arguments, "fill-mask")
    from bert_jax import inference

    filled = inference.load(asked.model).fill_mask(asked.text, asked.top)
    if asked.json:
        print(json.dumps([[candidate._asdict() for candidate in candidates] for candidates in filled]))
        return
    for i, candidates in enumerate(filled, start=1):
        shown = "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates)
        print(f"[MASK] {i}: {shown}")


def convert(arguments: Sequence[str]) -> None:
    """``bert-jax convert SOURCE DESTINATION --to huggingface``."""
    asked = _parse(Convert, arguments, "convert")
    from bert_jax import inference

    inference.export(asked.source, asked.destination)
    print(f"wrote {asked.destination}")


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "pretrain": pretrain,
    "doctor": doctor,
    "schedule": schedule,
    "evaluate": evaluate,
    "fill-mask": fill_mask,
    "convert": convert,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: the user asked for something that cannot be done, said in one line; or `doctor`
    found an error; 75: the run is saved or another process is gone, and the same command continues it.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    try:
        if arguments[0] not in COMMANDS:
            near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise UserError(f"there is no command '{arguments[0]}': {hint}Commands are {', '.join(COMMANDS)}")
        return COMMANDS[arguments[0]](arguments[1:]) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except PeerError as error:
        print(f"error: {error}: the same command continues from the newest checkpoint", file=sys.stderr)
        return TRY_AGAIN
    except Exception as error:
        line = _full_disk(error) or storage.trouble(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


def _full_disk(error: Exception) -> str | None:
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"{error.strerror.lower()}{f': {error.filename}' if error.filename else ''}: free some"


def _overview() -> str:
    lines = [f"  {command.__doc__.strip('`.')}" for command in COMMANDS.values() if command.__doc__]
    return "usage: bert-jax COMMAND ...\n\n" + "\n".join(lines) + "\n\n`bert-jax COMMAND --help` explains each."


def _configured(kind: type, arguments: Sequence[str], command: str) -> tuple[Config, Any]:
    """A command that begins with CONFIG and takes all its fields as flags: the config, and everything asked."""
    name, rest = _config_name(arguments, command)
    preset = presets.load_config(name)
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(Config)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory and f.name not in fields]
    asked = _parse(kind, rest, f"{command} {name}", kind(**fields, **dict.fromkeys(required, _MISSING)))
    return Config(**{name: getattr(asked, name) for name in fields}), asked


def _config_name(arguments: Sequence[str], command: str) -> tuple[str, Sequence[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    known = ", ".join(presets.preset_files())
    if "--help" in arguments or "-h" in arguments:
        return "bert_base", arguments
    raise UserError(f"{command} needs a config first, a preset's name or a file: presets are {known}")


def _micro_batch(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--micro-batch {text}: give a number of rows on each device, or auto")
    return int(text)


def _window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile {text}: write the first update and the one after the last, as in 100:110")
    return int(match[1]), int(match[2])


def _parse(kind: type, arguments: Sequence[str], command: str, default: Any = None) -> Any:
    """tyro's parse; what it would frame in a box of many lines becomes one."""
    box = io.StringIO()
    given = {} if default is None else {"default": default}
    try:
        if "--help" in arguments or "-h" in arguments:
            return tyro.cli(kind, args=arguments, prog=f"bert-jax {command}", **given)
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(box):
            return tyro.cli(kind, args=arguments, prog=f"bert-jax {command}", **given)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_line(box.getvalue())) from None


def _one_line(box: str) -> str:
    """What a framed message says, without its frame, title, help text and footer."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[│╭╮╰╯]", "", line).strip() for line in plain.splitlines()]
    parts: list[list[str]] = [[]]
    for line in filter(None, lines):
        if re.fullmatch(r"[─-]{3,}|.*[─]{3,}", line):
            parts.append([])
        else:
            parts[-1].append(line)
    message, *hints = [" ".join(part) for part in parts[1:] if part]
    return " ".join([message] + [hint for hint in hints if hint.startswith("Perhaps you meant")])


def _print_table(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
