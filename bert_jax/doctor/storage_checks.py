"""Checks of the work directory: it is writable, shared, belongs to this run, and has space for its checkpoints; and of
the directory of local copies."""

import contextlib
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from bert_jax.chips import GIB, Sizes
from bert_jax.config import Config
from bert_jax.convert.init_from import check_source
from bert_jax.data.mixture import common_tokenizer
from bert_jax.distributed.shared_directory import becomes_visible
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.errors import UserError
from bert_jax.planning.workload import count_parameters
from bert_jax.storage.failures import describe_error
from bert_jax.storage.lock import holder
from bert_jax.storage.paths import StoredPath, check_reachable, is_remote
from bert_jax.training import continuation
from bert_jax.training.fork import open_fork
from bert_jax.training.pretraining_task import model_spec
from bert_jax.training.run_directory import workdir as workdir_lib
from bert_jax.training.run_directory.checkpoint import (
    check_checkpoint_storage,
    checkpoint_directory,
    committed_checkpoint_paths,
)
from bert_jax.training.run_directory.lost_checkpoints import check_no_lost_checkpoints
from bert_jax.training.sharding import abstract_mesh

FREE_SPACE_MARGIN = 1.1
"""Less free space than this multiple of the largest need gives a warning."""
GIVE_WORKDIR = "give --workdir to check it"


def _nearest_existing(directory: StoredPath) -> StoredPath:
    """The directory or its nearest existing parent; a path in a bucket is returned as it is."""
    if is_remote(directory):
        return directory
    directory = Path(directory).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


@contextlib.contextmanager
def probe_file(workdir: StoredPath | None) -> Iterator[dict[str, str]]:
    """Create a small file in the work directory or its nearest existing parent, and remove it on exit.

    No directory is created.

    Yields:
      `file`, the name of the file, or `error`, why it could not be written and read back; the other one is empty.
    """
    if workdir is None:
        yield {"file": "", "error": ""}
        return
    directory = _nearest_existing(workdir)
    file = directory / f"{workdir_lib.PROBE_PREFIX}{uuid.uuid4().hex}"
    error = _write_and_read(directory, file)
    try:
        yield {"file": "" if error else file.name, "error": error}
    finally:
        if not error:
            file.unlink()


def probe_local_directory(directory: str | None) -> dict[str, Any]:
    """`error`, why `checkpoint.local_directory` of this process cannot be written, or an empty string; `free`, the
    bytes on its disk."""
    if directory is None:
        return {"error": "", "free": 0}
    with probe_file(Path(directory)) as probe:
        free = 0 if probe["error"] else shutil.disk_usage(_nearest_existing(Path(directory))).free
    return {"error": probe["error"], "free": free}


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
    check_checkpoint_storage(context.workdir, context.machine.hosts)
    errors = list(_probe_errors(context))
    yield from errors
    if errors:
        return
    if not context.corpora:
        text = "not compared with a run in it, because the corpora cannot be opened"
        yield finding("workdir", f"{context.workdir}: {text}", {"holds_run": None})
        return
    # The same refusals as in `pretrain`.
    before = workdir_lib.matching_config(context.workdir, context.config, context.shares, list(context.paths))
    if before is not None:
        check_no_lost_checkpoints(context.workdir)
        continuation.check_phase_changes(context.workdir, before, context.config)
    content = "does not exist or is empty" if before is None else "holds this run, which will continue"
    text = f"{context.workdir}: {content}; written and read back by {len(context.reports)} process(es)"
    remedy = ""
    if process := holder(context.workdir):
        text += f"; it is locked by {process}"
        remedy = "wait for its end, stop it, or choose another --workdir"
    yield finding("workdir", text, {"holds_run": before is not None}, remedy)


def _probe_errors(context: CheckContext) -> Iterator[Finding]:
    """An error for each process that cannot write the directory, or whose file this process does not see."""
    for i, report in enumerate(context.reports):
        process, probe = f"process {i} ({report['host']})", report["storage_probe"]
        if probe["error"]:
            text, remedy = f"{process}: {probe['error']}", "choose another --workdir, or change its permissions"
        elif not becomes_visible(epath.Path(_nearest_existing(context.workdir)) / probe["file"]):
            text = f"{context.workdir} is not the same directory for process 0 and {process}"
            remedy = "put it on a shared file system or in a bucket"
        else:
            continue
        yield finding("workdir", text, {"process": i}, remedy, "error")


