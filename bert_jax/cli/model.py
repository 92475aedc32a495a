"""The commands ``bert-jax evaluate``, ``fill-mask``, ``convert`` and ``merge``, which use trained models."""

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bert_jax.cli.arguments import Words, print_metrics
from bert_jax.command.flags import DirectoryArg
from bert_jax.config.sections import Format
from bert_jax.data import mixture as mixture_lib
from bert_jax.distributed import cluster_detection, supervised, supervisor
from bert_jax.errors import printable, require
from bert_jax.storage.paths import check_reachable, to_path

if TYPE_CHECKING:
    from bert_jax.training.pretraining import EvaluationResult


OutputFormatName = Literal[
    "huggingface",
    "pytorch",
    "tensorflow1",
    "bert-jax",
    "stablehlo",
    "onnx",
    "onnx-int8",
    "onnx-both",
    "openvino",
    "openvino-int8",
    "openvino-both",
]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Held-out metrics of a run, a checkpoint of a run, or a model, with their baselines, on the devices of one or more
    processes."""

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, whose newest checkpoint is scored, a checkpoint as in RUN/checkpoints/00001000, or a
    model with an MLM head (docs/conversion.md has the formats)."""
    corpus: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Corpus whose validation split is scored, built with the model's tokenizer; may be repeated."""
    format: Format | None = None
    """Format of the scored rows, to compare runs of different formats (docs/ablation.md). Default: the run's;
    full_sentences for a model."""
    seq_len: int | None = None
    """Tokens per row. Default: those of the run's last phase; for a model 128."""
    rows: int | None = None
    """Rows of each validation split to score; all if it has fewer. Default: the run's evaluation.rows; for a model
    those of the presets."""
    json: bool = False
    """Print JSON instead of a table."""
    cluster: cluster_detection.ClusterConfig = field(default_factory=cluster_detection.ClusterConfig)
    words: Words = ()

    def run(self) -> int:
        """Print the metrics in the first process."""
        options = {name: getattr(self, name) for name in ("model", "corpus", "format", "seq_len", "rows")}
        words = ["evaluate", *self.words]
        code = supervisor.supervise_command(words, self.cluster, options, supervisor.STOPPING)
        if code is not None:
            return code

        # Validation splits are scored one by one: their shares are not used, and equal shares pass validation.
        mixture = [mixture_lib.CorpusWeight(to_path(text), 1.0) for text in self.corpus]
        from bert_jax.distributed import agreement, jax_setup, worker

        jax_setup.disable_absent_backends()
        jax_setup.end_on_sigterm()
        worker.connect_worker(self.cluster)
        evaluation = self._score(mixture)
        supervised.announce_exit()
        scored = evaluation._asdict()
        metrics = scored.pop("metrics")
        if not agreement.is_first():
            return 0
        if self.json:
            print(json.dumps(scored | metrics))
        else:
            print("scored: " + ", ".join(f"{name} {value}" for name, value in scored.items()) + " at most")
            print_metrics(metrics)
        return 0

    def _score(self, mixture: list[mixture_lib.CorpusWeight]) -> "EvaluationResult":
        """The metrics of the run or of the model."""
        from bert_jax.convert.held_out import score

        check_reachable(self.model)
        return score(self.model, mixture, form=self.format, seq_len=self.seq_len, rows=self.rows)


