"""The command ``bert-jax pretrain``."""

import re
import sys
from dataclasses import dataclass, field

from bert_jax.cli.arguments import ConfigArg, Corpora, MicroBatch, Words, print_metrics, with_vocabulary
from bert_jax.config import to_dict
from bert_jax.data import mixture as mixture_lib
from bert_jax.distributed import cluster_detection, supervised, supervisor
from bert_jax.errors import TRY_AGAIN, UserError
from bert_jax.flags import DirectoryArg

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
    config: ConfigArg
    cluster: cluster_detection.ClusterConfig = field(default_factory=cluster_detection.ClusterConfig)
    words: Words = ()

    def run(self) -> int:
        """Train; returns 0, or 75 if the run was saved and the same command continues it."""
        window = None if self.profile is None else _parse_window(self.profile)
        mixture = [mixture_lib.parse_corpus_weight(text) for text in self.corpus]
        names = "corpus", "workdir", "micro_batch"
        options = to_dict(self.config) | {name: getattr(self, name) for name in names}
        code = supervisor.supervise_command(["pretrain", *self.words], self.cluster, options)
        if code is not None:
            return code

        config = with_vocabulary(self.config, self.words, mixture)
        from bert_jax.convert import init_from  # jax is loaded only if needed, not for --help
        from bert_jax.distributed import agreement, jax_setup, worker
        from bert_jax.doctor.doctor import run_summary
        from bert_jax.training import pretraining
        from bert_jax.training.run_directory import goodput

        jax_setup.prepare_training(self.compilation_cache)
        worker.connect_worker(self.cluster)

        def announce() -> None:
            for line in run_summary(config, mixture, self.micro_batch):
                print(line, file=sys.stderr, flush=True)

        progress = pretraining.pretrain(
            config,
            mixture,
            self.workdir,
            profile=window,
            micro_batch=self.micro_batch,
            announce=announce,
            load_initial_params=init_from.load_initial_params,
        )
        supervised.announce_exit()
        if agreement.is_first() and progress.ended:
            counts = f"{progress.cursor.step} steps, {progress.cursor.rows:,} rows, {progress.tokens_seen:,} tokens"
            print(f"{END_MESSAGES[progress.ended]}: {counts}; results are in {self.workdir}")
            print_metrics(progress.evaluation)
            print(goodput.format_summary(goodput.summarize(self.workdir)))
        elif agreement.is_first():
            steps = f"step {progress.cursor.step} of {config.total_steps}"
            print(f"stopped and saved at {steps}; the same command continues")
        return 0 if progress.ended else TRY_AGAIN


def _parse_window(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,10}):([0-9]{1,10})", text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--profile {text}: write the first step and the one after the last, as in 100:110")
    return int(match[1]), int(match[2])
