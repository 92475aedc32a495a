"""Flags of the commands of `bert-jax` and `bert-data`, which are the fields of dataclasses: parsing, help, errors."""

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

import tyro
from tyro import _errors  # only they say which flag is wrong, else tyro prints and exits; setup.cfg fixes its version

from bert_jax.errors import UserError, did_you_mean
from bert_jax.field_validation import check, describe
from bert_jax.storage.paths import StoredPath, to_path

T = TypeVar("T")

DirectoryArg = Annotated[
    StoredPath,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DIR",
        instance_from_str=lambda words: to_path(words[0]),
        is_instance=lambda value: isinstance(value, StoredPath),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""A path on this machine or in a bucket."""
COMMON_FIELDS = """
model.num-layers model.hidden-size model.compute-dtype model.remat objective.pair objective.mask-rate data.format
optimizer.name phases.0.steps phases.0.seq-len phases.0.batch-size phases.0.learning-rate phases.0.warmup-steps
mesh.fsdp checkpoint.every log.every evaluation.every start.source
"""
"""Fields of a config that ``--help`` shows; ``--help-all`` shows all fields."""
SYNONYMS = {
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
    "--task": "task-name",
    "--data": "data-dir train-file dataset",
    "--learning-rate": "lr",
    "--epochs": "num-train-epochs num-epochs max-epochs",
    "--batch-size": "per-device-train-batch-size train-batch-size",
    "--max-length": "max-seq-length max-seq-len",
    "--warmup": "warmup-ratio warmup-proportion warmup-steps num-warmup-steps",
    "--to": "format",
}
"""Common names of flags (transformers, BERT of Google, NVIDIA and fairseq), by our flag."""

_Option: type = type(tyro.conf.arg())
_NAME_COLUMNS = 24


class Flag(NamedTuple):
    """A field of a command, as the user types it."""

    names: tuple[str, ...]
    """The field's name with its path, aliases, and the negation of a Boolean; a positional argument has its metavar."""
    metavar: str
    """What the value is, in capitals; empty for Booleans and positional arguments."""
    kind: Any
    """The field's annotation."""
    default: Any
    """`tyro.MISSING` if the user must give a value."""
    help: str
    section: str
    """Path of the dataclass that has the field, such as ``model``; empty for a command and its groups."""
    owner: type
    """That dataclass."""
    is_repeatable: bool

    @property
    def usage(self) -> str:
        """The flag and its value, or the positional argument."""
        return " ".join(filter(None, [self.names[0], self.metavar]))


def list_flags(kind: type, default: Any = None, section: str = "") -> Iterator[Flag]:
    """The flags of a dataclass, then those of the dataclasses in it.

    Args:
      kind: every field that is a flag has a docstring, or a `tyro.conf.arg(help=...)`.
      default: an instance whose values are the defaults; None: the defaults of `kind`.
      section: path of the dataclass.
    """
    hints, docs = typing.get_type_hints(kind, include_extras=True), _field_docs(kind)
    sections = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        inner, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else [hint]
        if tyro.conf.Suppress in marks:
            continue
        option = next((mark for mark in marks if isinstance(mark, _Option)), tyro.conf.arg())
        name = field.name.replace("_", "-") if option.name is None else option.name
        path = ".".join(filter(None, [section, name]))
        value = _default(field) if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            sections.append((value, path))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            sections += [(part, f"{path}.{i}") for i, part in enumerate(value)]
        else:
            metavar = option.metavar or ("" if inner is bool else _metavar(hint, value is None))
            if tyro.conf.Positional in marks:
                names, metavar = (metavar,), ""
            elif inner is bool and tyro.conf.FlagCreatePairsOff not in marks:
                names = (f"--{path}", f"--{section and f'{section}.'}no-{name}")
            else:
                names = (f"--{path}", *(option.aliases or ()))
            text = option.help or docs[field.name]
            repeatable = tyro.conf.UseAppendAction in marks
            yield Flag(names, metavar, hint, value, text, section, kind, repeatable)
    for value, path in sections:
        yield from list_flags(type(value), value, path)


def parse(kind: type[T], arguments: Sequence[str], prog: str, default: T | None = None) -> T:
    """Parse the arguments of a command.

    Args:
      kind: a dataclass; tyro reads the arguments into its fields.
      arguments: what follows the command's name.
      prog: the command, for messages, such as ``bert-jax plan``.
      default: an instance whose values are the defaults, `tyro.MISSING` where there is none.

    Raises:
      UserError: a wrong flag or value; one line that names it.
      SystemExit: after ``--help`` or ``--help-all``.
    """
    flags = list(list_flags(kind, default))
    arguments = _with_exact_values(arguments, flags)
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if {"-h", "--help", "--help-all"} & set(words):
        print(_format_help(kind, flags, prog, show_all="--help-all" in words))
        raise SystemExit(0)
    _refuse_contradictions(words, flags)

    def report(event: _errors.ParseErrorEvent) -> None:
        raise UserError(_error_line(event, words, flags, prog))

    defaults = {} if default is None else {"default": default}
    with _errors.on_parse_error(report):
        args = tyro.cli(kind, args=arguments, prog=prog, **defaults)
    for flag, parsed in zip(flags, list_flags(kind, args), strict=True):
        if flag.default is tyro.MISSING and parsed.default == ():  # tyro accepts that a repeatable flag is missing
            raise UserError(_missing_line([flag], prog))
    check(args, "--")
    return args


def _format_help(kind: type, flags: Sequence[Flag], prog: str, show_all: bool) -> str:
    """Help of a command: all flags, or those of the command itself and the fields in COMMON_FIELDS, without the names
    in an attribute `rare_flags` of the command.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    positionals = [flag for flag in flags if not flag.names[0].startswith("--")]
    required = [flag.usage for flag in flags if flag.default is tyro.MISSING and flag not in positionals]
    usage = " ".join(["usage:", prog, *required, "[FLAGS]", *(flag.usage for flag in positionals)])
    lines = textwrap.wrap(usage, width, subsequent_indent="       ", break_long_words=False, break_on_hyphens=False)
    for paragraph in (inspect.getdoc(kind) or "").split("\n\n"):
        lines += ["", *textwrap.wrap(paragraph, width)]
    common, rare = COMMON_FIELDS.split(), getattr(kind, "rare_flags", ())
    shown = [f for f in flags if not f.section or f.names[0].removeprefix("--") in common]
    listed = flags if show_all else [f for f in shown if f.names[0] not in rare]
    for (section, owner), group in itertools.groupby(listed, key=lambda flag: (flag.section, flag.owner)):
        title = inspect.getdoc(owner).partition("\n\n")[0]
        lines += ["", *([] if owner is kind else textwrap.wrap(f"{section}: {title}" if section else title, width))]
        for flag in group:
            lines += _help_lines(flag, width)
    hidden = len(flags) - len(listed)
    return "\n".join([*lines, *([f"\n{hidden} more flags: {prog} --help-all"] if hidden else [])])


def _help_lines(flag: Flag, width: int) -> list[str]:
    names = flag.names[:1] if flag.default is False else flag.names
    name = " ".join(filter(None, [", ".join(names), flag.metavar]))
    notes = ["required"] if flag.default is tyro.MISSING else []
    if flag.is_repeatable:
        notes.append("repeatable")
    elif not notes and flag.default is not False and flag.default != () and "default" not in flag.help.lower():
        notes.append(f"default: {flag.default}")
    text = f"{flag.help} ({', '.join(notes)})" if notes else flag.help
    lines = textwrap.wrap(text, width - _NAME_COLUMNS, break_on_hyphens=False)
    if len(name) < _NAME_COLUMNS - 2:
        first = [f"  {name:<{_NAME_COLUMNS - 2}}{lines.pop(0)}"]
    else:
        first = textwrap.wrap(name, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [*first, *(" " * _NAME_COLUMNS + line for line in lines)]


def _metavar(hint: Any, without_none: bool = False) -> str:
    """What a value looks like, in capitals; choices in braces."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((mark.metavar for mark in arguments[1:] if getattr(mark, "metavar", None)), _metavar(arguments[0]))
    if origin in (Union, types.UnionType):
        return "|".join(_metavar(one) for one in arguments if not (without_none and one is types.NoneType))
    if origin is Literal:
        return arguments[0] if len(arguments) == 1 else f"{{{', '.join(arguments)}}}"
    if origin is tuple:
        return " ".join("..." if one is ... else _metavar(one) for one in arguments)
    return {bool: "{True,False}", str: "TEXT", types.NoneType: "None"}.get(hint) or hint.__name__.upper()


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return tyro.MISSING if field.default_factory is dataclasses.MISSING else field.default_factory()


@functools.cache
def _field_docs(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass' fields, each on one line; those of its base classes too."""
    docs: dict[str, str] = {}
    for base in kind.__bases__:
        docs |= _field_docs(base) if dataclasses.is_dataclass(base) else {}
    try:
        source = inspect.getsource(kind)
    except OSError:  # made by `dataclasses.make_dataclass`
        return docs
    (definition,), name = ast.parse(textwrap.dedent(source)).body, ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(node.value.value.split())
    return docs


def _given(words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every flag in the words, with hyphens, and its values."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")] + [len(words)]
    for start, end in itertools.pairwise(starts):
        name, equals, value = words[start].partition("=")
        yield name.replace("_", "-"), ((value,) if equals else ()) + tuple(words[start + 1 : end])


def _with_exact_values(arguments: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """The arguments with `true`, `false` and `none` of config fields as tyro reads them: capitalised, or as ``--field``
    and ``--no-field`` of a Boolean.
    """
    fields, words, i = {flag.names[0]: flag for flag in flags if flag.section}, [], 0
    while i < len(arguments) and arguments[i] != "--":
        name, equals, value = arguments[i].partition("=")
        flag = fields.get(name.replace("_", "-"))
        exact = (value if equals else "".join(arguments[i + 1 : i + 2])).capitalize()
        is_boolean = flag is not None and flag.kind is bool and exact in ("True", "False")
        has_value = flag is not None and bool in (flag.kind, *typing.get_args(flag.kind)) and exact in ("True", "False")
        has_value |= flag is not None and types.NoneType in typing.get_args(flag.kind) and exact == "None"
        if not is_boolean and not has_value:
            words.append(arguments[i])
            i += 1
            continue
        words += [flag.names[exact == "False"]] if is_boolean else [name, exact]
        i += 1 if equals else 2
    return [*words, *arguments[i:]]


def _refuse_contradictions(words: Sequence[str], flags: Sequence[Flag]) -> None:
    fields = {name: flag.names[0] for flag in flags if not flag.is_repeatable for name in flag.names}
    seen: dict[str, tuple[str, ...]] = {}
    for name, values in _given(words):
        field = fields.get(name, "").replace("--no-", "--")
        before = seen.setdefault(field, (name, *values))
        if field and before != (name, *values):
            raise UserError(f"{' '.join(before)} and {' '.join([name, *values])} contradict each other: give one")


def _error_line(event: _errors.ParseErrorEvent, words: Sequence[str], flags: Sequence[Flag], prog: str) -> str:
    """The message of a parse error."""
    known = [name for flag in flags for name in flag.names]
    match event:
        case _errors.UnrecognizedArgs(tokens=[*tokens]) | _errors.MissingArgs(unrecognized_tokens=[_, *_] as tokens):
            name = next((name for name, _ in _given(tokens)), None)
            if name is None:
                return f"'{' '.join(tokens)}' is neither a flag nor the value of one"
            return f"{prog} has no flag {name}: {_suggestion(name, known) or f'`{prog} --help-all` shows all flags'}"
        case _errors.MissingArgs(missing_arguments=missing):
            names = {name for one in missing for name in (one.arg.display_name(), one.arg.lowered.metavar)}
            names |= {flag.names[0] for flag in flags if flag.is_repeatable} - dict(_given(words)).keys()
            absent = [flag for flag in flags if flag.default is tyro.MISSING and flag.names[0] in names]
            return _missing_line(absent, prog)
        case _errors.MissingMutexGroup(groups=[group, *_]):
            return f"{prog} needs {' or '.join(one.arg.display_name() for one in group)}: `{prog} --help` explains it"
        case _errors.MutexConflict(first_token=first, second_token=second):
            return f"{first} and {second} contradict each other: give one"
        case _errors.BadValue(argument=argument):
            return f"{argument.display_name()} needs a value"
        case _errors.InvalidChoice(argument=argument) | _errors.InstantiationFailure(argument=argument):
            values = next((values for name, values in _given(words) if name in argument.lowered.name_or_flags), ())
            return f"{argument.display_name()} is '{' '.join(values)}': it must be {describe(argument.field.type)}"
    return f"{prog}: {type(event).__name__}"


def _missing_line(missing: Sequence[Flag], prog: str) -> str:
    return f"{prog} needs {' and '.join(flag.usage for flag in missing)}: `{prog} --help` explains it"


def _suggestion(name: str, known: Sequence[str]) -> str:
    word = name.strip("-").lower()
    same = [flag for flag, others in SYNONYMS.items() if flag in known and word in others.split()]
    same = same or [flag for flag in known if flag.rpartition(".")[2] == word]
    if same:
        return f"use {' or '.join(same[:4])}"
    section = [flag for flag in known if flag.startswith(f"{name}.")]
    if section:
        return f"it is a section, with the flags {', '.join(section[:3])} and others"
    return did_you_mean(name, known)
