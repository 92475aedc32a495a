"""Copies of the state on the disk, or in the memory, of each host, every few steps: a lost process costs seconds.

Each process copies the arrays of its devices to a buffer, while the step waits, and writes it to
`checkpoint.local_directory` in the background. If no other host has these arrays, it also sends the copy to a process
of the next host (distributed/peer_files.py), so that the copies of a lost host are still there. A step has a complete
copy when every process has written its copy; only then older ones are deleted.

``LOCAL_DIRECTORY/RUN/process_I/STEP-LAYOUT`` is a file of process_state.py. LAYOUT is a hash of which parts of which
arrays it has, and their bytes: processes that are on other hosts after a restart find their parts wherever they are,
and on another mesh they find none, and the run continues from its newest checkpoint.
"""

import concurrent.futures
import contextlib
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax import config as config_lib
from bert_jax.config import Config
from bert_jax.distributed.agreement import all_gather, barrier, compute_and_broadcast, is_first, raise_on_all
from bert_jax.distributed.peer_files import PeerFiles
from bert_jax.distributed.supervised import announce_checkpoint
from bert_jax.errors import UserError
from bert_jax.storage.files import write_atomic
from bert_jax.storage.paths import StoredPath
from bert_jax.training.run_directory.checkpoint import FORMAT_VERSION
from bert_jax.training.run_directory.process_state import (
    Layout,
    copy_to_buffer,
    file_parts,
    layout_of,
    read_file,
    restore_state,
)

RUN_ID = "run_id"
"""File of a work directory: names the folder of its local copies. A run that begins again gets another one."""
NAME = re.compile(r"([0-9]{8,10})-([0-9a-f]{32}-([0-9]{1,15}))")
"""Step, layout, and the size of the layout in bytes."""


