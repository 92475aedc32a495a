"""`bert-jax doctor`: runs all checks in turn and reports their findings, for one process or several.

`pretrain` prints a summary before its first step (`run_summary`).
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bert_jax.config import Config, to_dict
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight, MixtureOrder, open_corpora, resolve_shares
from bert_jax.distributed.cluster_detection import ProcessInfo
from bert_jax.distributed.process_report import Report, make_report
from bert_jax.distributed.rendezvous import open_rendezvous
from bert_jax.doctor import data_checks, machine_checks, process_checks, schedule_checks, storage_checks
from bert_jax.doctor.check_context import CheckContext, Finding, Machine
from bert_jax.errors import PeerError, UserError
from bert_jax.storage.cache import LocalCache
from bert_jax.storage.paths import StoredPath
from bert_jax.training.implementation import choose_implementation
from bert_jax.training.micro_batch import MicroBatchRequest

Check = Callable[[CheckContext], Iterator[Finding]]
CORPUS_CHECKS: dict[str, Check] = data_checks.CHECKS
"""Checks that need open corpora."""
RUN_CHECKS: dict[str, Check] = schedule_checks.CHECKS | storage_checks.CHECKS | process_checks.CHECKS
CHECKS = machine_checks.CHECKS | CORPUS_CHECKS | RUN_CHECKS


class DoctorOptions(NamedTuple):
    """Options of the command besides the config and the corpora."""

    workdir: StoredPath | None = None
    micro_batch: MicroBatchRequest = None
    hosts: int | None = None
    """Number of planned processes; None: the present ones."""
    devices: int | None = None
    """Number of planned devices of all hosts; None: the visible ones."""
    topology: str | None = None
    """Name of the target topology; None: the present devices, or `devices`."""


def run_doctor(
    config: Config,
    parts: Sequence[CorpusWeight],
    options: DoctorOptions,
    info: ProcessInfo | None,
    seconds: float,
    print_findings: Callable[[Iterator[Finding]], int],
) -> int:
    """Report this process; process 0 also checks the run and all processes.

    Args:
      config, parts: of the run.
      options: other options of the command.
      info: of this process; None for a single process.
      seconds: timeout for the other processes.
      print_findings: prints findings and returns the exit code; called in process 0 only.

    Returns:
      the exit code, the same in all processes.

    Raises:
      UserError: contradicting options, or a process does not answer.
    """

    def check(reports: Sequence[Report]) -> int:
        for i, other in enumerate(reports):
            if not {"devices", "storage_probe", "local_probe"} <= other.keys() or (other["devices"] is None) != planned:
                raise UserError(f"process {i} ({other['host']}) runs another command: start doctor in all of them")
        wanted = options.topology, options.hosts, options.devices
        devices = machine_checks.resolve_devices(*wanted, [report["devices"] for report in reports])
        return print_findings(check_run(config, parts, options, devices, reports))

    planned = options.topology is not None or options.devices is not None
    # Listing the devices must not allocate GPU memory that other processes need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with storage_checks.probe_file(options.workdir) as probe:
        weighed = [f"{part.directory}={part.weight}" for part in parts]
        report = make_report(to_dict(config) | {"corpus": weighed} | options._asdict()) | {
            "corpora": process_checks.read_corpus_identities([str(part.directory) for part in parts]),
            "storage_probe": probe,
            "local_probe": storage_checks.probe_local_directory(config.checkpoint.local_directory),
            "devices": None if planned else machine_checks.local_device_report(info),
        }
        if info is None:
            return check([report])
        try:
            peers, code = open_rendezvous(info, report, seconds, check, int)
        except PeerError as error:
            advice = "start the command in all processes, or give a longer --cluster.timeout"
            raise UserError(f"{error}: {advice}") from error
        peers.close()
        return code


def check_run(
    config: Config, parts: Sequence[CorpusWeight], options: DoctorOptions, devices: Machine, reports: Sequence[Report]
) -> Iterator[Finding]:
    """Findings about a config with a mixture on some devices, each as soon as it is known.

    A setting that `bert-jax pretrain` would refuse gives a finding of level "error". The other checks still run,
    except those whose input is missing, and all after the machine's if a step does not fit into its memory: with such
    sizes, they could take minutes.
    """
    checks, corpora, order = CORPUS_CHECKS | RUN_CHECKS, [], None
    try:
        corpora, order = _open_mixture(config, parts)
    except UserError as error:
        yield Finding("error", "corpora", str(error), {})
        checks = RUN_CHECKS
    paths = tuple(str(part.directory) for part in parts)
    config = choose_implementation(config, devices.kind)
    context = CheckContext(config, corpora, order, devices, paths, options.workdir, options.micro_batch, tuple(reports))
    machine = list(run_checks(machine_checks.CHECKS, context))
    yield from machine
    if not any(one.name == "memory" and one.level == "error" for one in machine):
        yield from run_checks(checks, context)


def _open_mixture(config: Config, parts: Sequence[CorpusWeight]) -> tuple[list[Corpus], MixtureOrder]:
    ordered, corpora = open_corpora(parts, cache=LocalCache(config.data.cache_dir, config.data.cache_limit_gb))
    tokens = [corpus.num_tokens for corpus in corpora]
    return corpora, MixtureOrder(resolve_shares(ordered, tokens, config.data.mixture_exponent))


SUMMARY_FINDINGS = ("model", "mesh", "memory", "time", "mixture", "vocabulary", "rows", "epochs")
"""Findings of level ok that `pretrain` prints; it prints all warnings."""
SUMMARY_TOKENS = 40e6
"""Tokens per corpus and phase that are planned for a summary; takes less than a second."""


def run_summary(config: Config, parts: Sequence[CorpusWeight], micro_batch: MicroBatchRequest) -> Iterator[str]:
    """Summary of a run in about ten lines, and the warnings of `bert-jax doctor`.

    Args:
      config, parts: of a run that passed validation.
      micro_batch: same as the flag of `bert-jax pretrain`.
    """
    mixture = _open_mixture(config, parts)
    devices = machine_checks.current_machine()
    config = choose_implementation(config, devices.kind)
    context = CheckContext(config, *mixture, devices, micro_batch=micro_batch, planned_tokens=SUMMARY_TOKENS)
    checks = machine_checks.CHECKS | data_checks.CHECKS | schedule_checks.CHECKS
    del checks["files"]  # `pretrain` has compared their checksums
    for finding in run_checks(checks, context):
        if finding.level != "ok":
            yield f"warning: {finding.name}: {finding.text}"
        elif finding.name in SUMMARY_FINDINGS:
            yield f"{finding.name:<10}  {finding.text}"


def run_checks(checks: dict[str, Check], context: CheckContext) -> Iterator[Finding]:
    """Findings of some checks; a UserError becomes a finding of level "error"."""
    for name, check in checks.items():
        try:
            yield from check(context)
        except UserError as error:
            yield Finding("error", name, str(error), {})
