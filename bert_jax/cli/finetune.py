"""The command ``bert-jax finetune``."""

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from bert_jax.cli.arguments import Words
from bert_jax.command.flags import DirectoryArg
from bert_jax.config import MeshConfig
from bert_jax.distributed import cluster_detection, supervised, supervisor
from bert_jax.errors import TRY_AGAIN
from bert_jax.finetune.options import FinetuneOptions


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune a model on a task; the same command continues a stopped run.

    Small tasks have the recipe of Mosbach et al. (2021): 20 epochs, learning rate 2e-5, Adam with bias correction.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads."""
    task: str
    """One of GLUE's cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte and wnli; or classification, multilabel,
    regression, multiple_choice, tagging, squad."""
    data: DirectoryArg
    """Directory with the files of the splits: train, dev and test, which may be missing; or of a dataset as Hugging
    Face stores it, or of TFDS."""
    workdir: DirectoryArg
    """Directory of the run, or with --seeds of the runs: results.json, predictions, checkpoints, metrics.jsonl."""
    options: Annotated[FinetuneOptions, tyro.conf.arg(name="")] = field(default_factory=FinetuneOptions)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    compilation_cache: str | None = None
    """Directory that caches compiled programs for the next start, or `none`. Default: JAX_COMPILATION_CACHE_DIR of the
    environment, else bert_jax/compiled in the user's cache directory."""
    json: bool = False
    """Print the results as JSON instead of a table."""
    cluster: cluster_detection.ClusterConfig = field(default_factory=cluster_detection.ClusterConfig)
    words: Words = ()

    command = "finetune"
    rare_flags = (
        *("--null-threshold", "--skip-damaged", "--word-column", "--save-every", "--label-separator", "--test-score"),
        *("--class-weights", "--label-smoothing"),
    )

    def run(self) -> int:
        """Train one run per seed, and print the scores; returns 75 if a run was saved and must be continued."""
        skipped = "compilation_cache", "json", "cluster", "words"
        names = [one.name for one in dataclasses.fields(self) if one.name not in skipped]
        values = {name: getattr(self, name) for name in names}
        options = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in values.items()}
        code = supervisor.supervise_command([*self.command.split(), *self.words], self.cluster, options)
        if code is not None:
            return code

        from bert_jax.distributed import agreement, jax_setup, worker  # jax is loaded only if needed, not for --help

        jax_setup.prepare_training(self.compilation_cache)
        worker.connect_worker(self.cluster)

        def announce(line: str) -> None:
            if agreement.is_first():
                print(line, file=sys.stderr, flush=True)

        result = self.train(announce)
        supervised.announce_exit()
        if result is None:
            announce("stopped and saved; the same command continues")
            return TRY_AGAIN
        if agreement.is_first():
            values, lines = result
            print(json.dumps(values) if self.json else "\n".join(lines))
        return 0

    def train(self, announce: Callable[[str], None]) -> tuple[dict[str, Any], list[str]] | None:
        """The results as plain values and as lines of a table; None: stopped and saved."""
        from bert_jax.finetune import finetune

        result = finetune.finetune(
            self.model, self.task, self.data, self.workdir, self.options, mesh=self.mesh, announce=announce
        )
        return None if result is None else (result.to_dict(), finetune.summary_lines(result))
