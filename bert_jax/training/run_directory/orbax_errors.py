"""The errors that Orbax logs: its threads write the same traceback several times before the error is raised."""

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FUTURES = "concurrent.futures"
LOGGERS = ("absl", FUTURES)
"""Loggers of Orbax, and of the pools of its threads."""
MAX_RECORDS = 100
"""Errors that are held; later ones are lost."""


class OrbaxErrorBuffer(logging.Filter):
    """Holds the errors that Orbax logs, until it is known whether one line describes them."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] = []
        for name in LOGGERS:
            logging.getLogger(name).addFilter(self)
        self._report = sys.unraisablehook
        sys.unraisablehook = self._report_unraisable

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written at once."""
        is_own = "orbax" in Path(record.pathname).parts or record.name == FUTURES
        if record.levelno < logging.ERROR or not is_own:
            return True
        self._held = [*self._held, record][:MAX_RECORDS]
        return False

    def _report_unraisable(self, error: Any) -> None:
        """Report an exception in a callback, but not those of writes that end after another one has failed: TensorStore
        wants to tell an event loop that is closed.
        """
        if error.exc_type is not RuntimeError or str(error.exc_value) != "Event loop is closed":
            self._report(error)

    def move_to_temporary_file(self) -> str:
        """Write the errors to a file in the directory for temporary files; returns its name, "" without one."""
        records, self._held = self._held, []
        if not records:
            return ""
        text = "\n".join(map(logging.Formatter("%(asctime)s %(message)s").format, records))
        try:
            descriptor, name = tempfile.mkstemp(prefix="bert_jax-save-", suffix=".log")
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError:  # this disk can be full, too
            return ""
        return name

    def close(self) -> None:
        """Log what is still held, as without this filter."""
        if sys.unraisablehook == self._report_unraisable:
            sys.unraisablehook = self._report
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self)
        records, self._held = self._held, []
        for record in records:
            logging.getLogger(record.name).handle(record)
