"""Checks of the work directory: it is writable, shared, belongs to this run, and has space for its checkpoints."""

import contextlib
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etils import epath

from bert_jax.chips import GIB, Sizes
from bert_jax.directory_lock import holder
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.errors import UserError
from bert_jax.planning.workload import count_parameters
from bert_jax.storage import StoredPath, check_reachable, describe_error, is_remote
from bert_jax.training import continuation
from bert_jax.training.run_directory import workdir as workdir_lib
from bert_jax.training.run_directory.checkpoint import checkpoint_directory, committed_checkpoint_paths

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Parameter and two moments, float32."""
FREE_SPACE_MARGIN = 1.1
"""Less free space than this multiple of the largest need gives a warning."""
VISIBILITY_TIMEOUT_SECONDS = 5.0
"""Network file systems show a new file to other hosts with a delay."""
GIVE_WORKDIR = "give --workdir to check it"


class StorageProbe(NamedTuple):
    """A file that was written and read back in the work directory, or in its nearest existing parent."""

    file: str
    """Path of the file; empty if it could not be written."""
    error: str
    """Reason of the failure; empty on success."""


def nearest_existing(directory: StoredPath) -> StoredPath:
    """The directory or its nearest existing parent; a path in a bucket is returned as it is."""
    if is_remote(directory):
        return directory
    directory = Path(directory).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


@contextlib.contextmanager
def probe_file(workdir: StoredPath | None) -> Iterator[StorageProbe]:
    """Create a small file in the work directory or its nearest existing parent, and remove it on exit.

    No directory is created.
    """
    if workdir is None:
        yield StorageProbe("", "")
        return
    directory = nearest_existing(workdir)
    file = directory / f"{workdir_lib.PROBE_PREFIX}{uuid.uuid4().hex}"
    write_error = _write_and_read(directory, file)
    try:
        yield StorageProbe("" if write_error else str(file), write_error)
    finally:
        if not write_error:
            file.unlink()


def _write_and_read(directory: StoredPath, file: StoredPath) -> str:
    """Write a file and read it back; the reason of a failure, or an empty string."""
    try:
        check_reachable(directory)
        file.write_text(file.name)
        same = file.read_text() == file.name
    except UserError as error:
        return str(error)
    except Exception as error:
        if not isinstance(error, OSError) and describe_error(error) is None:
            raise
        return f"cannot write to {directory}: {getattr(error, 'strerror', None) or error}"
    return "" if same else f"{directory} does not return the content that was written"


def workdir(context: CheckContext) -> Iterator[Finding]:
    """Every process can write and read the directory, all see the same one, and it holds no other run."""
    if context.workdir is None:
        yield finding("workdir", f"not checked: {GIVE_WORKDIR}", {"holds_run": None})
        return
    bad = False
    for i, report in enumerate(context.reports):
        process, probe = f"process {i} ({report['host']})", report["storage_probe"]
        if probe["error"]:
            bad, remedy = True, "choose another --workdir, or change its permissions"
            yield finding("workdir", f"{process}: {probe['error']}", {"process": i}, remedy, "error")
        elif not _becomes_visible(probe["file"]):
            bad, remedy = True, "put it on a shared file system or in a bucket"
            text = f"{context.workdir} is not the same directory for process 0 and {process}"
            yield finding("workdir", text, {"process": i}, remedy, "error")
    if bad:
        return
    # The following raises a UserError if the directory belongs to another run.
    paths = list(context.paths)
    held = False
    if context.corpora and (
        before := workdir_lib.matching_config(context.workdir, context.config, context.shares, paths)
    ):
        held = True
        continuation.check_phase_changes(context.workdir, before, context.config)
    content = "holds this run, which will continue" if held else "does not exist or is empty"
    if not context.corpora:
        content = "not compared with a run in it, because the corpora cannot be opened"
    text = f"{context.workdir}: {content}; written and read back by {len(context.reports)} process(es)"
    remedy = ""
    if process := holder(context.workdir):
        text += f"; it is locked by {process}"
        remedy = "wait for its end, stop it, or choose another --workdir"
    yield finding("workdir", text, {"holds_run": held}, remedy)


def _becomes_visible(file: str) -> bool:
    end = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
    while not epath.Path(file).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def disk(context: CheckContext) -> Iterator[Finding]:
    """Space for `checkpoint.keep` checkpoints, one that is being written, and one that is kept as known good."""
    config = context.config
    size = (
        CHECKPOINT_BYTES_PER_PARAMETER * count_parameters(config.model, config.objective.pair != "none", Sizes()).total
    )
    values = {"checkpoint": size, "keep": config.checkpoint.keep, "free": None}
    text = f"a checkpoint takes {size / GIB:,.2f} GiB"
    if context.workdir is None or is_remote(context.workdir):
        why = GIVE_WORKDIR if context.workdir is None else "the space of a bucket cannot be checked"
        yield finding("disk", f"{text}; {why}", values)
        return
    saved = checkpoint_directory(context.workdir)
    present = sum(1 for _ in committed_checkpoint_paths(saved)) if context.workdir.is_dir() else 0
    free = shutil.disk_usage(nearest_existing(context.workdir)).free
    most, least = (max(1, config.checkpoint.keep + more - present) * size for more in (2, 1))
    text += (
        f"; keep {config.checkpoint.keep}, {present} present: {least / GIB:,.2f} to {most / GIB:,.2f} GiB more needed, "
        f"{free / GIB:,.2f} GiB are free"
    )
    values |= {"present": present, "free": free, "least": least, "most": most}
    remedy = "free space, choose another --workdir, or lower --checkpoint.keep"
    if free < least:
        yield finding("disk", text, values, remedy, "error")
    elif free < FREE_SPACE_MARGIN * most:
        yield finding("disk", f"{text}, which is little more", values, remedy)
    else:
        yield finding("disk", text, values)


CHECKS = {"workdir": workdir, "disk": disk}
"""Checks by the name of the finding that reports their error."""
