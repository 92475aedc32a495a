"""The flags of `bert-jax`: parsing, help, and one-line errors."""

import contextlib
import io
import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tyro

from bert_jax import field_validation
from bert_jax.errors import UserError, did_you_mean

COMMON_FIELDS = """
model.num-layers model.hidden-size model.compute-dtype model.remat objective.pair objective.mask-rate data.format
optimizer.name phases.0.steps phases.0.seq-len phases.0.batch-size phases.0.learning-rate phases.0.warmup-steps
mesh.fsdp checkpoint.every log.every evaluation.every
"""
"""Fields of a config that ``--help`` shows; ``--help-all`` shows all fields."""
RARE_FLAGS = ("name", "profile", "compilation-cache")
"""Top-level flags that only ``--help-all`` shows."""
FLAG_SYNONYMS = {
    "--phases.0.learning-rate": "lr learning-rate peak-lr peak-learning-rate",
    "--phases.0.batch-size": "batch-size train-batch-size global-batch-size total-batch-size bsz",
    "--micro-batch": "per-device-train-batch-size per-gpu-train-batch-size micro-batch-size device-batch-size",
    "--phases.0.accumulation": "gradient-accumulation-steps accumulation-steps grad-accum update-freq",
    "--phases.0.steps": "epochs num-epochs num-train-epochs max-epochs steps max-steps train-steps num-train-steps "
    "total-steps max-update total-num-update",
    "--phases.0.seq-len": "max-seq-length max-seq-len max-length seq-length seq-len tokens-per-sample",
    "--phases.0.warmup-steps": "warmup num-warmup-steps warmup-steps warmup-proportion warmup-ratio warmup-updates",
    "--phases.0.max-predictions": "max-predictions-per-seq",
    "--phases.0.decay": "lr-scheduler lr-scheduler-type lr-schedule",
    "--objective.mask-rate": "mlm-probability masked-lm-prob mask-prob mlm-prob",
    "--model.compute-dtype": "fp16 bf16 amp dtype precision mixed-precision half",
    "--model.num-layers": "num-hidden-layers layers encoder-layers",
    "--model.num-heads": "num-attention-heads heads",
    "--model.hidden-dropout": "dropout hidden-dropout-prob",
    "--model.attention-dropout": "attention-probs-dropout-prob",
    "--model.max-positions": "max-position-embeddings",
    "--model.remat": "gradient-checkpointing checkpoint-activations",
    "--optimizer.name": "optim optimizer",
    "--optimizer.epsilon": "adam-epsilon adam-eps eps",
    "--optimizer.beta1": "adam-beta1",
    "--optimizer.beta2": "adam-beta2",
    "--optimizer.clip-norm": "max-grad-norm clip-norm grad-clip",
    "--checkpoint.every": "save-steps save-checkpoints-steps num-steps-per-checkpoint save-interval",
    "--checkpoint.keep": "save-total-limit",
    "--log.every": "logging-steps log-freq log-interval",
    "--evaluation.every": "eval-steps evaluation-strategy eval-strategy eval-every",
    "--data.reader-processes": "num-workers dataloader-num-workers",
    "--init-from": "init-checkpoint model-name-or-path resume from-pretrained",
    "--workdir": "output-dir output out work-dir save-dir",
    "--corpus": "data-dir data input-dir input-file train-file dataset dataset-name",
    "--top": "top-k k",
    "--to": "format",
}
"""Common names of flags (transformers, BERT of Google, NVIDIA and fairseq), by the flag of bert-jax."""


def parse_micro_batch(text: str) -> int | Literal["auto"]:
    """Parse ``--micro-batch``; UserError if it is neither a number of rows nor auto."""
    if text == "auto":
        return "auto"
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise UserError(f"--micro-batch {text}: give a number of rows on each device, or auto")
    return int(text)


def parse_window(text: str) -> tuple[int, int]:
    """Parse ``--profile A:B``; UserError if it is not a valid window."""
    match = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile {text}: write the first step and the one after the last, as in 100:110")
    return int(match[1]), int(match[2])


def parse(kind: type, arguments: Sequence[str], command: str, default: Any = None) -> Any:
    """Parse with tyro; its multi-line errors become a UserError of one line.

    Raises:
      SystemExit: after ``--help`` or ``--help-all``.
    """
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--help-all" in words:
        print(_full_help(kind, command, default))
        raise SystemExit(0)
    if "--help" in words or "-h" in words:
        print(_short_help(_full_help(kind, command, default), command))
        raise SystemExit(0)
    _refuse_contradictions(kind, words)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box), contextlib.redirect_stdout(box):
            args = _tyro(kind, arguments, command, default)
    except SystemExit:
        flags = re.findall(r"^  (--?[a-z].*)$", _full_help(kind, command, default), re.MULTILINE)
        _refuse_unknown(words, [name for flag in flags for name in re.findall(r"--[\w.-]+", flag)], command)
        raise UserError(_one_line(box.getvalue(), words, flags, command)) from None
    field_validation.check(args, "")
    return args


