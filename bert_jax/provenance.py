"""What a result was made by: code, command, date, environment, configs, and hashes of model and data.

A results file has it under the key ``provenance``; all else in the file, but ``timing``, is a function of config, data
and seed. A page has it at its end.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

from bert_jax import __version__
from bert_jax.config import flatten
from bert_jax.report import Note, Section, Table

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
PRESETS = "configs"
"""Directory of an installed package, and not of a checkout's: its values are in the config of a run."""
SHOWN = 4
"""Names in a list; of the others, only their number."""
MISSING = "—"
"""Of a setting that one of several configs does not have."""


class Code(TypedDict):
    """The code of bert_jax."""

    version: str
    commit: str
    """12 hex digits, with "-dirty" if files of the checkout have local changes; "": not a checkout, or no git."""
    sha256: str
    """First 16 hex digits of the SHA-256 of the source files of the package: their names and contents."""


class Provenance(TypedDict):
    """What a result was made by."""

    code: Code
    command: str
    date: str
    """`current_date`"""
    environment: dict[str, str]
    """Versions, and what computed."""
    hashes: dict[str, str]
    """Of model, data, corpora and tokenizer, by name, as far as they are known."""
    configs: dict[str, dict[str, Any]]
    """Of each level of a study, or of the run."""
    other_code: dict[str, Code]
    """Parts of the result that other code made, such as runs before an update."""


def make_provenance(
    environment: Mapping[str, str],
    *,
    hashes: Mapping[str, str] = {},
    configs: Mapping[str, Any] = {},
    made_by: Mapping[str, Code | None] = {},
) -> Provenance:
    """The provenance of a result that this process writes now.

    Args:
      environment: `environment.describe_environment`, or without devices `package_versions`.
      hashes: of what the result was made of, by name.
      configs: dataclasses or plain values, by level.
      made_by: the code that made each part of the result; None: unknown.
    """
    return Provenance(
        code=code(),
        command=_command_line(),
        date=current_date(),
        environment=dict(environment),
        hashes=dict(hashes),
        configs=json.loads(json.dumps(configs, default=dataclasses.asdict)),
        other_code=other_code(made_by),
    )


@functools.cache
def code(*packages: Path) -> Code:
    """The code of this process: of bert_jax, and of the directories of other packages."""
    root = Path(__file__).parent
    return Code(version=__version__, commit=_commit(root.parent), sha256=code_sha256(root, *packages))


def code_sha256(*packages: Path) -> str:
    """First 16 hex digits of the SHA-256 of the names and contents of packages' source files, without presets."""
    digest = hashlib.sha256()
    for root in packages:
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if name.parts[0] != PRESETS:
                digest.update(f"{name.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _commit(root: Path) -> str:
    """The commit of a checkout (`Code.commit`)."""
    if not (root / ".git").exists():
        return ""
    describe = ("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    try:
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def current_date() -> str:
    """Date and time of now, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def _command_line() -> str:
    """The command of this process, as it is typed."""
    program, *words = sys.argv
    name = Path(program).name
    module = name == "__main__.py"
    return shlex.join([*(["python", "-m", Path(program).parent.name] if module else [name]), *words])


def describe_code(one: Code) -> str:
    """As in "bert_jax 0.1.0 (commit a671420d1234 with local changes, SHA-256 0123456789abcdef)"."""
    commit = one["commit"].removesuffix("-dirty")
    changes = " with local changes" if one["commit"].endswith("-dirty") else ""
    return f"bert_jax {one['version']} ({f'commit {commit}{changes}, ' * bool(commit)}SHA-256 {one['sha256']})"


def other_code(made_by: Mapping[str, Code | None], now: Code | None = None) -> dict[str, Code]:
    """The parts of a result that other code made.

    Args:
      made_by: the code that made each part; None: unknown.
      now: the code of the others. Default: that of this process.
    """
    now = now or code()
    return {part: one for part, one in made_by.items() if one and one["sha256"] != now["sha256"]}


def describe_other_code(made_by: Mapping[str, Code | None], now: Code | None = None) -> str:
    """The parts of `other_code` with their code, and `now`, as in "seed 0 by bert_jax 0.1.0 (...); the rest by bert_jax
    0.2.0 (...)"; "" if there are none.
    """
    now, parts = now or code(), {}
    for part, one in other_code(made_by, now).items():
        parts.setdefault(describe_code(one), []).append(part)
    made = [f"{_listed(names)} by {by}" for by, names in parts.items()]
    return "; ".join([*made, f"the rest by {describe_code(now)}"]) if made else ""


def _listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def warnings(made: Provenance) -> list[Note]:
    """The note of a page whose result was partly made by other code; else none."""
    text = describe_other_code(made["other_code"], made["code"])
    return [Note(f"Parts of this result were made by other code: {text}.", warning=True)] if text else []


def describe(made: Provenance) -> dict[str, str]:
    """All but configs and other code, in words, by name."""
    return {
        "code": describe_code(made["code"]),
        "command": made["command"],
        "date": made["date"],
        "environment": ", ".join(f"{name} {value}" for name, value in made["environment"].items()),
        **{f"SHA-256 of {name}": value for name, value in made["hashes"].items()},
    }


def sections(by_part: Mapping[str, Provenance]) -> list[Section]:
    """The end of a page: what its results were made by, and the settings of all configs, those that differ first.

    Args:
      by_part: the provenance of each part of the page; one part has any name.
    """
    rows: dict[str, dict[str, list[str]]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for part, made in by_part.items():
        configs |= made["configs"]
        for name, value in describe(made).items():
            rows.setdefault(name, {}).setdefault(value, []).append(part)
    lines = [
        (name, value if len(parts) == len(by_part) else f"{value} ({', '.join(parts)})")
        for name, found in rows.items()
        for value, parts in found.items()
    ]
    about = Section("provenance", (Table(("", "made by"), tuple(lines), words=True),))
    tables = tuple(table for table in settings_tables(configs) if table.rows)
    return [about, *([Section("configs", tables)] if tables else [])]


def settings_tables(configs: Mapping[str, Any]) -> tuple[Table, Table]:
    """The settings in which configs differ, with a column for each, and those that all have.

    Args:
      configs: nested plain values by name.
    """
    flat = [flatten(config) for config in configs.values()]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, *(str(one.get(name, MISSING)) for one in flat)) for name in names]
    different = tuple(row for row in rows if len(set(row[1:])) > 1)
    common = tuple(row[:2] for row in rows if len(set(row[1:])) == 1)
    return Table(("setting", *configs), different, words=True), Table(("setting", "value"), common, words=True)
