"""`bert-jax doctor`: one check after the other, each said in lines; one process, or several that meet for it.

`pretrain` prints the shorter half of it before its first update (`summary`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.config import Config
from bert_jax.data.mixture import MixtureOrder
from bert_jax.data.mixture_spec import CorpusWeight, open_corpora, resolve_shares
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.process_report import make_report
from bert_jax.distributed.rendezvous import Report, accept_workers, join
from bert_jax.doctor import (
    data_checks,
    machine,
    machine_checks,
    process_checks,
    schedule_checks,
    shared_storage_probe,
    storage_checks,
    token_checks,
)
from bert_jax.doctor.check_context import Asked, Machine
from bert_jax.doctor.finding import Line
from bert_jax.errors import PeerError, UserError
from bert_jax.storage import StoredPath
from bert_jax.training.micro_batch import MicroBatchRequest

Check = Callable[[Asked], Iterator[Line]]
OF_CORPORA: dict[str, Check] = data_checks.CHECKS | token_checks.CHECKS
"""Checks that need open corpora."""
OF_RUN: dict[str, Check] = (
    schedule_checks.CHECKS | machine_checks.CHECKS | storage_checks.CHECKS | process_checks.CHECKS
)
CHECKS = OF_CORPORA | OF_RUN


class Wishes(NamedTuple):
    """What the command says beside the config and the corpora."""

    workdir: StoredPath | None = None
    micro_batch: MicroBatchRequest = None
    hosts: int | None = None
    """That are planned; None: as many as there are processes."""
    devices: int | None = None
    """That are planned for all hosts; None: as are seen."""
    topology: str | None = None
    """Where it will run; None: here, or on `devices`."""


def examine_together(
    config: Config,
    parts: Sequence[CorpusWeight],
    wishes: Wishes,
    info: ProcessInfo | None,
    seconds: float,
    tell: Callable[[Iterator[Line]], int],
) -> int:
    """Look at this process, and in process 0 at all of them and at the run.

    Args:
      config, parts: of the run.
      wishes: what else is known of it.
      info: of this process; None if it is alone.
      seconds: to wait for the others.
      tell: says lines, and returns the exit code; called in process 0 only.

    Returns:
      the exit code, the same in all processes.

    Raises:
      UserError: wishes that contradict each other; process 0 does not answer.
    """
    with shared_storage_probe.marked(wishes.workdir) as mark:
        report = _report(config, parts, wishes, info, mark)
        if info is None:
            alone = [report | {"ahead": 0.0}]
            return tell(examine(config, parts, wishes, _machine(wishes, alone), alone))
        if info.process_index:
            try:
                rendezvous, code = join(info, report, seconds)
            except PeerError as error:
                raise UserError(str(error)) from error
            rendezvous.close()
            return code
        try:
            rendezvous, reports = accept_workers(info, report, seconds)
        except PeerError as error:
            text = f"{error}: start this in all of them, or give a longer --cluster.timeout"
            return tell(iter([Line("error", "processes", text, {"hosts": [report["host"]]})]))
        try:
            code = tell(examine(config, parts, wishes, _machine(wishes, reports), reports))
            rendezvous.send(result=code)
        finally:
            rendezvous.close()
        return code


def _report(
    config: Config, parts: Sequence[CorpusWeight], wishes: Wishes, info: ProcessInfo | None, mark: shared_storage_probe.Mark
) -> Report:
    paths = [str(part.directory) for part in parts]
    weighed = [f"{part.directory}={part.weight}" for part in parts]
    planned = wishes.topology is not None or wishes.devices is not None
    # Processes that share a GPU, and whoever else is on it, are not to be kept from its memory by a look.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    devices: dict[str, Any] | None = None if planned else machine.seen(info)
    return make_report(config, corpus=weighed, **wishes._asdict()) | {
        "corpora": shared_storage_probe.corpora(paths),
        "mark": mark._asdict(),
        "devices": devices,
    }


def _machine(wishes: Wishes, reports: Sequence[Report]) -> Machine:
    return machine.find(wishes.topology, wishes.hosts, wishes.devices, [report["devices"] for report in reports])


def examine(
    config: Config, parts: Sequence[CorpusWeight], wishes: Wishes, devices: Machine, reports: Sequence[Report]
) -> Iterator[Line]:
    """What a config makes of a mixture on some devices, a line as soon as it is known.

    What `bert-jax pretrain` would refuse is a line of level "error"; the other checks go on, unless there is
    nothing that they could look at.
    """
    checks = CHECKS
    corpora, turns = [], None
    try:
        ordered, corpora = open_corpora(parts)
        turns = MixtureOrder(
            resolve_shares(ordered, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent)
        )
    except UserError as error:
        yield Line("error", "corpora", str(error), {})
        checks, corpora = OF_RUN, []
    paths = tuple(str(part.directory) for part in parts)
    asked = Asked(config, corpora, turns, devices, paths, wishes.workdir, wishes.micro_batch, tuple(reports))
    yield from carry_out(checks, asked)


SHOWN = ("model", "mesh", "memory", "time", "mixture", "vocabulary", "rows", "epochs")
"""What `pretrain` prints of the lines that are ok; it prints all warnings."""
OF_SUMMARY = {
    name: check
    for name, check in (machine_checks.CHECKS | data_checks.CHECKS | schedule_checks.CHECKS).items()
    if name != "files"  # `pretrain` has just compared checksums
}
SUMMARY_WINDOWS = 10
"""Of each corpus that are planned for a summary: less than a second."""


def summary(config: Config, parts: Sequence[CorpusWeight], micro_batch: MicroBatchRequest) -> Iterator[str]:
    """What a run is about to do, in about ten lines, and the warnings of `bert-jax doctor`.

    Args:
      config, parts: of a run that nothing has refused.
      micro_batch: as `bert-jax pretrain` takes it.
    """
    parts, corpora = open_corpora(parts)
    turns = MixtureOrder(resolve_shares(parts, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent))
    asked = Asked(config, corpora, turns, machine.devices_of_run(), micro_batch=micro_batch, windows=SUMMARY_WINDOWS)
    for line in carry_out(OF_SUMMARY, asked):
        if line.level != "ok":
            yield f"warning: {line.name}: {line.text}"
        elif line.name in SHOWN:
            yield f"{line.name:<10}  {line.text}"


def carry_out(checks: dict[str, Check], asked: Asked) -> Iterator[Line]:
    """Lines of some checks; what one refuses is a line, too."""
    for name, check in checks.items():
        try:
            yield from check(asked)
        except UserError as error:
            yield Line("error", name, str(error), {})
