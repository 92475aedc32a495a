"""Whether the run's directory can be written, is this run's, and has room for its checkpoints."""

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
from bert_jax.training.run_directory.checkpoint import committed, directory_of

CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Per parameter: itself and two moments, float32."""
FREE_SPACE_MARGIN = 1.1
"""Free space below so many times of what is needed at most is near it."""
VISIBILITY_TIMEOUT_SECONDS = 5.0
"""Network file systems show a new file to other hosts late."""
GIVE_WORKDIR = "give --workdir to have it looked at"


def workdir(context: CheckContext) -> Iterator[Finding]:
    """Written and read back by every process, the same one for all, and no other run's."""
    if context.workdir is None:
        yield Finding("ok", "workdir", f"not looked at: {GIVE_WORKDIR}", {"holds_run": None})
        return
    bad = False
    for i, report in enumerate(context.reports):
        who, mark = f"process {i} ({report['host']})", report["storage_probe"]
        if mark["error"]:
            bad = True
            remedy = "choose another --workdir, or change its permissions"
            yield Finding("error", "workdir", f"{who}: {mark['trouble']}: {remedy}", {"process": i})
        elif not _visible(mark["file"]):
            bad = True
            remedy = "put it on a shared file system or in a bucket"
            text = f"{context.workdir} is not the same directory for process 0 and {who}: {remedy}"
            yield Finding("error", "workdir", text, {"process": i})
    if bad:
        return
    # Raises if it is another run's.
    paths = list(context.paths)
    held = False
    if context.corpora and (before := workdir_lib.held_config(context.workdir, context.config, context.shares, paths)):
        held = True
        continuation.check(context.workdir, before, context.config)
    what = "holds this run, which goes on" if held else "will be made, or is empty"
    if not context.corpora:
        what = "not compared with the run that it may hold: the corpora come first"
    seen = f"written and read back by {len(context.reports)} process(es)"
    level, found = "ok", f"{context.workdir}: {what}; {seen}"
    if process := holder(context.workdir):
        level = "warning"
        found += f"; it is locked by {process}: wait for its end, stop it, or choose another --workdir"
    yield Finding(level, "workdir", found, {"holds_run": held})


def _visible(file: str) -> bool:
    end = time.monotonic() + VISIBILITY_TIMEOUT_SECONDS
    while not epath.Path(file).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def disk(context: CheckContext) -> Iterator[Finding]:
    """Room for checkpoints: `checkpoint.keep` of them, one that is being written, and one that is kept as good."""
    config = context.config
    size = (
        CHECKPOINT_BYTES_PER_PARAMETER * count_parameters(config.model, config.objective.pair != "none", Sizes()).total
    )
    values = {"checkpoint": size, "keep": config.checkpoint.keep, "free": None}
    text = f"a checkpoint takes {size / GIB:,.2f} GiB"
    if context.workdir is None or is_remote(context.workdir):
        why = GIVE_WORKDIR if context.workdir is None else "the room in a bucket cannot be checked"
        yield Finding("ok", "disk", f"{text}; {why}", values)
        return
    saved = directory_of(context.workdir)
    there = sum(1 for _ in committed(saved)) if context.workdir.is_dir() else 0
    free = shutil.disk_usage(nearest_existing(context.workdir)).free
    most, least = (max(1, config.checkpoint.keep + more - there) * size for more in (2, 1))
    text += (
        f"; keep {config.checkpoint.keep}, {there} there: {least / GIB:,.2f} to {most / GIB:,.2f} GiB more are needed, "
        f"{free / GIB:,.2f} GiB are free"
    )
    values |= {"there": there, "free": free, "least": least, "most": most}
    remedy = "free some, choose another --workdir, or lower --checkpoint.keep"
    if free < least:
        yield Finding("error", "disk", f"{text}: {remedy}", values)
    elif free < FREE_SPACE_MARGIN * most:
        yield Finding("warning", "disk", f"{text}, which is near: {remedy}", values)
    else:
        yield Finding("ok", "disk", text, values)


CHECKS = {"workdir": workdir, "disk": disk}
"""By the name that an error of theirs gets."""