def start(context: CheckContext) -> Iterator[Finding]:
    """The run can start from `start.source`, if it has no checkpoint yet."""
    config, source = context.config, context.config.start.source
    values = {"source": source}
    if source is None:
        yield finding("start", "parameters are initialized at random", values)
        return
    if not context.corpora:
        yield finding("start", f"{source}: not checked, because the corpora cannot be opened", values)
        return
    if context.workdir is not None and any(committed_checkpoint_paths(checkpoint_directory(context.workdir))):
        yield finding("start", f"{source}: not needed, {context.workdir} has a checkpoint", values)
        return
    if open_fork(config, context.corpora) is None:
        check_source(config, common_tokenizer(context.corpora, config.model.vocab_size))
    yield finding("start", f"the run starts from {source}", values)


def _checkpoint_bytes(config: Config) -> int:
    """Size of a checkpoint: parameters, two moments and an average, float32."""
    arrays = 3 + (config.optimizer.ema_decay is not None)
    return 4 * arrays * count_parameters(model_spec(config, -1), Sizes()).total


def disk(context: CheckContext) -> Iterator[Finding]:
    """Space for the checkpoints that are kept, one that is being written, and one that is kept as known good."""
    config = context.config
    size = _checkpoint_bytes(config)
    keep = config.checkpoint.keep
    if config.checkpoint.keep_every:
        keep += config.total_steps // config.checkpoint.keep_every
    keep += config.checkpoint.keep_best is not None
    values = {"checkpoint": size, "keep": keep, "free": None}
    text = f"a checkpoint takes {size / GIB:,.2f} GiB"
    if context.workdir is None or is_remote(context.workdir):
        why = GIVE_WORKDIR if context.workdir is None else "the space of a bucket cannot be checked"
        yield finding("disk", f"{text}; {why}", values)
        return
    saved = checkpoint_directory(context.workdir)
    present = sum(1 for _ in committed_checkpoint_paths(saved)) if context.workdir.is_dir() else 0
    free = shutil.disk_usage(_nearest_existing(context.workdir)).free
    most, least = (max(1, keep + more - present) * size for more in (2, 1))
    text += (
        f"; keep {keep}, {present} present: {least / GIB:,.2f} to {most / GIB:,.2f} GiB more needed, "
        f"{free / GIB:,.2f} GiB are free"
    )
    values |= {"present": present, "free": free, "least": least, "most": most}
    remedy, level = "free space, choose another --workdir, or keep fewer checkpoints", "warning"
    if free < least:
        level = "error"
    elif free >= FREE_SPACE_MARGIN * most:
        remedy = ""
    yield finding("disk", text, values, remedy, level)


def local_copies(context: CheckContext) -> Iterator[Finding]:
    """Every process can write `checkpoint.local_directory`, and has space there for two copies."""
    config, machine = context.config, context.machine
    if config.checkpoint.local_directory is None:
        yield finding("local-copies", "none, because there is no checkpoint.local_directory", {"size": None})
        return
    shape = abstract_mesh(config.mesh, machine.devices, machine.slices).shape
    parts = shape["fsdp"] * shape["tensor"]
    size = int(2 * _checkpoint_bytes(config) * min(1.0, machine.devices / machine.hosts / parts))
    if parts == machine.devices and machine.hosts > 1:
        size *= 2  # and copies of another host, because no other one has its parts
    failed, values = False, {"size": size}
    of_host = Counter(report["host"] for report in context.reports)  # its processes share the space
    for i, report in enumerate(context.reports):
        error, free = report["local_probe"]["error"], report["local_probe"]["free"]
        needed = size * of_host[report["host"]]
        if error or free < needed:
            failed = True
            text = error or f"{needed / GIB:,.2f} GiB needed, {free / GIB:,.2f} GiB are free"
            remedy = "choose another --checkpoint.local-directory, or free space there"
            yield finding("local-copies", f"process {i} ({report['host']}): {text}", values, remedy, "error")
    if not failed:
        text = f"{size / GIB:,.2f} GiB for copies, which {config.checkpoint.local_directory} of each process has"
        yield finding("local-copies", text, values)


CHECKS = {"workdir": workdir, "start": start, "disk": disk, "local-copies": local_copies}
"""Checks by the name of the finding that reports their error."""
