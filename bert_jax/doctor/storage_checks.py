"""Checks of the work directory: it is writable, belongs to this run, and has space for its checkpoints."""

import shutil
import time
from collections.abc import Iterator

from etils import epath

from bert_jax.chips import GIB, Sizes
from bert_jax.directory_lock import holder
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.finding import Finding
from bert_jax.doctor.shared_storage_probe import nearest_existing
from bert_jax.planning.workload import count_parameters
from bert_jax.storage import is_remote
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


def workdir(context: CheckContext) -> Iterator[Finding]:
    """Every process can write and read the directory, all see the same one, and it holds no other run."""
    if context.workdir is None:
        yield Finding("ok", "workdir", f"not checked: {GIVE_WORKDIR}", {"holds_run": None})
        return
    bad = False
    for i, report in enumerate(context.reports):
        process, probe = f"process {i} ({report['host']})", report["storage_probe"]
        if probe["error"]:
            bad = True
            remedy = "choose another --workdir, or change its permissions"
            yield Finding("error", "workdir", f"{process}: {probe['error']}: {remedy}", {"process": i})
        elif not _becomes_visible(probe["file"]):
            bad = True
            remedy = "put it on a shared file system or in a bucket"
            text = f"{context.workdir} is not the same directory for process 0 and {process}: {remedy}"
            yield Finding("error", "workdir", text, {"process": i})
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
    level = "ok"
    if process := holder(context.workdir):
        level = "warning"
        text += f"; it is locked by {process}: wait for its end, stop it, or choose another --workdir"
    yield Finding(level, "workdir", text, {"holds_run": held})


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
        yield Finding("ok", "disk", f"{text}; {why}", values)
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
        yield Finding("error", "disk", f"{text}: {remedy}", values)
    elif free < FREE_SPACE_MARGIN * most:
        yield Finding("warning", "disk", f"{text}, which is little more: {remedy}", values)
    else:
        yield Finding("ok", "disk", text, values)


CHECKS = {"workdir": workdir, "disk": disk}
"""Checks by the name of the finding that reports their error."""