class LocalCopies:
    """The local copies of one run. All processes make the same calls; a context manager."""

    def __init__(self, directory: str, every: int, workdir: StoredPath, fingerprint: str):
        """Finds the copies that are there.

        Args:
          directory: `checkpoint.local_directory`.
          every: steps between copies.
          workdir: of the run.
          fingerprint: of the config; copies of another one are not used.

        Raises:
          UserError: the directory is not writable.
        """
        self.every, self._fingerprint = every, fingerprint
        self._run = Path(directory).absolute() / compute_and_broadcast("the id of the run", lambda: _run_id(workdir))
        self._own = self._run / f"process_{jax.process_index()}"
        raise_on_all(self._make_directory)
        # Processes of one host share its disk; in a container of its own, a process may not.
        disk = f"{socket.gethostname()} {_boot_id()} {self._own.stat().st_dev}"
        self._disks: list[str] = all_gather("disks", disk)
        self._peers = PeerFiles(self._own, NAME) if jax.process_count() > 1 else None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="local copy")
        self._written: concurrent.futures.Future | None = None
        self._layout, self._receiver, self._buffer = Layout("", [], 0), None, np.empty(0, np.uint8)
        self._warned = False

    def _make_directory(self) -> None:
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            for partial in self._own.glob("*.partial"):
                partial.unlink()
        except OSError as error:
            raise UserError(
                f"checkpoint.local_directory {self._run.parent} cannot be written ({error.strerror}): give a directory "
                "on a disk of each host, or in its memory, e.g. /dev/shm/copies"
            ) from error

    def is_due(self, step: int) -> bool:
        """Whether to save after a step."""
        return step % self.every == 0

    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Copy the state to memory, and start to write it. Waits for the copy before.

        Args:
          step: number of steps done.
          state: tree of arrays.
          metadata: JSON values to save with it.
        """
        self.wait()
        layout = layout_of(state)
        if layout.key != self._layout.key:  # the first copy, or the first one of a phase
            self._layout, self._buffer = layout, np.empty(layout.size, np.uint8)
            self._receiver = _receiver(self._disks, all_gather("layouts", layout.key), jax.process_index())
        copy_to_buffer(state, layout, self._buffer)
        self._written = self._writer.submit(self._write, step, {**metadata, "fingerprint": self._fingerprint})

    def _write(self, step: int, metadata: dict[str, Any]) -> None:
        """Write and send a copy, and delete older ones when all processes have done so."""
        parts = file_parts(metadata, self._buffer)
        name, problem = f"{step:08d}-{self._layout.key}", ""
        try:
            self._own.mkdir(parents=True, exist_ok=True)  # who cleans /dev/shm may have deleted it
            partial = self._own / f"{name}.partial"
            with partial.open("wb") as file:
                for part in parts:
                    file.write(part)
            partial.replace(self._own / name)
            if self._peers is not None and self._receiver is not None:
                self._peers.send(self._receiver, name, parts)
        except OSError as error:
            problem = str(error)
        problems = all_gather("a local copy", problem)
        if not any(problems):
            announce_checkpoint()
            # Later ones are of a process that is faster, or of the same run before a restart.
            self._delete(lambda one: one < step)
            return
        self._delete(lambda one: one == step)  # nobody has use of it without the others; the step before it stays
        if is_first() and not self._warned:
            self._warned = True
            process = next(process for process, text in enumerate(problems) if text)
            print(
                f"warning: no local copy of step {step}: {problems[process]} (process {process}). The run goes on with "
                "its checkpoints, and tries again",
                file=sys.stderr,
            )

    def _delete(self, is_discarded: Callable[[int], bool]) -> None:
        """Delete the copies of some steps, and what was written of them."""
        with contextlib.suppress(OSError):  # a full disk is reported with the next copy
            for file in self._own.iterdir():
                if (match := NAME.fullmatch(file.name.removesuffix(".partial"))) and is_discarded(int(match[1])):
                    file.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until the last copy is written by all processes."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def clear(self) -> None:
        """Delete all copies of the run: it has ended, or saved a checkpoint."""
        self.wait()
        barrier("local copies are deleted")
        shutil.rmtree(self._own, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: of other processes of this host
            self._run.rmdir()

    def __enter__(self) -> "LocalCopies":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        """Stop; after an error of one process, the copy that is being written is not waited for."""
        self._writer.shutdown(wait=kind is None, cancel_futures=True)
        if self._peers is not None:
            self._peers.close()

    def newest_step(self) -> int:
        """The newest step of which there is a copy of any process; 0: of none."""
        return max(self._steps(), default=0)

    def _steps(self) -> set[int]:
        found = {int(NAME.fullmatch(file.name)[1]) for file in self._files()}
        return {step for steps in all_gather("local copies", sorted(found)) for step in steps}

    def _files(self) -> list[Path]:
        """All copies on this disk, also of processes that are not on this host any more."""
        return sorted(file for file in self._run.glob("process_*/*") if NAME.fullmatch(file.name) and file.is_file())

    def restore_newest(
        self, after: int, abstract: Callable[[dict[str, Any]], Any], is_valid: Callable[[dict[str, Any]], bool]
    ) -> tuple[Any, dict[str, Any]] | None:
        """The state and metadata of the newest step of which all parts are there, intact; None if there is none.

        Args:
          after: step of the newest checkpoint; only later ones count.
          abstract: from metadata to a tree of ShapeDtypeStruct with shardings.
          is_valid: whether the run may continue from a copy with this metadata.
        """
        self.wait()
        for step in sorted((step for step in self._steps() if step > after), reverse=True):
            files = [file for file in self._files() if int(file.name.partition("-")[0]) == step]
            sharing = [process for process, disk in enumerate(self._disks) if disk == self._disks[jax.process_index()]]
            mine = files[sharing.index(jax.process_index()) :: len(sharing)]  # each verifies some of its disk
            intact = {file.name: content[0] for file in mine if (content := _read_intact(file)) is not None}
            gathered = all_gather("copies of a step", [sorted(intact), next(iter(intact.values()), None)])
            metadata = next((metadata for _, metadata in gathered if metadata is not None), None)
            if metadata is None or metadata.get("fingerprint") != self._fingerprint or not is_valid(metadata):
                continue
            shapes = abstract(metadata)
            layout = layout_of(shapes)
            needed = all_gather("layouts", f"{step:08d}-{layout.key}")
            holders = {name: process for process, (names, _) in reversed([*enumerate(gathered)]) for name in names}
            if not holders.keys() >= set(needed):
                continue
            if problem := self._fetch(needed, [names for names, _ in gathered], holders):
                if is_first():
                    print(f"warning: the local copy of step {step} is not used: {problem}", file=sys.stderr)
                continue
            _, arrays = self._find(needed[jax.process_index()])
            return restore_state(arrays, shapes, layout), metadata
        return None

    def _find(self, name: str) -> tuple[Path, memoryview]:
        """An intact copy with this name on this disk, and its arrays."""
        found = ((file, _read_intact(file)) for file in self._files() if file.name == name)
        return next((file, content[1]) for file, content in found if content is not None)

    def _fetch(self, needed: Sequence[str], held: Sequence[Sequence[str]], holders: dict[str, int]) -> str:
        """Send the copies that other disks lack; returns when every process has its copy, or why one has not.

        Args:
          needed: name of the copy of each process.
          held: names that each process has found on its disk.
          holders: a process that has it, by name.
        """
        problem = ""
        for process, name in enumerate(needed):
            on_disk = {
                one
                for disk, names in zip(self._disks, held, strict=True)
                if disk == self._disks[process]
                for one in names
            }
            if name not in on_disk and holders[name] == jax.process_index():
                assert self._peers is not None
                try:
                    self._peers.send(process, name, [self._find(name)[0].read_bytes()])
                except OSError as error:
                    problem = f"process {jax.process_index()} cannot send that of process {process} ({error})"
        return next(filter(None, all_gather("copies that were sent", problem)), "")


@contextlib.contextmanager
def open_local_copies(config: Config, workdir: StoredPath) -> Iterator[LocalCopies | None]:
    """The local copies of a run, None if it has none; without an error they are deleted at the end, when the run has
    saved a checkpoint."""
    settings = config.checkpoint
    if settings.local_directory is None:
        yield None
        return
    fingerprint = f"{FORMAT_VERSION} {config_lib.fingerprint(config)}"  # the state and metadata of a checkpoint
    with LocalCopies(settings.local_directory, settings.local_every, workdir, fingerprint) as copies:
        yield copies
        copies.clear()


def _run_id(workdir: StoredPath) -> str:
    """The id of the run in a work directory, which is made with its first local copy."""
    path = workdir / RUN_ID
    text = path.read_text(errors="replace") if path.exists() else ""
    if re.fullmatch("[0-9a-f]{32}", text) is None:
        text = uuid.uuid4().hex
        write_atomic(path, text.encode())
    return text


def _boot_id() -> str:
    """What tells two machines with one name apart; "" where the kernel does not say it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _receiver(disks: Sequence[str], layouts: Sequence[str], process: int) -> int | None:
    """The process of another host that also gets a process's copy; None if another host has these arrays, or a process
    before it on its host sends them.

    It is that of the next host with the same number among its processes.

    Args:
      disks: of each process.
      layouts: of each process.
      process: index of this one.
    """
    order = list(dict.fromkeys(disks))
    same = [disk for disk, layout in zip(disks, layouts, strict=True) if layout == layouts[process]]
    if len(order) == 1 or len(set(same)) > 1 or layouts.index(layouts[process]) != process:
        return None
    following = order[(order.index(disks[process]) + 1) % len(order)]
    others = [other for other, disk in enumerate(disks) if disk == following]
    return others[disks[:process].count(disks[process]) % len(others)]


def _read_intact(file: Path) -> tuple[dict[str, Any], memoryview] | None:
    """The metadata and arrays of a copy; None if it is damaged, with a warning on stderr."""
    with contextlib.suppress(OSError, MemoryError):  # a damaged file system can give a file any size
        content = read_file(file)
        if content is not None and content[1].nbytes == int(NAME.fullmatch(file.name)[3]):
            return content
    print(f"warning: local copy {file} is damaged; trying another one", file=sys.stderr)
    return None
