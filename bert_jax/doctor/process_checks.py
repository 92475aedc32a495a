"""Whether all processes are about to do the same, see the same corpora, and have the same time."""

from collections.abc import Iterator

from bert_jax.distributed.rendezvous import SAME, differences
from bert_jax.doctor.check_context import CheckContext
from bert_jax.doctor.finding import Finding

CLOCK_SECONDS = 3.0
"""That a clock may differ from process 0's: file timestamps and logs of several hosts are still in order."""
ALONE = "one process was looked at; start this in all of them, as pretrain, to compare them"


def processes(context: CheckContext) -> Iterator[Finding]:
    """Config and command, code, and versions."""
    reports = context.reports
    hosts = [report["host"] for report in reports]
    if different := differences(list(reports)):
        for text in different:
            yield Finding("error", "processes", text, {"hosts": hosts})
        return
    if len(reports) == 1:
        yield Finding("ok", "processes", f"{ALONE} ({hosts[0]})", {"hosts": hosts})
        return
    text = f"{len(reports)} processes on {len(set(hosts))} host(s) agree in {', '.join(SAME)}"
    yield Finding("ok", "processes", text, {"hosts": hosts})


def same_data(context: CheckContext) -> Iterator[Finding]:
    """Corpora, as every process sees them."""
    ours = context.reports[0]["corpora"]
    found = [
        (i, path, seen)
        for i, report in enumerate(context.reports)
        for path, seen in report["corpora"].items()
        if seen != ours.get(path)
    ]
    for i, path, seen in found:
        what = f"the content of its corpus is {seen[:12]}" if len(seen) == 64 else seen
        remedy = "copy the same corpus to all hosts, or to where all see it"
        text = (
            f"process {i} ({context.reports[i]['host']}) does not see the {path} that process 0 sees ({what}): {remedy}"
        )
        yield Finding("error", "same-data", text, {"process": i, "path": path})
    if not found:
        text = f"{len(context.reports)} process(es) see the same {len(ours)} corpora"
        yield Finding("ok", "same-data", text, {"processes": len(context.reports)})


def clock(context: CheckContext) -> Iterator[Finding]:
    """Clocks against process 0's, as each was when its report came."""
    ahead = [report["ahead"] for report in context.reports]
    values = {"ahead": ahead}
    bad = [i for i, seconds in enumerate(ahead) if abs(seconds) > CLOCK_SECONDS]
    for i in bad:
        where = f"process {i} ({context.reports[i]['host']})"
        text = (
            f"{where} has a clock that is {abs(ahead[i]):.1f} s {'ahead of' if ahead[i] > 0 else 'behind'} process 0's"
        )
        remedy = "logs and file times would contradict each other; let NTP or chrony set the clocks"
        yield Finding("warning", "clock", f"{text}: {remedy}", values)
    if not bad:
        apart = f"within {max(map(abs, ahead)):.1f} s of process 0's" if len(ahead) > 1 else ALONE
        yield Finding("ok", "clock", apart, values)


CHECKS = {"processes": processes, "same-data": same_data, "clock": clock}
"""By the name that an error of theirs gets."""
