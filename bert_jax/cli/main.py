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
from bert_jax.distributed import cluster_detection, supervisor
from bert_jax.distributed.process_report import make_report
from bert_jax.doctor.check_context import Finding
from bert_jax.errors import TRY_AGAIN, UserError, did_you_mean

END_MESSAGES = {"steps": "finished", "time": "finished, time limit reached", "target": "finished, target reached"}
"""Message of a finished run, by the reason of its end (training/loop.py)."""


def pretrain(argv: Sequence[str]) -> int:
    """``bert-jax pretrain CONFIG --corpus DIR[=WEIGHT] --workdir DIR [--FIELD VALUE ...]``."""
    config, args = _parse_config_command(Pretrain, argv, "pretrain")
    window = None if args.profile is None else flags.parse_window(args.profile)
    micro_batch = None if args.micro_batch is None else flags.parse_micro_batch(args.micro_batch)
    mixture = [mixture_spec.parse(text) for text in args.corpus]
    if supervisor.WORKER_ENV not in os.environ and (info := cluster_detection.detect(args.cluster)) is not None:
        report = make_report(config, corpus=args.corpus, workdir=args.workdir, micro_batch=micro_batch)
        command = [sys.executable, "-m", "bert_jax", "pretrain", *argv]
        return supervisor.supervise(command, info, report, args.cluster.timeout)

    config = _with_vocabulary(config, argv, mixture)
    from bert_jax.convert import init_from  # jax is loaded only if needed, not for --help
    from bert_jax.distributed import agreement, worker
    from bert_jax.doctor.doctor import run_summary
    from bert_jax.training import pretraining
    from bert_jax.training.run_directory import goodput

    worker.disable_absent_tpu_backend()
    worker.set_compilation_cache(args.compilation_cache)
    if supervisor.WORKER_ENV in os.environ:
        worker.connect_worker(args.cluster)

    def announce() -> None:
        for line in run_summary(config, mixture, micro_batch):
            print(line, file=sys.stderr, flush=True)

    progress = pretraining.pretrain(
        config,
        mixture,
        args.workdir,
        profile=window,
        micro_batch=micro_batch,
        announce=announce,
        load_initial_params=init_from.load_initial_params,
    )
    counts = f"{progress.cursor.step} steps, {progress.cursor.rows:,} rows, {progress.tokens_seen:,} tokens"
    supervisor.announce_exit()
    code = 0 if progress.ended else TRY_AGAIN
    if not agreement.is_first():
        return code
    if not progress.ended:
        print(f"stopped and saved at step {progress.cursor.step} of {config.total_steps}; the same command continues")
        return code
    print(f"{END_MESSAGES[progress.ended]}: {counts}; results are in {args.workdir}")
    _print_table(progress.evaluation)
    print(goodput.format_summary(goodput.summarize(args.workdir)))
    return code


def doctor(argv: Sequence[str]) -> int:
    """``bert-jax doctor CONFIG --corpus DIR[=WEIGHT] [--workdir DIR] [--against] [--FIELD VALUE ...]``."""
    config, args = _parse_config_command(Doctor, argv, "doctor")
    mixture = [mixture_spec.parse(text) for text in args.corpus]
    from bert_jax.distributed import worker

    worker.disable_absent_tpu_backend()
    if args.against:
        from bert_jax.doctor.reference_curve import compare_with_curve

        return _print_findings(compare_with_curve(config, mixture), args.json)
    config = _with_vocabulary(config, argv, mixture)
    from bert_jax.doctor.doctor import DoctorOptions, run_doctor

    micro_batch = None if args.micro_batch is None else flags.parse_micro_batch(args.micro_batch)
    options = DoctorOptions(args.workdir, micro_batch, args.hosts, args.devices, args.topology)
    info, timeout = cluster_detection.detect(args.cluster), args.cluster.timeout
    return run_doctor(config, mixture, options, info, timeout, lambda findings: _print_findings(findings, args.json))


