"""The commands of ``bert-jax``: parse, call, print, exit code."""

import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax import command_line, storage
from bert_jax import config as config_lib
from bert_jax.cli import flags
from bert_jax.cli.commands import MISSING, Convert, Doctor, Evaluate, FillMask, Plan, Pretrain, Schedule
from bert_jax.config import Config, presets
from bert_jax.data import mixture_spec
from bert_jax.distributed import cluster_detection, supervisor, supervisor_link
from bert_jax.distributed.process_report import make_report
from bert_jax.doctor.finding import Line
from bert_jax.errors import TRY_AGAIN, UserError, near

ENDED = {"steps": "finished", "time": "finished, its time is over", "target": "finished, target reached"}
"""What is said of a run that is over, by why it is (training/loop.py)."""


def pretrain(arguments: Sequence[str]) -> int:
    """``bert-jax pretrain CONFIG --corpus DIR[=WEIGHT] --workdir DIR [--FIELD VALUE ...]``."""
    config, asked = _configured(Pretrain, arguments, "pretrain")
    window = None if asked.profile is None else flags.window(asked.profile)
    micro_batch = None if asked.micro_batch is None else flags.micro_batch(asked.micro_batch)
    mixture = [mixture_spec.parse(text) for text in asked.corpus]
    if supervisor.WORKER not in os.environ and (seat := cluster_detection.find(asked.cluster)) is not None:
        report = make_report(config, corpus=asked.corpus, workdir=asked.workdir, micro_batch=micro_batch)
        command = [sys.executable, "-m", "bert_jax", "pretrain", *arguments]
        return supervisor.supervise(command, seat, report, asked.cluster.timeout)

    config = _with_vocabulary(config, arguments, mixture)
    from bert_jax.convert import init_from  # jax is loaded when it is needed, not for --help
    from bert_jax.distributed import agreement, worker
    from bert_jax.doctor.doctor import run_summary
    from bert_jax.training import pretraining
    from bert_jax.training.run_directory import goodput

    worker.skip_absent_tpu()
    worker.keep_programs(asked.compilation_cache)
    if supervisor.WORKER in os.environ:
        worker.join(asked.cluster)

    def announce() -> None:
        for line in run_summary(config, mixture, micro_batch):
            print(line, file=sys.stderr, flush=True)

    place = pretraining.pretrain(
        config,
        mixture,
        asked.workdir,
        profile=window,
        micro_batch=micro_batch,
        announce=announce,
        read_start=init_from.read_start,
    )
    done = f"{place.cursor.step} updates, {place.cursor.rows:,} rows, {place.tokens_seen:,} tokens"
    supervisor_link.leave()
    code = 0 if place.ended else TRY_AGAIN
    if not agreement.is_first():
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
    mixture = [mixture_spec.parse(text) for text in asked.corpus]
    from bert_jax.distributed import worker

    worker.skip_absent_tpu()
    if asked.against:
        from bert_jax.doctor.reference_curve import compare_with_curve

        return _tell(compare_with_curve(config, mixture), asked.json)
    config = _with_vocabulary(config, arguments, mixture)
    from bert_jax.doctor.doctor import Wishes, examine_together

    micro_batch = None if asked.micro_batch is None else flags.micro_batch(asked.micro_batch)
    wishes = Wishes(asked.workdir, micro_batch, asked.hosts, asked.devices, asked.topology)
    seat, timeout = cluster_detection.find(asked.cluster), asked.cluster.timeout
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

    found = schedule.to_dict(config)
    print(json.dumps(found) if asked.json else "\n".join(schedule.format_lines(found)))
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
    from bert_jax.planning import mesh_search, run_plan, topologies

    topology = topologies.parse_topology(asked.topology)
    if not asked.search:
        found = run_plan.plan(config, topology, micro_batch, asked.price_per_chip_hour)
        print(json.dumps(found) if asked.json else "\n".join(run_plan.format_lines(found)))
        return
    search = mesh_search.search_mesh(config, topology)
    found = run_plan.plan(search.config, topology, None, asked.price_per_chip_hour, search.compiled_step)
    if asked.json:
        print(json.dumps(found | {"search": mesh_search.to_dict(search)}))
    else:
        print("\n".join([*run_plan.format_lines(found), *mesh_search.format_lines(search)]))


def evaluate(arguments: Sequence[str]) -> None:
    """``bert-jax evaluate WORKDIR --corpus DIR``."""
    asked = flags.parse(Evaluate, arguments, "evaluate")
    # Validation splits are scored one by one, so shares mean nothing; equal ones are never too small.
    mixture = [mixture_spec.Part(storage.path(text), 1.0) for text in asked.corpus]
    from bert_jax.distributed import worker
    from bert_jax.training import pretraining

    worker.skip_absent_tpu()
    found = pretraining.evaluate(asked.workdir, mixture, form=asked.format, seq_len=asked.seq_len, rows=asked.rows)
    scored = found._asdict()
    metrics = scored.pop("metrics")
    if asked.json:
        print(json.dumps(scored | metrics))
    else:
        print("scored: " + ", ".join(f"{name} {value}" for name, value in scored.items()))
        _print_table(metrics)


def fill_mask(arguments: Sequence[str]) -> None:
    """``bert-jax fill-mask MODEL "text with [MASK]"``."""
    asked = flags.parse(FillMask, arguments, "fill-mask")
    from bert_jax.distributed import worker
    from bert_jax.inference import loaded_model

    worker.skip_absent_tpu()
    model = loaded_model.load(asked.model)
    if model.tokenizer.note:
        print(f"note: {model.tokenizer.note}", file=sys.stderr)
    filled = model.fill_mask(asked.text, asked.top)
    if asked.json:
        print(json.dumps([[candidate._asdict() for candidate in candidates] for candidates in filled]))
        return
    mask = model.tokenizer.id_to_token(model.tokenizer.mask_id)
    for i, candidates in enumerate(filled, start=1):
        shown = "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates)
        print(f"{mask} {i}: {shown}")


