"""The commands ``bert-jax compress distil`` and so on."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bert_jax.cli.finetune import Finetune
from bert_jax.cli.pretrain import Pretrain
from bert_jax.command.flags import DirectoryArg
from bert_jax.compress.compression_options import NOT_OF_STUDENTS, ON_A_CORPUS, CompressOptions
from bert_jax.compress.prune_options import PruneOptions
from bert_jax.config import Config
from bert_jax.data.mixture import CorpusWeight
from bert_jax.errors import require
from bert_jax.finetune.options import FileOptions, FinetuneOptions

if TYPE_CHECKING:
    from bert_jax.training import loop
    from bert_jax.training.monitoring.event_hook import OnEvent

LESS_COMMON = ("tag_column", "word_column", "skip_damaged", "stride", "null_threshold", "bias_correction", "keep")
LESS_COMMON += ("save_every", "dense_dtype", "label_separator", "class_weights", "label_smoothing", "test_score")
LESS_COMMON += ("bottleneck_size", "replace_rate", "replace_schedule", "replace_share")
"""Options that few compressions need."""
NOT_ON_A_CORPUS = ("replace-rate", "replace-schedule", "replace-share", "name")
"""Options of a recipe for tasks."""
MODEL_FLAGS = ("--model.num-layers", "--model.hidden-size", "--model.num-heads", "--model.vocab-size", "--start.source")
"""Fields of a config that students have from their teacher or from their own options."""


@dataclass(frozen=True, kw_only=True)
class Distil(Finetune):
    """Train a smaller student of a fine-tuned model on the data of its task; the same command continues a stopped run.

    MODEL is the teacher. The recipes are layer dropping and those of DistilBERT, PKD, TinyBERT, TextBrewer,
    BERT-of-Theseus and MobileBERT.
    """

    compression: Annotated[CompressOptions, tyro.conf.arg(name="")] = field(default_factory=CompressOptions)
    command = "compress distil"
    rare_flags = tuple(f"--{name.replace('_', '-')}" for name in (*NOT_OF_STUDENTS, *LESS_COMMON))

    def train(self, announce: Callable[[str], None]) -> tuple[dict[str, Any], list[str]] | None:
        """The results as plain values and as lines of a table; None: stopped and saved."""
        from bert_jax.compress import compress

        result = compress.compress(
            self.model,
            self.task,
            self.data,
            self.workdir,
            self.compression,
            self.options,
            mesh=self.mesh,
            announce=announce,
        )
        return None if result is None else (result.to_dict(), result.summary_lines())


@dataclass(frozen=True, kw_only=True)
class Quantise:
    """Store a model's dense layers and embedding tables in 8-bit integers, a quarter of the size (Q8BERT).

    Every command that reads a model opens the result, and computes its dense layers in 8-bit integers. With --task and
    --data both models are scored. `bert-jax finetune MODEL --keep-head --dense-dtype int8` trains for it before.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads."""
    out: DirectoryArg
    """Directory to create, in the format of bert_jax; it must not exist."""
    task: str | None = None
    """Task of MODEL's head, as of `bert-jax finetune`, on whose dev split both models are scored; needs --data."""
    data: DirectoryArg | None = None
    """Directory with the files of the task."""
    max_length: int | None = None
    """Longest example in tokens; longer ones are truncated. Default: 128, for squad 384."""
    files: Annotated[FileOptions, tyro.conf.arg(name="")] = field(default_factory=FileOptions)
    json: bool = False
    """Print the results as JSON instead of text."""

    def run(self) -> None:
        """Quantise, and print size, difference and scores."""
        from bert_jax.compress.quantise import quantise_model
        from bert_jax.distributed import jax_setup

        options = FinetuneOptions(**self.files.file_options(), max_length=self.max_length)
        jax_setup.disable_absent_backends()
        result = quantise_model(
            self.model,
            self.out,
            task=self.task,
            data=self.data,
            options=options,
            announce=lambda line: print(line, file=sys.stderr),
        )
        print(json.dumps(result.to_dict()) if self.json else "\n".join([*result.summary_lines(), f"wrote {self.out}"]))


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove the less important attention heads and feed-forward units of every layer, and write the smaller model.

    Quality, size and speed of both models are printed. `bert-jax finetune OUT --keep-head` trains the smaller one on.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads."""
    data: DirectoryArg
    """Directory with the files of the task, or without --task with .txt files, one text per line."""
    out: DirectoryArg
    """Directory to create, in the format of bert_jax; it must not exist."""
    options: Annotated[PruneOptions, tyro.conf.arg(name="")] = field(default_factory=PruneOptions)
    json: bool = False
    """Print the results as JSON instead of a table."""

    def run(self) -> None:
        """Prune, and print the results."""
        from bert_jax.compress.prune import prune
        from bert_jax.distributed import jax_setup

        jax_setup.disable_absent_backends()
        result = prune(self.model, self.data, self.out, self.options, progress=True)
        print(json.dumps(result.to_dict()) if self.json else "\n".join([*result.summary_lines(), f"wrote {self.out}"]))


@dataclass(frozen=True, kw_only=True)
class TrimVocabulary:
    """Remove the tokens that texts do not use from a model's embeddings and tokenizer, and write the smaller model.

    Special tokens stay, and what any text needs: single characters, bytes, and the pieces from which others are merged.
    `bert-jax convert --trim-vocabulary` is another thing: it removes rows that belong to no token.
    """

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads."""
    text: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FILES")]
    """UTF-8 text files, every line a text; with wildcards in quotes, as in 'texts/*.txt'; may be repeated."""
    out: DirectoryArg
    """Directory to create, in the format of bert_jax; it must not exist."""
    min_count: int = 1
    """How often a token must occur in the texts to be kept. With 1, the texts have the same pieces as before."""
    json: bool = False
    """Print the results as JSON instead of text."""

    def run(self) -> None:
        """Trim, and print the results."""
        from bert_jax.compress.trim_vocabulary import trim_vocabulary
        from bert_jax.distributed import jax_setup

        jax_setup.disable_absent_backends()
        result = trim_vocabulary(self.model, self.text, self.out, self.min_count, progress=True)
        print(json.dumps(result.to_dict()) if self.json else "\n".join([*result.summary_lines(), f"wrote {self.out}"]))


