"""How annotations are checked at run time: an int may be numpy's, a float may be any real number (PEP 484)."""

from pathlib import Path

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

typecheck = beartype(
    conf=BeartypeConf(hint_overrides=FrozenDict({int: int | np.integer, float: float | int | np.integer | np.floating}))
)


def checked_modules(package: Path) -> list[str]:
    """Modules to check: not numba kernels, which could not be compiled inside a check; not the command line, whose
    dataclasses hold tyro.MISSING until they are parsed; not the sections of a config, which check themselves.
    """
    files = [file for file in sorted(package.rglob("*.py")) if file.stem != "__init__"]
    return [
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in files
        if file.parent.name != "cli"
        and not any(mark in file.read_text() for mark in ("@numba.", 'check(self, "', "validation import check"))
    ]
