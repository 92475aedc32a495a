"""How annotations are checked at run time: an int may be numpy's, a float may be any real number (PEP 484)."""

import types
from pathlib import Path

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

_check = beartype(
    conf=BeartypeConf(hint_overrides=FrozenDict({int: int | np.integer, float: float | int | np.integer | np.floating}))
)
_checked: dict[tuple, types.FunctionType] = {}


def typecheck(function: types.FunctionType) -> types.FunctionType:
    """A function that checks its arguments; jaxtyping calls it with the signature of each function that is defined.

    Functions in others are defined at every call, and beartype takes milliseconds: equal signatures are checked alike.
    """
    code = function.__code__
    names = code.co_varnames, code.co_flags, code.co_posonlyargcount, code.co_kwonlyargcount
    defaults = len(function.__defaults__ or ()), *(function.__kwdefaults__ or ())
    key = function.__module__, function.__qualname__, names, defaults, *function.__annotations__.items()
    try:
        known = _checked.get(key)
    except TypeError:  # annotations that have no hash
        return _check(function)
    if known is None:
        known = _checked[key] = _check(function)
    return known


def checked_modules(package: Path) -> list[str]:
    """Modules to check: not numba kernels, which could not be compiled inside a check; not the command line, whose
    dataclasses hold tyro.MISSING until they are parsed; not the sections of a config, which check themselves.
    """
    files = [file for file in sorted(package.rglob("*.py")) if file.stem != "__init__"]
    return [
        ".".join(file.relative_to(package.parent).with_suffix("").parts)
        for file in files
        if file.parent.name != "cli"
        and not any(mark in file.read_text() for mark in ("@cached_njit", 'check(self, "', "validation import check"))
    ]