def _print_findings(findings: Iterator[Finding], as_json: bool) -> int:
    """Print findings, as text each as soon as it is known; returns the exit code."""
    printed = []
    for finding in findings:
        printed.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps([finding._asdict() for finding in printed]))
    return 2 if any(finding.level == "error" for finding in printed) else 0


def schedule(argv: Sequence[str]) -> None:
    """``bert-jax schedule CONFIG [--plot FILE.png] [--FIELD VALUE ...]``."""
    config, args = _parse_config_command(Schedule, argv, "schedule")
    from bert_jax.planning import schedule

    values = schedule.to_dict(config)
    print(json.dumps(values) if args.json else "\n".join(schedule.format_lines(values)))
    if args.plot is not None:
        schedule.plot(config, args.plot)


def plan(argv: Sequence[str]) -> None:
    """``bert-jax plan CONFIG --topology v5e:16x16 [--search] [--FIELD VALUE ...]``."""
    config, args = _parse_config_command(Plan, argv, "plan")
    micro_batch = None if args.micro_batch is None else flags.parse_micro_batch(args.micro_batch)
    if micro_batch == "auto":
        raise UserError("--micro-batch auto needs a device: give a number of rows, or --search")
    if micro_batch is not None and args.search:
        raise UserError("--search chooses the micro-batch: leave out --micro-batch or --search")
    from bert_jax.planning import mesh_search, run_plan, topologies

    topology = topologies.parse_topology(args.topology)
    if not args.search:
        values = run_plan.plan(config, topology, micro_batch, args.price_per_chip_hour)
        print(json.dumps(values) if args.json else "\n".join(run_plan.format_lines(values)))
        return
    search = mesh_search.search_mesh(config, topology)
    values = run_plan.plan(search.config, topology, None, args.price_per_chip_hour, search.compiled_step)
    if args.json:
        print(json.dumps(values | {"search": mesh_search.to_dict(search)}))
    else:
        print("\n".join([*run_plan.format_lines(values), *mesh_search.format_lines(search)]))


def evaluate(argv: Sequence[str]) -> None:
    """``bert-jax evaluate WORKDIR --corpus DIR``."""
    args = flags.parse(Evaluate, argv, "evaluate")
    # Validation splits are scored one by one: their shares are not used, and equal shares pass validation.
    mixture = [mixture_spec.CorpusWeight(storage.to_path(text), 1.0) for text in args.corpus]
    from bert_jax.distributed import worker
    from bert_jax.training import pretraining

    worker.disable_absent_tpu_backend()
    evaluation = pretraining.evaluate(args.workdir, mixture, form=args.format, seq_len=args.seq_len, rows=args.rows)
    scored = evaluation._asdict()
    metrics = scored.pop("metrics")
    if args.json:
        print(json.dumps(scored | metrics))
    else:
        print("scored: " + ", ".join(f"{name} {value}" for name, value in scored.items()))
        _print_table(metrics)


def fill_mask(argv: Sequence[str]) -> None:
    """``bert-jax fill-mask MODEL "text with [MASK]"``."""
    args = flags.parse(FillMask, argv, "fill-mask")
    from bert_jax.distributed import worker
    from bert_jax.inference import loaded_model

    worker.disable_absent_tpu_backend()
    model = loaded_model.load(args.model)
    if model.tokenizer.note:
        print(f"note: {model.tokenizer.note}", file=sys.stderr)
    filled = model.fill_mask(args.text, args.top)
    if args.json:
        print(json.dumps([[candidate._asdict() for candidate in candidates] for candidates in filled]))
        return
    mask = model.tokenizer.id_to_token(model.tokenizer.mask_id)
    for i, candidates in enumerate(filled, start=1):
        shown = "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates)
        print(f"{mask} {i}: {shown}")


