"""The commands of ``bert-jax``: parse, call, print, exit code."""

import dataclasses
import difflib
import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax import flags, presets, storage
from bert_jax.commands import MISSING, Convert, Doctor, Evaluate, FillMask, Plan, Pretrain, Schedule
from bert_jax.config import Config
from bert_jax.data import parts
from bert_jax.errors import TRY_AGAIN, PeerError, UserError
from bert_jax.planning.lines import Line
from bert_jax.runtime import cluster, lifeline, supervisor
from bert_jax.runtime.report import make_report

ENDED = {"steps": "finished", "time": "finished, its time is over", "target": "finished, target reached"}
"""What is said of a run that is over, by why it is (training/loop.py)."""


def pretrain(arguments: Sequence[str]) -> int:
    """``bert-jax pretrain CONFIG --corpus DIR[=WEIGHT] --workdir DIR [--FIELD VALUE ...]``."""
    config, asked = _configured(Pretrain, arguments, "pretrain")
    window = None if asked.profile is None else flags.window(asked.profile)
    micro_batch = None if asked.micro_batch is None else flags.micro_batch(asked.micro_batch)
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
        worker.join(asked.cluster)
    place = pretraining.pretrain(config, mixture, asked.workdir, profile=window, micro_batch=micro_batch)
    done = f"{place.cursor.step} updates, {place.cursor.rows:,} rows, {place.tokens_seen:,} tokens"
    lifeline.leave()
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
    """``bert-jax doctor CONFIG --corpus DIR[=WEIGHT] [--workdir DIR] [--against] [--FIELD VALUE ...]``."""
    config, asked = _configured(Doctor, arguments, "doctor")
    mixture = [parts.parse(text) for text in asked.corpus]
    if asked.against:
        from bert_jax.planning.reference import follow

        return _tell(follow(config, mixture), asked.json)
    from bert_jax.planning.doctor import Wishes, examine_together

    micro_batch = None if asked.micro_batch is None else flags.micro_batch(asked.micro_batch)
    wishes = Wishes(asked.workdir, micro_batch, asked.hosts, asked.devices, asked.topology)
    seat, timeout = cluster.find(asked.cluster), asked.cluster.timeout
    return examine_together(config, mixture, wishes, seat, timeout, lambda lines: _tell(lines, asked.json))


def _tell(lines: Iterator[Line], as_json: bool) -> int:
    """Print what checks found, a line as soon as it is known; the exit code."""
    told = []
    for line in lines:
        told.append(line)
        if not as_json:
            print(line, flush=True)
    if as_json:
        print(json.dumps([line._asdict() for line in told]))
    return 2 if any(line.level == "error" for line in told) else 0


def schedule(arguments: Sequence[str]) -> None:
    """``bert-jax schedule CONFIG [--plot FILE.png] [--FIELD VALUE ...]``."""
    config, asked = _configured(Schedule, arguments, "schedule")
    from bert_jax.planning import schedule

    found = schedule.describe(config)
    print(json.dumps(found) if asked.json else "\n".join(schedule.lines(found)))
    if asked.plot is not None:
        schedule.plot(config, asked.plot)


def plan(arguments: Sequence[str]) -> None:
    """``bert-jax plan CONFIG --topology v5e:16x16 [--search] [--FIELD VALUE ...]``."""
    config, asked = _configured(Plan, arguments, "plan")
    micro_batch = None if asked.micro_batch is None else flags.micro_batch(asked.micro_batch)
    if micro_batch == "auto":
        raise UserError("--micro-batch auto needs a device to try: give a number of rows, or --search")
    if micro_batch is not None and asked.search:
        raise UserError("--search looks for the micro-batch itself: leave --micro-batch away, or --search")
    price = asked.price_per_chip_hour
    if price is not None and price < 0:
        raise UserError(f"--price-per-chip-hour {price}: it must not be negative")
    from bert_jax.planning import plan, propose, topologies

    topology = topologies.find(asked.topology)
    if not asked.search:
        found = plan.plan(config, topology, micro_batch, price)
        print(json.dumps(found) if asked.json else "\n".join(plan.lines(found)))
        return
    proposal = propose.propose(config, topology)
    found = plan.plan(proposal.config, topology, None, price, proposal.compiled)
    if asked.json:
        print(json.dumps(found | {"search": propose.values(proposal)}))
    else:
        print("\n".join([*plan.lines(found), *propose.lines(proposal)]))


