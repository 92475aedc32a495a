"""The file of `--json`: written whole or not at all, by one benchmark at a time, and not over another file."""

import fcntl
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from bert_jax.errors import UserError, require


class ReportFile:
    """Use it in a ``with``, which locks the file for other benchmarks."""

    def __init__(self, path: Path, continues: bool):
        """Does not create the file.

        Args:
          path: of the file.
          continues: whether the benchmark reads and continues a report that is there.

        Raises:
          UserError: there is no directory for the file, or something else is there.
        """
        self._shown, self._path = path, path.resolve()
        require(path.parent.is_dir(), f"--json {path}: there is no directory {path.parent}")
        exists = self._path.exists()
        require(not exists or self._path.is_file(), f"--json {path} is no regular file: choose another name")
        require(not exists or continues, f"--json {path} exists: choose another name, or delete it")
        self._part = self._path.with_name(f".{self._path.name}.part")
        self._lock_path = self._path.with_name(f".{self._path.name}.lock")

    def __enter__(self) -> "ReportFile":
        try:
            self._lock = self._lock_path.open("w", encoding="utf-8")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise UserError(f"--json {self._shown}: another benchmark writes it: choose another name") from None
        except OSError as error:
            raise self._failed(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def write(self, report: dict[str, Any]) -> None:
        """Replace the report.

        Raises:
          UserError: it cannot be written; the file is as before.
        """
        try:
            self._part.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
            self._part.replace(self._path)
        except OSError as error:
            self._part.unlink(missing_ok=True)
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UserError:
        return UserError(
            f"--json {self._shown} cannot be written ({error.strerror}): free some space, or choose another directory"
        )