@dataclass(frozen=True, kw_only=True)
class FillMask:
    """Fill the mask tokens of a text."""

    model: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="MODEL")]
    """Work directory of a run, or an exported model."""
    text: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEXT")]
    """Text with one or more mask tokens: [MASK] in BERT's vocabularies, <mask> in RoBERTa's."""
    top: int = 5
    """Candidates per mask token, at most the tokenizer's tokens."""
    json: bool = False
    """Print JSON instead of a table: a list for each mask token. Probabilities are the softmax over all rows of the
    model's vocabulary."""

    def run(self) -> None:
        """Print the candidates of each mask token."""
        from bert_jax.distributed import jax_setup
        from bert_jax.inference import loaded_model

        jax_setup.disable_absent_backends()
        model = loaded_model.load(self.model)
        if model.tokenizer.note:
            print(f"note: {printable(model.tokenizer.note)}", file=sys.stderr)
        filled = model.fill_mask(self.text, self.top)
        if self.json:
            print(json.dumps([[candidate._asdict() for candidate in candidates] for candidates in filled]))
            return
        mask = model.tokenizer.id_to_token(model.tokenizer.mask_id)
        for i, candidates in enumerate(filled, start=1):
            print(f"{mask} {i}: " + "  ".join(f"{c.token} {c.probability:.1%}" for c in candidates))


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Write a model in another format, and check that it computes the same outputs."""

    source: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="SOURCE")]
    """A run's work directory, or a model: a directory of Hugging Face, TensorFlow 1, Flax or bert-jax, or a .pt file of
    fairseq or NVIDIA. The format is detected (docs/conversion.md)."""
    destination: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="DESTINATION")]
    """Directory to create; it must not exist."""
    to: OutputFormatName = "huggingface"
    """Format to write; the last seven are for serving (docs/compression/serving.md)."""
    optimizer_state: Literal["drop", "keep"] = "drop"
    """Whether to keep the optimizer's moments; the formats bert-jax and tensorflow1 can store them."""
    drop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = ()
    """Leave out tensors of the source by name (* matches anything); may be repeated."""
    part: Literal["model", "generator"] = "model"
    """What of a run of replaced-token detection to write: the discriminator, or its generator with the MLM head."""
    trim_vocabulary: bool = False
    """Remove embedding rows after the tokenizer's last token, as in padded vocabularies."""
    force: bool = False
    """Keep the written files even if the parity report fails."""
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens"] | None = None
    """Also write modules.json and its files, so that sentence-transformers loads the model with this pooling. Default:
    those of the source are kept."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the written weights; half precision for huggingface and pytorch only."""
    json: bool = False
    """Print the parity report as JSON instead of a table."""

    def run(self) -> None:
        """Convert, and print the parity report."""
        from bert_jax.convert import conversion
        from bert_jax.convert.formats import input_formats
        from bert_jax.distributed import jax_setup

        jax_setup.disable_absent_backends()
        options = input_formats.ReadOptions(self.optimizer_state == "keep", self.drop, self.trim_vocabulary, self.part)
        choices = {"force": self.force, "pooling": self.pooling, "dtype": self.dtype}
        report = conversion.convert(self.source, self.destination, self.to, options, **choices)
        print(json.dumps(report.to_dict()) if self.json else "\n".join([*report.lines(), f"wrote {self.destination}"]))


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Write the mean of several models: of checkpoints of a run, or of runs that began with the same parameters."""

    models: Annotated[tyro.conf.Positional[tuple[DirectoryArg, ...]], tyro.conf.arg(metavar="MODEL ...")]
    """Runs, checkpoints of runs (RUN/checkpoints/STEP) or models, with one architecture and one tokenizer."""
    out: DirectoryArg
    """Directory to create; it must not exist."""
    weights: tuple[float, ...] | None = None
    """One number per model; they are divided by their sum. Default: equal ones."""
    to: OutputFormatName = "bert-jax"
    """Format to write."""
    corpus: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR")] = ()
    """Corpus on whose validation split the models and their mean are scored, in rows of full sentences; may be
    repeated."""
    seq_len: int | None = None
    """Tokens per scored row. Default: 128."""

    def run(self) -> None:
        """Score, write, and print the scores."""
        from contextlib import ExitStack

        from bert_jax.convert import conversion
        from bert_jax.convert.formats import input_formats
        from bert_jax.convert.held_out import score_model
        from bert_jax.convert.merge import merge_models
        from bert_jax.distributed import jax_setup
        from bert_jax.report import Section, Table
        from bert_jax.report.text import render

        jax_setup.disable_absent_backends()
        require(self.seq_len is None or bool(self.corpus), "--seq-len is that of scored rows: add --corpus DIR")
        conversion.check_destination(self.out, "--out ")
        mixture = [mixture_lib.CorpusWeight(to_path(text), 1.0) for text in self.corpus]
        scores = {}
        with ExitStack() as stack:
            merged = merge_models(self.models, self.weights, stack)
            if self.corpus:
                for path in self.models:
                    with input_formats.open_model(path) as source_model:
                        scores[str(path)] = score_model(source_model, mixture, seq_len=self.seq_len).metrics
                scores[str(self.out)] = score_model(merged, mixture, seq_len=self.seq_len).metrics
            conversion.convert(merged, self.out, self.to)
        print(f"wrote {self.out}: {merged.notes[-1]}")
        if scores:
            names = tuple(next(iter(scores.values())))
            rows = tuple((path, *(f"{found[name]:.4f}" for name in names)) for path, found in scores.items())
            print(render([Section("held out", [Table(("model", *names), rows)])]))