@dataclass(frozen=True, kw_only=True)
class PretrainStudent(Pretrain):
    """Pretrain a smaller student of a model on a corpus; the same command continues a stopped run.

    CONFIG has phases, optimizer, objective and data. The student has the form of the teacher, with the depth and the
    sizes of the options; of CONFIG's model only dropout, initializer-range and the settings of computation are used.
    """

    teacher: DirectoryArg
    """Work directory of a run, an exported model, or any checkpoint that `bert-jax convert` reads. The corpus must
    have been built with its tokenizer."""
    compression: Annotated[CompressOptions, tyro.conf.arg(name="")] = ON_A_CORPUS
    command = "compress pretrain"
    rare_flags = tuple(f"--{name}" for name in ("matches", "on-event", "restart", *NOT_ON_A_CORPUS)) + MODEL_FLAGS

    def train(
        self, mixture: list[CorpusWeight], window: tuple[int, int] | None, on_event: "OnEvent"
    ) -> "loop.Progress":
        """As of `Pretrain`."""
        from bert_jax.compress import corpus_distillation

        given = [re.match(r"--model[.]([\w-]+)", word) for word in self.words]
        names = [match[1].replace("-", "_") for match in given if match]
        unused = [name for name in names if name not in corpus_distillation.FROM_CONFIG]
        require(
            not unused,
            f"--model.{''.join(unused[:1]).replace('_', '-')}: a student has the form of its teacher: leave it out, or "
            "use --student-layers, --hidden-size and so on",
        )

        def announce(config: Config, line: str) -> None:
            phases = tuple(dataclasses.replace(phase, frozen=()) for phase in config.phases)  # no part of the student
            self.print_summary(dataclasses.replace(config, phases=phases), mixture)
            print(line, file=sys.stderr, flush=True)

        return corpus_distillation.distil_on_corpus(
            self.config,
            mixture,
            self.teacher,
            self.workdir,
            self.compression,
            profile=window,
            micro_batch=self.micro_batch,
            announce=announce,
            restart=self.restart,
            on_event=on_event,
        )


COMMANDS: dict[str, type] = {
    "distil": Distil,
    "pretrain": PretrainStudent,
    "prune": Prune,
    "quantise": Quantise,
    "trim-vocabulary": TrimVocabulary,
}
"""By the word after ``bert-jax compress``."""
