"""The commands ``bert-jax compress distil`` and so on."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from bert_jax.cli.finetune import Finetune
from bert_jax.compress.options import NOT_OF_STUDENTS, CompressOptions
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.flags import DirectoryArg

LESS_COMMON = ("tag_column", "stride", "null_threshold", "bias_correction", "keep", "dense_dtype")
LESS_COMMON += ("replace_rate", "replace_schedule", "replace_share")
"""Options that few compressions need."""


@dataclass(frozen=True, kw_only=True)
class Distil(Finetune):
    """Train a smaller student of a fine-tuned model on the data of its task; the same command continues a stopped run.

    MODEL is the teacher. The recipes are layer dropping and those of DistilBERT, PKD, TinyBERT, TextBrewer and
    BERT-of-Theseus.
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
    text_columns: tuple[str, ...] = ("text",)
    """For classification and regression: the columns with the text, or with the two texts of a pair."""
    label_column: str = "label"
    """For classification and regression: the column with the label."""
    max_length: int | None = None
    """Longest example in tokens; longer ones are truncated. Default: 128, for squad 384."""
    json: bool = False
    """Print the results as JSON instead of text."""

    def run(self) -> None:
        """Quantise, and print size, difference and scores."""
        from bert_jax.compress.quantise import quantise_model
        from bert_jax.distributed import jax_setup

        columns = {"text_columns": self.text_columns, "label_column": self.label_column}
        options = FinetuneOptions(max_length=self.max_length, **columns)
        jax_setup.disable_absent_tpu_backend()
        result = quantise_model(
            self.model,
            self.out,
            task=self.task,
            data=self.data,
            options=options,
            announce=lambda line: print(line, file=sys.stderr),
        )
        print(json.dumps(result.to_dict()) if self.json else "\n".join([*result.summary_lines(), f"wrote {self.out}"]))


COMMANDS: dict[str, type] = {"distil": Distil, "quantise": Quantise}
"""By the word after ``bert-jax compress``."""
