"""The command ``bert-jax doctor``."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from bert_jax.cli.arguments import ConfigArg, Corpora, MicroBatch, Words, with_vocabulary
from bert_jax.command.flags import DirectoryArg
from bert_jax.data import mixture as mixture_lib
from bert_jax.distributed import cluster_detection
from bert_jax.doctor.check_context import Finding
from bert_jax.field_validation import Count


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check a run before it starts: corpora, batches, schedule, devices, disk, processes.

    It trains nothing and leaves no files. It takes every flag of the config that `pretrain` takes; start it like
    `pretrain`, in all processes.
    """

    corpus: Corpora = ()
    """As for `bert-jax pretrain`; give it once for each corpus of a mixture."""
    workdir: DirectoryArg | None = None
    """Directory of the new or existing run, also in a bucket. By default the disk is not checked."""
    micro_batch: MicroBatch = None
    """As for `bert-jax pretrain`."""
    hosts: Count | None = None
    """Planned number of processes, one per host. Default: the processes of this command."""
    devices: Count | None = None
    """Planned number of devices of all processes. Default: the visible ones of each process."""
    topology: str | None = None
    """Target devices instead of --devices: v5e:16x16, h100:8x8 (docs/plan.md), with known memory. Default: these."""
    against: bool = False
    """Instead, train 200 steps of a small fixed run on this machine and compare them with a shipped curve; CONFIG is
    bert_tiny or bert_mini, the corpus is the reference corpus (docs/reference.md)."""
    json: bool = False
    """Print JSON instead of text: a list of {level, name, text, values}."""
    config: ConfigArg
    cluster: cluster_detection.ClusterConfig = field(default_factory=cluster_detection.ClusterConfig)
    words: Words = ()

    def run(self) -> int:
        """Print the findings; returns 2 if one of them is an error, otherwise 0."""
        mixture = [mixture_lib.parse_corpus_weight(text) for text in self.corpus]
        from bert_jax.distributed import jax_setup

        jax_setup.disable_absent_backends()
        if self.against:
            from bert_jax.doctor.reference_curve import train_and_compare

            return self._print(train_and_compare(self.config, mixture))
        from bert_jax.doctor.doctor import DoctorOptions, run_doctor

        config = with_vocabulary(self.config, self.words, mixture)
        options = DoctorOptions(self.workdir, self.micro_batch, self.hosts, self.devices, self.topology)
        info = cluster_detection.detect(self.cluster)
        return run_doctor(config, mixture, options, info, self.cluster.timeout, self._print)

    def _print(self, findings: Iterator[Finding]) -> int:
        """Print findings, as text each as soon as it is known; returns the exit code."""
        printed = []
        for finding in findings:
            printed.append(finding)
            if not self.json:
                print(finding, flush=True)
        if self.json:
            print(json.dumps([finding._asdict() for finding in printed]))
        return 2 if any(finding.level == "error" for finding in printed) else 0
