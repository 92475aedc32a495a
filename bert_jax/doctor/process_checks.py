"""Comparison of the processes: config, command, code, versions and corpora."""

from collections.abc import Iterator, Sequence

from etils import epath

from bert_jax.data.manifest import identity_of, read_manifest
from bert_jax.distributed.process_report import COMPARED_SECTIONS, report_differences
from bert_jax.doctor.check_context import CheckContext, Finding, finding
from bert_jax.errors import UserError

ONE_PROCESS = "one process was checked; start the command in all processes, like pretrain, to compare them"


def read_corpus_identities(paths: Sequence[str]) -> dict[str, str]:
    """`Corpus.identity` of each corpus by path, or the reason why the corpus cannot be read."""
    identities = {}
    for path in paths:
        directory = epath.Path(path)
        try:
            identities[path] = identity_of(directory, read_manifest(directory))
        except (UserError, OSError) as error:
            identities[path] = str(error)
    return identities


def processes(context: CheckContext) -> Iterator[Finding]:
    """What must be the same in all processes."""
    hosts = [report["host"] for report in context.reports]
    different = report_differences(list(context.reports))
    for text in different:
        yield Finding("error", "processes", text, {"hosts": hosts})
    if not different:
        text = f"{len(hosts)} processes on {len(set(hosts))} host(s) agree in {', '.join(COMPARED_SECTIONS)}"
        yield finding("processes", text if hosts[1:] else f"{ONE_PROCESS} ({hosts[0]})", {"hosts": hosts})


CHECKS = {"processes": processes}
"""Checks by the name of the finding that reports their error."""
