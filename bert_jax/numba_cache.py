"""Machine code of numba functions on disk, compiled again if anything that it contains has changed."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def cached_njit(function: Callable) -> Any:
    """`numba.njit(cache=True, nogil=True)`, with a cache that depends on the imports of the function's module.

    numba compiles again after a change of the file that contains the function, but the machine code also contains the
    functions that it calls in other files and the numbers that those define. A hash of them is added to the
    function's qualified name, from which numba makes the names of its files.

    Args:
      function: a function at the top of a module. What it calls in other modules has this decorator, too, and is
        imported by its own name, not as an attribute of its module.
    """
    own = function.__qualname__
    function.__qualname__ = f"{own}-{_imports(function)}"
    compiled = numba.njit(cache=True, nogil=True)(function)
    function.__qualname__ = own
    return compiled


def _imports(function: Callable) -> str:
    """Hash of the compiled functions that its module imports, of what they import, and of the module's numbers."""
    state = hashlib.sha256()
    for name, value in sorted(function.__globals__.items(), key=lambda item: item[0]):
        if isinstance(value, int | float | np.generic):
            state.update(f"{name}={value!r}".encode())
        elif isinstance(value, np.ndarray):
            state.update(f"{name}={value.dtype}{value.tolist()}".encode())
        elif getattr(value, "__module__", function.__module__) != function.__module__ and hasattr(value, "py_func"):
            called = value.py_func
            source = inspect.getsource(inspect.getmodule(called))
            state.update(f"{name}={called.__module__}:{source}:{_imports(called)}".encode())
    return state.hexdigest()[:16]
