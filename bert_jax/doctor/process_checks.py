"""Checks across processes: same config, code and versions, same corpora, and synchronised clocks."""

from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.data.corpus import identity_of, read_manifest
from bert_jax.distributed.process_report import COMPARED_SECTIONS, report_differences
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.errors import UserError

CLOCK_SECONDS = 3.0
"""Largest accepted difference from process 0's clock: file times and logs of several hosts stay in order."""
ONE_PROCESS = "one process was checked; start the command in all processes, like pretrain, to compare them"


def read_corpus_identities(paths: Sequence[str]) -> dict[str, str]:
    """`Corpus.identity` of each corpus by path, or the reason why the corpus cannot be read."""
    return {path: _identity(epath.Path(path)) for path in paths}


def _identity(directory: epath.Path) -> str:
    try:
        return identity_of(directory, read_manifest(directory))
    except (UserError, OSError) as error:
        return str(error)


def processes(context: CheckContext) -> Iterator[Finding]:
    """Config and command, code, and versions of all processes."""
    reports = context.reports
    hosts = [report["host"] for report in reports]
    if different := report_differences(list(reports)):
        for text in different:
            yield Finding("error", "processes", text, {"hosts": hosts})
        return
    if len(reports) == 1:
        yield finding("processes", f"{ONE_PROCESS} ({hosts[0]})", {"hosts": hosts})
        return
    text = f"{len(reports)} processes on {len(set(hosts))} host(s) agree in {', '.join(COMPARED_SECTIONS)}"
    yield finding("processes", text, {"hosts": hosts})


def same_data(context: CheckContext) -> Iterator[Finding]:
    """Identity of the corpora that each process reads."""
    expected = context.reports[0]["corpora"]
    different = [
        (i, path, identity)
        for i, report in enumerate(context.reports)
        for path, identity in report["corpora"].items()
        if identity != expected.get(path)
    ]
    for i, path, identity in different:
        what = f"its corpus has identity {identity[:12]}" if len(identity) == 64 else identity
        remedy = "copy the same corpus to all hosts, or to shared storage"
        text = f"process {i} ({context.reports[i]['host']}) reads another {path} than process 0 ({what})"
        yield finding("same-data", text, {"process": i, "path": path}, remedy, "error")
    if not different:
        text = f"{len(context.reports)} process(es) read the same {len(expected)} corpora"
        yield finding("same-data", text, {"processes": len(context.reports)})


def clock(context: CheckContext) -> Iterator[Finding]:
    """Difference of each clock from process 0's when the report arrived."""
    ahead = [report["ahead"] for report in context.reports]
    values = {"ahead": ahead}
    bad = [i for i, seconds in enumerate(ahead) if abs(seconds) > CLOCK_SECONDS]
    for i in bad:
        off = f"{abs(ahead[i]):.1f} s {'ahead of' if ahead[i] > 0 else 'behind'} process 0's"
        remedy = "logs and file times would be out of order; synchronise the clocks with NTP or chrony"
        text = f"process {i} ({context.reports[i]['host']}) has a clock that is {off}"
        yield finding("clock", text, values, remedy)
    if not bad:
        text = f"within {max(map(abs, ahead)):.1f} s of process 0's" if len(ahead) > 1 else ONE_PROCESS
        yield finding("clock", text, values)


CHECKS = {"processes": processes, "same-data": same_data, "clock": clock}
"""Checks by the name of the finding that reports their error."""
