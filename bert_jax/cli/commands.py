"""What each command of ``bert-jax`` takes; the docstrings are what ``--help`` shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bert_jax import storage
from bert_jax.config import Config
from bert_jax.config.field_validation import Count, NonNegative
from bert_jax.config.sections import Format
from bert_jax.distributed.cluster_detection import ClusterConfig

MISSING: Any = tyro.MISSING
"""Stands in the required fields of a command whose config is there already, until its flags are read."""

Place = Annotated[
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
    """Pretrain CONFIG on a corpus; the same command continues a run that was stopped.

    Every field of the config can be set: --model.num-layers 6 --phases.0.steps 100 --objective.pair none.
    """

    corpus: Corpora
    """Directory that `bert-data build` made, and how many of its rows are read per row of a corpus with weight 1.
    Give it once for each corpus of a mixture; without weights, data.mixture-exponent says what each gets."""
    workdir: Place
    """Directory of the run: checkpoints, metrics.jsonl, TensorBoard events. Like a corpus, it may lie in a bucket:
    gs://BUCKET/NAME or s3://BUCKET/NAME."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device, or `auto` for as many as fit into the memory at hand, the host's on a CPU.
    Without it, phases.N.accumulation says how an update is cut; without both, it is `auto` where devices report their
    memory, and on a CPU as many as there can be. ledger.jsonl has what was found. Results do not depend on it."""
    profile: str | None = None
    """Trace updates A up to B, written A:B, into WORKDIR/profile."""
    compilation_cache: str | None = None
    """Directory in which compiled programs are kept for the next start, or `none`. Without it, the environment's
    JAX_COMPILATION_CACHE_DIR, else bert_jax/compiled in the user's cache directory."""
    init_from: str | None = None
    """Another name of --start.source: a run, or any model that `bert-jax convert` reads, to start from."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True, kw_only=True)
class Doctor(Config):
    """Check a run before it starts: corpora, batches, schedule, devices, disk, processes. Nothing is trained or
    kept. It takes every flag of the config that `pretrain` takes, and is started like it: in all processes, if so.
    """

    corpus: Corpora
    """As for `bert-jax pretrain`; once for each corpus of a mixture."""
    workdir: Place | None = None
    """Directory that the run will be in, or is in already; a bucket, too. Without it, no disk is looked at."""
    micro_batch: str | None = None
    """As for `bert-jax pretrain`."""
    hosts: Count | None = None
    """Processes, one per host, that the run will have. Without it, those that run this."""
    devices: Count | None = None
    """Devices that they will have together. Without it, as many for each process as are seen here."""
    topology: str | None = None
    """Instead of --devices, where it will run: v5e:16x16, h100:8x8 (docs/plan.md); its memory is known, too."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    against: bool = False
    """Instead, train 200 updates of a small fixed run on this set-up, and compare them with a shipped curve: CONFIG is
    bert_tiny or bert_mini, and the corpus the reference corpus (docs/reference.md)."""
    json: bool = False
    """Print JSON instead of lines: a list of {level, name, text, values}."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Config):
    """Show batch size, sequence length and learning rate over the steps of CONFIG. No corpus is needed.

    It takes every flag of the config that `pretrain` takes.
    """

    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """Also draw it into this PNG file (needs the extra `plot`)."""


@dataclass(frozen=True, kw_only=True)
class Plan(Config):
    """Estimate memory, communication, time and cost of CONFIG on devices that are not here. No corpus is needed.

    It compiles the train step of every phase for the topology, which takes about a minute each for large models. It
    takes every flag of the config that `pretrain` takes; --mesh.data, --mesh.fsdp and --mesh.tensor lay the mesh.
    """

    topology: str
    """Where: v5e:16x16, 2xv5e:16x16 for two slices of it; of GPUs, nodes x GPUs in each, as in h100:8x8."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device. Without it, phases.N.accumulation says how an update is cut; without
    both, as many rows are taken as fit by the estimate of memory."""
    price_per_chip_hour: NonNegative | None = None
    """What a chip costs for an hour, for the cost of the run; in any currency."""
    search: bool = False
    """First look for the mesh, micro-batches and model.remat that fit and are fastest, compiling at most 6 programs."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out metrics of a run's newest checkpoint with their baselines, on the devices that are here."""

    workdir: Annotated[tyro.conf.Positional[Place], tyro.conf.arg(metavar="WORKDIR")]
    """Directory of the run."""
    corpus: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="DIR")]
    """Corpus whose validation split is scored; built with the run's tokenizer. Give it once for each of several."""
    format: Format | None = None
    """Format of the rows that are scored, so that runs trained on different ones can be compared (docs/ablation.md).
    Without it, the run's own."""
    seq_len: int | None = None
    """Tokens per row. Without it, those of the run's last phase."""
    rows: int | None = None
    """Rows of each validation split to score, all if it has fewer. Without it, the run's evaluation.rows."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class FillMask:
    """Fill the mask tokens of a text."""

    model: Annotated[tyro.conf.Positional[Place], tyro.conf.arg(metavar="MODEL")]
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
    """Write a model in another format, and check that it computes the same."""

    source: Annotated[tyro.conf.Positional[Place], tyro.conf.arg(metavar="SOURCE")]
    """A run's work directory, or a model: a directory of Hugging Face's, of TensorFlow 1 or Flax, a .pt of fairseq or
    NVIDIA, one of ours. Which it is, is seen (docs/conversion.md)."""
    destination: Annotated[tyro.conf.Positional[Place], tyro.conf.arg(metavar="DESTINATION")]
    """Directory to make; it must not exist."""
    to: Literal["huggingface", "pytorch", "tensorflow1", "bert-jax", "stablehlo"] = "huggingface"
    """Format to write."""
    optimizer_state: Literal["drop", "keep"] = "drop"
    """Whether to keep the optimizer's moments; the formats bert-jax and tensorflow1 can hold them."""
    drop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = ()
    """Leave out tensors of the source by their names (* stands for anything). Give it once for each of several."""
    trim_vocabulary: bool = False
    """Cut the rows behind the tokenizer's last token, which padded vocabularies have."""
    force: bool = False
    """Keep what was written even if the parity report fails."""
    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens"] | None = None
    """Also write modules.json and its files, so that sentence-transformers opens the model and pools in this way.
    Without it, those of the source are kept."""
    json: bool = False
    """Print the parity report as JSON instead of a table."""