def convert(argv: Sequence[str]) -> None:
    """``bert-jax convert SOURCE DESTINATION --to huggingface``."""
    args = flags.parse(Convert, argv, "convert")
    from bert_jax.convert import conversion
    from bert_jax.convert.formats import input_formats
    from bert_jax.distributed import worker

    worker.disable_absent_tpu_backend()
    options = input_formats.ReadOptions(args.optimizer_state == "keep", args.drop, args.trim_vocabulary)
    report = conversion.convert(args.source, args.destination, args.to, options, force=args.force, pooling=args.pooling)
    print(json.dumps(report.to_dict()) if args.json else "\n".join([*report.lines(), f"wrote {args.destination}"]))


def launch(argv: Sequence[str]) -> None:
    """Write the launcher of a cluster: scripts for Slurm and Cloud TPU, a JobSet for Kubernetes."""
    from bert_jax import launchers

    launchers.launch(argv)


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
"""By name: the class or function whose docstring is the help, and the function that runs the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; on an error, report it to the supervisor, so that other processes do not wait.

    Returns:
      the exit code: as in `command_line.run`; also 2 if `doctor` found an error, and 75 if the run was saved and the
      same command continues it.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        code = command_line.run(lambda: _run(words))
    except BaseException:
        if not supervisor.needed_by_peers():
            raise
        traceback.print_exc()
        code = 1
    if supervisor.needed_by_peers():
        supervisor.exit_now(code)
    return code


def _run(argv: Sequence[str]) -> int | None:
    if not argv:
        raise UserError(f"a command is missing: commands are {', '.join(COMMANDS)}; `bert-jax --help` explains them")
    name, *rest = argv
    if name in ("-h", "--help", "--help-all", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(command_line.version_line("bert-jax"))
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name.lower().replace("_", "-"), COMMANDS)
        raise UserError(f"there is no command '{name}': {hint and f'{hint} '}Commands are {', '.join(COMMANDS)}")
    command_line.check_no_empty_words(rest)
    return COMMANDS[name][1](rest)


def _overview() -> str:
    """Help of `bert-jax`: every command with the first sentence of its help."""
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


def _parse_config_command(kind: type, argv: Sequence[str], command: str) -> tuple[Config, Any]:
    """Parse a command that takes CONFIG first and its fields as flags; returns the config and all parsed arguments."""
    if any(field.name == "init_from" for field in dataclasses.fields(kind)):
        argv = _replace_init_from(argv)
    name, rest = _config_name(argv, command)
    preset = presets.load_config(name or "bert_base")
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(Config)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory and f.name not in fields]
    args = flags.parse(kind, rest, f"{command} {name or 'CONFIG'}", kind(**fields, **dict.fromkeys(required, MISSING)))
    return Config(**{name: getattr(args, name) for name in fields}), args


def _with_vocabulary(config: Config, argv: Sequence[str], mixture: Sequence[mixture_spec.CorpusWeight]) -> Config:
    """Set a preset's vocab_size to that of its corpora; that of a config file or of --model.vocab-size is kept.

    Corpora that cannot be opened are ignored here: the command reports them.
    """
    given = any(re.match("--model[.]vocab[-_]size(=|$)", word) for word in argv)
    if given or argv[0] not in presets.preset_files():
        return config
    with contextlib.suppress(UserError):
        return config_lib.replace(config, model={"vocab_size": mixture_spec.vocab_size(mixture)})
    return config


def _replace_init_from(argv: Sequence[str]) -> list[str]:
    """Replace --init-from by --start.source; UserError if both are given."""
    renamed = [re.sub("^--init[-_]from(?==|$)", "--start.source", argument) for argument in argv]
    if sum(argument.partition("=")[0] == "--start.source" for argument in renamed) > 1:
        raise UserError("--init-from and --start.source are one flag: give it once")
    return renamed


def _config_name(argv: Sequence[str], command: str) -> tuple[str | None, Sequence[str]]:
    """Split CONFIG from the flags; CONFIG may be missing if help is requested."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    if {"-h", "--help", "--help-all"} & set(argv):
        return None, argv
    known = ", ".join(presets.preset_files())
    raise UserError(f"{command} needs a config first, a preset's name or a file: presets are {known}")


def _print_table(metrics: dict[str, float]) -> None:
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:<{width}}  {value:.4f}")
