"""Reports of config, code and versions of each process, and their comparison."""

import os
import socket
from collections.abc import Mapping
from typing import Any

from bert_jax.config import flatten
from bert_jax.provenance import code, package_versions

Report = dict[str, Any]
COMPARED_SECTIONS = ("config", "code", "versions", "environment", "corpora")
"""Sections of a report that must be equal in all processes. `bert-jax doctor` adds the corpora."""


def make_report(options: Mapping[str, Any]) -> Report:
    """Return plain values.

    Args:
      options: nested dictionaries of all that decides the results of the command.
    """
    return {
        "host": socket.gethostname(),
        "config": {name: str(value) for name, value in flatten(options).items()},
        "code": code_report(),
        "environment": {name: value for name, value in os.environ.items() if _is_compared(name)},
        "versions": package_versions(),
    }


def _is_compared(variable: str) -> bool:
    """Whether an environment variable must have the same value in all processes."""
    per_process = ("PROCESS", "LOCAL", "COORDINATOR", "CACHE")
    return variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") or (
        variable.startswith("JAX_") and not any(word in variable for word in per_process)
    )


def code_report() -> dict[str, str]:
    """A hash of the names and contents of all source files of this package; processes may differ in the commit."""
    return {"SHA-256 of bert_jax": code()["sha256"]}


def report_differences(reports: list[Report]) -> list[str]:
    """Compare all reports with process 0's: one text for each process and section that differs."""
    texts, first = [], reports[0]
    for i, report in enumerate(reports):
        for section in COMPARED_SECTIONS:
            expected, actual = first.get(section, {}), report.get(section, {})
            changed = sorted(key for key in expected | actual if expected.get(key) != actual.get(key))
            if changed:
                shown = "; ".join(f"{key} is {actual.get(key)} instead of {expected.get(key)}" for key in changed[:3])
                texts.append(
                    f"process {i} ({report['host']}) differs from process 0 ({first['host']}) in its {section}: "
                    f"{shown}. All processes of a run need the same command, code, versions and corpora"
                )
    return texts