def evaluate(arguments: Sequence[str]) -> None:
    """``bert-jax evaluate WORKDIR --corpus DIR``."""
    asked = flags.parse(Evaluate, arguments, "evaluate")
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
    asked = flags.parse(FillMask, arguments, "fill-mask")
    from bert_jax import inference

    model = inference.load(asked.model)
    if model.tokenizer.note:
        print(f"note: {model.tokenizer.note}", file=sys.stderr)
    filled = model.fill_mask(asked.text, asked.top)
    if asked.json:
        print(json.dumps([[candidate._asdict() for candidate in candidates] for candidates in filled]))
        return
    for i, candidates in enumerate(filled, start=1):
        shown = "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates)
        print(f"[MASK] {i}: {shown}")


def convert(arguments: Sequence[str]) -> None:
    """``bert-jax convert SOURCE DESTINATION --to huggingface``."""
    asked = flags.parse(Convert, arguments, "convert")
    from bert_jax.convert import conversion, formats

    wishes = formats.Wishes(asked.moments == "keep", asked.drop, asked.trim_vocabulary)
    report = conversion.convert(asked.source, asked.destination, asked.to, wishes, force=asked.force)
    print(json.dumps(report.to_dict()) if asked.json else "\n".join([*report.lines(), f"wrote {asked.destination}"]))


def launch(arguments: Sequence[str]) -> None:
    """``bert-jax launch slurm|tpu|kubernetes ...``."""
    from bert_jax import launchers

    launchers.launch(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "pretrain": pretrain,
    "doctor": doctor,
    "plan": plan,
    "schedule": schedule,
    "evaluate": evaluate,
    "fill-mask": fill_mask,
    "convert": convert,
    "launch": launch,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and see that peers are not left waiting for this process.

    Returns:
      an exit code (`_run`).
    """
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
    except BaseException:
        if not lifeline.at_work():
            raise
        traceback.print_exc()
        code = 1
    if lifeline.at_work():
        lifeline.end(code)
    return code


def _run(arguments: Sequence[str]) -> int:
    """Run one command. 0: done; 2: the user asked for something that cannot be done, said in one line; or `doctor`
    found an error; 75: the run is saved or another process is gone, and the same command continues it.
    """
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
    if any(field.name == "init_from" for field in dataclasses.fields(kind)):
        arguments = _renamed_flag(arguments)
    name, rest = _config_name(arguments, command)
    preset = presets.load_config(name)
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(Config)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory and f.name not in fields]
    asked = flags.parse(kind, rest, f"{command} {name}", kind(**fields, **dict.fromkeys(required, MISSING)))
    return Config(**{name: getattr(asked, name) for name in fields}), asked


def _renamed_flag(arguments: Sequence[str]) -> list[str]:
    """--init-from under its other name, which may not be given as well."""
    renamed = [re.sub("^--init[-_]from(?==|$)", "--start.source", argument) for argument in arguments]
    if sum(argument.partition("=")[0] == "--start.source" for argument in renamed) > 1:
        raise UserError("--init-from and --start.source are one flag: give it once")
    return renamed


def _config_name(arguments: Sequence[str], command: str) -> tuple[str, Sequence[str]]:
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    known = ", ".join(presets.preset_files())
    if "--help" in arguments or "-h" in arguments:
        return "bert_base", arguments
    raise UserError(f"{command} needs a config first, a preset's name or a file: presets are {known}")


def _print_table(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
