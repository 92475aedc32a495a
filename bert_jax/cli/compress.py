"""The commands ``bert-jax compress distil`` and so on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from bert_jax.cli.finetune import Finetune
from bert_jax.compress.options import NOT_OF_STUDENTS, CompressOptions

LESS_COMMON = ("tag_column", "stride", "null_threshold", "bias_correction", "keep")
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


COMMANDS: dict[str, type] = {"distil": Distil}
"""By the word after ``bert-jax compress``."""
