"""Arguments of each command of ``bert-jax``; ``--help`` shows the docstrings."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bert_jax import storage
from bert_jax.config import Config
from bert_jax.config.sections import Format
from bert_jax.distributed.cluster_detection import ClusterConfig
from bert_jax.field_validation import Count, NonNegative

MISSING: Any = tyro.MISSING
"""Placeholder of required fields until the flags are parsed."""

DirectoryArg = Annotated[
    storage.StoredPath,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DIR",
        instance_from_str=lambda words: storage.to_path(words[0]),
        is_instance=lambda value: isinstance(value, storage.StoredPath),
        str_from_instance=lambda value: [str(value)],
    ),
]
Corpora = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR[=WEIGHT]")]


@dataclass(frozen=True, kw_only=True)
class Pretrain(Config):
    """Pretrain CONFIG on a corpus; the same command continues a stopped run.

    Every field of the config can be set: --model.num-layers 6 --phases.0.steps 100 --objective.pair none.
    """

    corpus: Corpora
    """Directory that `bert-data build` made, and its weight: rows read per row of a corpus with weight 1. Give it once
    for each corpus of a mixture; without weights, data.mixture-exponent decides the shares."""
    workdir: DirectoryArg
    """Directory of the run: checkpoints, metrics.jsonl, TensorBoard events. Like a corpus, it may be in a bucket:
    gs://BUCKET/NAME or s3://BUCKET/NAME."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device, or `auto` for as many as fit into device memory (host memory on a CPU).
    Without it, phases.N.accumulation sets the micro-batches of a step; without both, it is `auto` where devices report
    their memory, and on a CPU the largest possible. The choice is in ledger.jsonl. Results do not depend on it."""
    profile: str | None = None
    """Write a trace of steps A to B (exclusive), given as A:B, into WORKDIR/profile."""
    compilation_cache: str | None = None
    """Directory that caches compiled programs for the next start, or `none`. Default: JAX_COMPILATION_CACHE_DIR of the
    environment, else bert_jax/compiled in the user's cache directory."""
    init_from: str | None = None
    """Alias of --start.source: a run, or any model that `bert-jax convert` reads, to initialise parameters from."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Check a run before it starts: corpora, batches, schedule, devices, disk, processes. It trains nothing and leaves
    no files. It takes every flag of the config that `pretrain` takes; start it like `pretrain`, in all processes.
    """

    corpus: Corpora
    """As for `bert-jax pretrain`; give it once for each corpus of a mixture."""
    workdir: DirectoryArg | None = None
    """Directory of the new or existing run, also in a bucket. Without it, the disk is not checked."""
    micro_batch: str | None = None
    """As for `bert-jax pretrain`."""
    hosts: Count | None = None
    """Planned number of processes, one per host. Default: the processes of this command."""
    devices: Count | None = None
    """Planned number of devices of all processes. Default: the visible ones of each process."""
    topology: str | None = None
    """Target devices instead of --devices: v5e:16x16, h100:8x8 (docs/plan.md), with known memory."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    against: bool = False
    """Instead, train 200 steps of a small fixed run on this machine and compare them with a shipped curve; CONFIG is
    bert_tiny or bert_mini, the corpus is the reference corpus (docs/reference.md)."""
    json: bool = False
    """Print JSON instead of text: a list of {level, name, text, values}."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Config):
    """Show batch size, sequence length and learning rate over the steps of CONFIG. Needs no corpus.

    It takes every flag of the config that `pretrain` takes.
    """

    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """Also plot it to this PNG file (needs the extra `plot`)."""


@dataclass(frozen=True, kw_only=True)
class Plan(Config):
    """Estimate memory, communication, time and cost of CONFIG on absent devices. Needs no corpus.

    It compiles the train step of every phase for the topology, which takes about a minute each for large models. It
    takes every flag of the config that `pretrain` takes; --mesh.data, --mesh.fsdp and --mesh.tensor set the mesh.
    """

    topology: str
    """Target devices: v5e:16x16, 2xv5e:16x16 for two slices; GPUs as nodes x GPUs per node, as in h100:8x8."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device. Without it, phases.N.accumulation sets the micro-batches of a step; without
    both, the largest micro-batch is used that fits by the memory estimate."""
    price_per_chip_hour: NonNegative | None = None
    """Price of a chip per hour in any currency, for the cost of the run."""
    search: bool = False
    """First search the fastest mesh, micro-batches and model.remat that fit, compiling at most 6 programs."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out metrics of a run's newest checkpoint with their baselines, on the local devices."""

    workdir: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="WORKDIR")]
    """Directory of the run."""
    corpus: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Corpus whose validation split is scored, built with the run's tokenizer; may be repeated."""
    format: Format | None = None
    """Format of the scored rows, to compare runs of different formats (docs/ablation.md). Default: the run's."""
    seq_len: int | None = None
    """Tokens per row. Default: those of the run's last phase."""
    rows: int | None = None
    """Rows of each validation split to score; all if it has fewer. Default: the run's evaluation.rows."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Convert:
    """Write a model in another format, and check that it computes the same outputs."""

    source: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="SOURCE")]
    """A run's work directory, or a model: a directory of Hugging Face, TensorFlow 1, Flax or bert-jax, or a .pt file of
    fairseq or NVIDIA. The format is detected (docs/conversion.md)."""
    destination: Annotated[tyro.conf.Positional[DirectoryArg], tyro.conf.arg(metavar="DESTINATION")]
    """Directory to create; it must not exist."""
    to: Literal["huggingface", "pytorch", "tensorflow1", "bert-jax", "stablehlo"] = "huggingface"
    """Format to write."""
    optimizer_state: Literal["drop", "keep"] = "drop"
    """Whether to keep the optimizer's moments; the formats bert-jax and tensorflow1 can store them."""
    drop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = ()
    """Leave out tensors of the source by name (* matches anything); may be repeated."""
    trim_vocabulary: bool = False
    """Remove embedding rows after the tokenizer's last token, as in padded vocabularies."""
    force: bool = False
    """Keep the written files even if the parity report fails."""
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens"] | None = None
    """Also write modules.json and its files, so that sentence-transformers loads the model with this pooling. Default:
    those of the source are kept."""
    json: bool = False
    """Print the parity report as JSON instead of a table."""