def convert(arguments: Sequence[str]) -> None:
    """``bert-jax convert SOURCE DESTINATION --to huggingface``."""
    asked = flags.parse(Convert, arguments, "convert")
    from bert_jax.convert import conversion
    from bert_jax.convert.formats import input_formats
    from bert_jax.distributed import worker

    worker.skip_absent_tpu()
    wishes = input_formats.Wishes(asked.moments == "keep", asked.drop, asked.trim_vocabulary)
    report = conversion.convert(
        asked.source, asked.destination, asked.to, wishes, force=asked.force, pooling=asked.pooling
    )
    print(json.dumps(report.to_dict()) if asked.json else "\n".join([*report.lines(), f"wrote {asked.destination}"]))


def launch(arguments: Sequence[str]) -> None:
    """Write the launcher of a cluster: scripts for Slurm and Cloud TPU, a JobSet for Kubernetes."""
    from bert_jax import launchers

    launchers.launch(arguments)


COMMANDS: dict[str, tuple[Any, Callable[[Sequence[str]], int | None]]] = {
    "pretrain": (Pretrain, pretrain),
    "doctor": (Doctor, doctor),
    "plan": (Plan, plan),
    "schedule": (Schedule, schedule),
    "evaluate": (Evaluate, evaluate),
    "fill-mask": (FillMask, fill_mask),
    "convert": (Convert, convert),
    "launch": (launch, launch),
}
"""By name: what documents a command, and the function that does it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and see that peers are not left waiting for this process.

    Returns:
      an exit code, as in `command_line.run`; also 2 if `doctor` found an error, and 75 if the run is saved and the
      same command continues it.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = command_line.run(lambda: _run(words))
    except BaseException:
        if not supervisor_link.at_work():
            raise
        traceback.print_exc()
        code = 1
    if supervisor_link.at_work():
        supervisor_link.end(code)
    return code


def _run(arguments: Sequence[str]) -> int | None:
    if not arguments:
        raise UserError(f"a command is missing: commands are {', '.join(COMMANDS)}; `bert-jax --help` explains them")
    name, *rest = arguments
    if name in ("-h", "--help", "--help-all", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(command_line.versions("bert-jax"))
        return 0
    if name not in COMMANDS:
        hint = near(name.lower().replace("_", "-"), COMMANDS)
        raise UserError(f"there is no command '{name}': {hint and f'{hint} '}Commands are {', '.join(COMMANDS)}")
    return COMMANDS[name][1](rest)


def _overview() -> str:
    """Every command with the first sentence of its help."""
    about = {name: (inspect.getdoc(kind) or "").partition(".")[0] for name, (kind, _) in COMMANDS.items()}
    lines = [f"  {name:<10} {text}" for name, text in about.items()]
    return "\n".join(
        [
            "usage: bert-jax COMMAND ...",
            "",
            *lines,
            "",
            "`bert-jax COMMAND --help` explains a command, `bert-jax --version` prints versions.",
            "CONFIG is a Python file with a function config(), or one of the presets",
            *textwrap.wrap(f"{', '.join(presets.preset_files())}.", 100),
        ]
    )


def _configured(kind: type, arguments: Sequence[str], command: str) -> tuple[Config, Any]:
    """A command that begins with CONFIG and takes all its fields as flags: the config, and everything asked."""
    if any(field.name == "init_from" for field in dataclasses.fields(kind)):
        arguments = _renamed_flag(arguments)
    name, rest = _config_name(arguments, command)
    preset = presets.load_config(name or "bert_base")
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(Config)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory and f.name not in fields]
    asked = flags.parse(kind, rest, f"{command} {name or 'CONFIG'}", kind(**fields, **dict.fromkeys(required, MISSING)))
    return Config(**{name: getattr(asked, name) for name in fields}), asked


def _with_vocabulary(config: Config, arguments: Sequence[str], mixture: Sequence[mixture_spec.Part]) -> Config:
    """A preset with as many token ids as its corpora have; a file's number and --model.vocab-size stay as given.

    Corpora that cannot be opened change nothing here: the command refuses them in its own order.
    """
    given = any(re.match("--model[.]vocab[-_]size(=|$)", word) for word in arguments)
    if given or arguments[0] not in presets.preset_files():
        return config
    with contextlib.suppress(UserError):
        return config_lib.replace(config, model={"vocab_size": mixture_spec.vocab_size(mixture)})
    return config


def _renamed_flag(arguments: Sequence[str]) -> list[str]:
    """--init-from under its other name, which may not be given as well."""
    renamed = [re.sub("^--init[-_]from(?==|$)", "--start.source", argument) for argument in arguments]
    if sum(argument.partition("=")[0] == "--start.source" for argument in renamed) > 1:
        raise UserError("--init-from and --start.source are one flag: give it once")
    return renamed


def _config_name(arguments: Sequence[str], command: str) -> tuple[str | None, Sequence[str]]:
    """CONFIG and the flags; for help it may be missing."""
    if arguments and arguments[0] and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if {"-h", "--help", "--help-all"} & set(arguments):
        return None, arguments
    known = ", ".join(presets.preset_files())
    raise UserError(f"{command} needs a config first, a preset's name or a file: presets are {known}")


def _print_table(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
