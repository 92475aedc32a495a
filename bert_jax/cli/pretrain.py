"""The command ``bert-jax pretrain``."""

import dataclasses
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bert_jax.cli.arguments import ConfigArg, Corpora, MicroBatch, Words, print_metrics, with_vocabulary
from bert_jax.command.flags import DirectoryArg
from bert_jax.config import Config, to_dict
from bert_jax.data import mixture as mixture_lib
from bert_jax.distributed import cluster_detection, supervised, supervisor
from bert_jax.errors import TRY_AGAIN, UserError

if TYPE_CHECKING:
    from bert_jax.training import loop
    from bert_jax.training.monitoring.event_hook import EventHook, OnEvent

NOT_COMPARED = ("config", "profile", "compilation_cache", "cluster", "words", "on_event")
"""Fields of the command that processes do not compare as they are."""
END_MESSAGES = {"steps": "finished", "time": "finished, time limit reached", "target": "finished, target reached"}
"""Message of a finished run, by the reason of its end (training/loop.py)."""


@dataclass(frozen=True, kw_only=True)
class Pretrain:
    """Pretrain CONFIG on a corpus; the same command continues a stopped run.

    Every field of the config can be set: --model.num-layers 6 --phases.0.steps 100 --objective.pair none.
    """

    corpus: Corpora
    """Directory that `bert-data build` made, and its weight: rows read per row of a corpus with weight 1. Give it once
    for each corpus of a mixture; without weights, data.mixture-exponent decides the shares."""
    workdir: DirectoryArg
    """Directory of the run: checkpoints, metrics.jsonl, TensorBoard events. Like a corpus, it may be in a bucket:
    gs://BUCKET/NAME or s3://BUCKET/NAME."""
    micro_batch: MicroBatch = None
    """Rows of a micro-batch on each device, or `auto` for as many as fit into device memory (host memory on a CPU).
    Default: phases.N.accumulation sets the micro-batches of a step; without that, it is `auto` where devices report
    their memory, and on a CPU the largest possible. The choice is in ledger.jsonl. Results do not depend on it."""
    profile: str | None = None
    """Write a trace of steps A to B (exclusive), given as A:B, into WORKDIR/profile. Default: none."""
    compilation_cache: str | None = None
    """Directory that caches compiled programs for the next start, or `none`. Default: JAX_COMPILATION_CACHE_DIR of the
    environment, else bert_jax/compiled in the user's cache directory."""
    on_event: str | None = None
    """Command that `sh -c` runs when the run starts, diverges, rolls back, stalls, stops, fails or ends. It gets the
    event in the environment variables BERT_JAX_EVENT, _STEP, _MESSAGE, _EXIT_CODE, _WORKDIR and _PROCESS. It has ten
    seconds; whatever it does, the run goes on."""
    restart: bool = False
    """Begin again at step 0 if the run had a checkpoint and has none. By default such a run is refused."""
    config: ConfigArg
    cluster: cluster_detection.ClusterConfig = field(default_factory=cluster_detection.ClusterConfig)
    words: Words = ()

    command = "pretrain"

    def run(self) -> int:
        """Train; returns 0, or 75 if the run was saved and the same command continues it."""
        window = None if self.profile is None else _parse_window(self.profile)
        mixture = [mixture_lib.parse_corpus_weight(text) for text in self.corpus]
        names = [one.name for one in dataclasses.fields(self) if one.name not in NOT_COMPARED]
        values = {name: getattr(self, name) for name in names}
        options = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in values.items()}
        options = to_dict(self.config) | options
        code = supervisor.supervise_command([*self.command.split(), *self.words], self.cluster, options)
        if code is not None:
            return code

        from bert_jax.distributed import agreement, jax_setup, worker  # jax is loaded only if needed, not for --help
        from bert_jax.training.monitoring.event_hook import EventHook

        jax_setup.prepare_training(self.compilation_cache)
        worker.connect_worker(self.cluster)
        with EventHook(self.on_event, self.workdir) as hook:
            progress = self.train(mixture, window, hook.report)
            supervised.announce_exit()
            if agreement.is_first():
                self._report_end(progress, hook)
        return 0 if progress.ended else TRY_AGAIN

    def _report_end(self, progress: "loop.Progress", hook: "EventHook") -> None:
        from bert_jax.training.run_directory import workdir

        step = progress.cursor.step
        if not progress.ended:
            line = f"stopped and saved at step {step} of {workdir.read_config(self.workdir).total_steps}"
            hook.report("stop", step, line, TRY_AGAIN)
            print(f"{line}; the same command continues")
            return
        hook.report("end", step, END_MESSAGES[progress.ended], 0)
        if progress.skipped_steps:
            share = f"{progress.skipped_steps:,} of {step:,} steps"
            print(f"warning: {share} were skipped, because their loss or gradient was not finite", file=sys.stderr)
        self.print_end(progress)

    def print_end(self, progress: "loop.Progress") -> None:
        """Print what a finished run has done."""
        from bert_jax.training.run_directory import goodput

        counts = f"{progress.cursor.step} steps, {progress.cursor.rows:,} rows, {progress.tokens_seen:,} tokens"
        print(f"{END_MESSAGES[progress.ended]}: {counts}; results are in {self.workdir}")
        print_metrics(progress.evaluation)
        print(goodput.format_summary(goodput.summarize(self.workdir)))

    def train(
        self, mixture: list[mixture_lib.CorpusWeight], window: tuple[int, int] | None, on_event: "OnEvent"
    ) -> "loop.Progress":
        """Train, or continue the run.

        Args:
          mixture: the corpora.
          window: first and last step of `profile`.
          on_event: called at an event of the run.
        """
        from bert_jax.convert import init_from
        from bert_jax.doctor import machine_checks
        from bert_jax.training import pretraining

        config = with_vocabulary(self.config, self.words, mixture)
        machine_checks.check_memory(config, self.micro_batch, self.workdir)
        return pretraining.pretrain(
            config,
            mixture,
            self.workdir,
            profile=window,
            micro_batch=self.micro_batch,
            restart=self.restart,
            on_event=on_event,
            announce=lambda: self.print_summary(config, mixture),
            load_initial_params=init_from.load_initial_params,
        )

    def print_summary(self, config: Config, mixture: list[mixture_lib.CorpusWeight]) -> None:
        """Print a summary of the run and warnings."""
        from bert_jax.doctor.doctor import run_summary

        for line in run_summary(config, mixture, self.micro_batch):
            print(line, file=sys.stderr, flush=True)


def _parse_window(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile {text}: write the first step and the one after the last, as in 100:110")
    return int(match[1]), int(match[2])
