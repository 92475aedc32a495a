"""A function of the user as a filter: `keep(text: str, language: str) -> bool`."""

import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable

from bert_jax.errors import UserError
from data_prep.filters.rules import Verdict


class FilterFunctionError(UserError):
    """The function failed on a document; `--skip-damaged` skips the document."""


@dataclasses.dataclass(frozen=True)
class FilterFunction:
    """A function that says whether a document is kept; picklable, with its code if that is a file."""

    name: str
    """`module:function`, or `path.py:function`"""
    sha256: str
    """of the file of the module"""
    code: str | None = dataclasses.field(default=None, repr=False)
    """of the file, so that workers elsewhere need not have it; None: workers import the module"""

    @classmethod
    def load(cls, name: str) -> "FilterFunction":
        """The function of a name as on the command line.

        Raises:
          UserError: there is no such file, module or function, or it cannot be imported.
        """
        place, _, function = name.rpartition(":")
        if not place or not function.isidentifier():
            raise UserError(f"--filter-function {name}: write MODULE:FUNCTION or PATH.py:FUNCTION")
        try:
            content = _file(place).read_bytes()
            loaded = cls(name, hashlib.sha256(content).hexdigest(), content.decode() if place.endswith(".py") else None)
            loaded.function()
        except UserError as error:
            raise UserError(f"--filter-function {name}: {error}") from error
        except Exception as error:  # whatever the user's module raises
            raise UserError(f"--filter-function {name}: {_described(error)}") from error
        return loaded

    def function(self) -> Callable[[str, str], bool]:
        """The function itself.

        Raises:
          UserError: the module has no such function.
        """
        place, _, function = self.name.rpartition(":")
        found = getattr(_module(place, self.code), function, None)
        if not callable(found):
            raise UserError(f"{place} has no function {function}")
        return found

    def judge(self, text: str, language: str) -> Verdict:
        """The verdict on a text that is not empty.

        Raises:
          FilterFunctionError: the function raises an exception, or returns no bool.
        """
        function = self.function()
        try:
            kept = function(text, language)
        except Exception as error:
            raise FilterFunctionError(f"{self.name} raises {_described(error)}") from error
        if not isinstance(kept, bool):
            raise FilterFunctionError(f"{self.name} returns {type(kept).__name__}, not True (keep) or False")
        return Verdict(text, None if kept else "false")


def _file(place: str) -> pathlib.Path:
    if place.endswith(".py"):
        return pathlib.Path(place)
    found = importlib.util.find_spec(place)
    if found is None:
        raise UserError(f"there is no module {place} that can be imported")
    if not found.has_location:
        raise UserError(f"{place} is not a file of Python")
    return pathlib.Path(found.origin)


@functools.lru_cache(16)
def _module(place: str, code: str | None) -> types.ModuleType:
    if code is None:
        return importlib.import_module(place)
    module = types.ModuleType(f"bert_data_filter_{hashlib.sha256(code.encode()).hexdigest()}")
    module.__file__ = place
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(code, place, "exec"), module.__dict__)
    return module


def _described(error: Exception) -> str:
    """One line: the class of the exception and the first line of its message."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__