def _tyro(kind: type, arguments: Sequence[str], command: str, default: Any) -> Any:
    given = {} if default is None else {"default": default}
    return tyro.cli(kind, args=arguments, prog=f"bert-jax {command}", **given)


def _full_help(kind: type, command: str, default: Any) -> str:
    """Help text with all flags, each on a line after two spaces. StringIO has no encoding, so tyro draws no boxes."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        _tyro(kind, ["--help"], command, default)
    return "\n".join(line.rstrip() for line in _strip_colors(text.getvalue()).splitlines())


def _strip_colors(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _short_help(text: str, command: str) -> str:
    """Help text with the flags of the command itself and those in COMMON_FIELDS."""
    head, *sections = re.split(r"\n(?= [^ ].*\n -{5})", text)
    kept, hidden = [head], 0
    for section in sections:
        title, *flags = re.split(r"\n(?=  --?[a-z])", section.rstrip())
        shown = [flag for flag in flags if _is_common(flag)]
        hidden += len(flags) - len(shown)
        if not flags:
            kept.append(section)
        elif shown:
            kept.append("\n".join(["\n".join(title.splitlines()[:2]), *shown, ""]))
    more = f"\n{hidden} more flags: bert-jax {command} --help-all" if hidden else ""
    return "\n".join(kept) + more


def _is_common(flag: str) -> bool:
    name = re.findall(r"--([\w.-]+)", flag)[0]
    return name in COMMON_FIELDS.split() or ("." not in name and name not in RARE_FLAGS)


def _flags_with_values(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every flag in the words, with hyphens, and its values."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")] + [len(words)]
    for start, end in itertools.pairwise(starts):
        name, equals, value = words[start].partition("=")
        yield name.replace("_", "-"), ((value,) if equals else ()) + tuple(words[start + 1 : end])


def _refuse_contradictions(kind: type, words: Sequence[str]) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    repeatable = {f"--{name}" for name, hint in hints.items() if tyro.conf.UseAppendAction in typing.get_args(hint)}
    seen: dict[str, tuple[str, ...]] = {}
    for name, values in _flags_with_values(words):
        before = seen.setdefault(re.sub(r"(^--|\.)no-", r"\1", name), (name, *values))
        if name not in repeatable and before != (name, *values):
            raise UserError(f"{' '.join(before)} and {' '.join([name, *values])} contradict each other: give one")


def _refuse_unknown(words: Sequence[str], known: Sequence[str], command: str) -> None:
    for name, _ in _flags_with_values(words):
        if name not in known:
            answer = _suggestion(name, known) or f"`bert-jax {command} --help-all` shows all flags"
            raise UserError(f"{command} has no flag {name}: {answer}")


def _suggestion(name: str, known: Sequence[str]) -> str:
    word = name.strip("-").lower()
    same = [flag for flag, others in FLAG_SYNONYMS.items() if flag in known and word in others.split()]
    same = same or [flag for flag in known if flag.rpartition(".")[2] == word]
    if same:
        return f"use {' or '.join(same[:4])}"
    section = [flag for flag in known if flag.startswith(f"{name}.")]
    if section:
        return f"it is a section, with the flags {', '.join(section[:3])} and others"
    return did_you_mean(name, known)


def _one_line(printed: str, words: Sequence[str], flags: Sequence[str], command: str) -> str:
    """An error message of tyro on one line, without its title, help text and footer."""
    message = re.split(r"^ *-{5,} *$", _strip_colors(printed), flags=re.MULTILINE)[1].strip("\n").splitlines()
    text = " ".join(line.strip() for line in message)
    if text.startswith("Missing from"):
        needed = [line.strip() for line in message[1:] if re.match(" {6}[^ ]", line)]
        return f"{command} needs {' and '.join(needed)}: `bert-jax {command} --help` explains it"
    if wrong := re.match("Error parsing (--[^ ]+):", text):
        takes = next(flag for flag in flags if flag.startswith(f"{wrong[1]} ")).partition(" ")[2]
        takes = takes.split("  ")[0]  # where a name is short, its help follows on the same line
        values = next(values for name, values in _flags_with_values(words) if name == wrong[1])
        return f"{wrong[1]} takes {takes}, not {' '.join(values)!r}"
    text = re.sub("Missing value for argument '(.*)'. Expected 1 values.", r"\1 needs a value", text)
    return re.sub("Unrecognized options: (.*)", r"'\1' is neither a flag nor the value of one", text)
