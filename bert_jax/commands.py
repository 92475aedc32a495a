"""What each command of ``bert-jax`` takes; the docstrings are what ``--help`` shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bert_jax import storage
from bert_jax.config import Config
from bert_jax.config_sections import Format
from bert_jax.runtime.cluster import ClusterConfig

MISSING: Any = tyro.MISSING
"""Stands in the required fields of a command whose config is there already, until its flags are read."""

Place = Annotated[
    storage.StoredPath,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="DIR",
        instance_from_str=lambda words: storage.path(words[0]),
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
    """Rows of a micro-batch on each device, or `auto` for as many as fit into the memory at hand (ledger.jsonl has
    what was found). Without it, phases.N.accumulation says how an update is cut. Results do not depend on it."""
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
    """Check a run before it is paid for: corpora, batches, schedule, devices, disk, processes. Nothing is trained or
    kept. It takes every flag of the config that `pretrain` takes, and is started like it: in all processes, if so.
    """

    corpus: Corpora
    """As for `bert-jax pretrain`; once for each corpus of a mixture."""
    workdir: Place | None = None
    """Directory that the run will be in, or is in already; a bucket, too. Without it, no disk is looked at."""
    micro_batch: str | None = None
    """As for `bert-jax pretrain`."""
    hosts: int | None = None
    """Processes, one per host, that the run will have. Without it, those that run this."""
    devices: int | None = None
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
    """Show what the phases of CONFIG make of batch size, sequence length and learning rate. It needs no corpus.

    It takes every flag of the config that `pretrain` takes.
    """

    json: bool = False
    """Print JSON instead of a table."""
    plot: Path | None = None
    """Also draw it into this PNG file (needs the extra `plot`)."""


@dataclass(frozen=True, kw_only=True)
class Plan(Config):
    """Show what CONFIG needs and takes on absent devices: memory, exchanges, time, cost. It needs no corpus.

    It compiles the train step of every phase for the topology, which takes about a minute each for large models. It
    takes every flag of the config that `pretrain` takes; --mesh.data, --mesh.fsdp and --mesh.tensor lay the mesh.
    """

    topology: str
    """Where: v5e:16x16, 2xv5e:16x16 for two slices of it; of GPUs, nodes x GPUs in each, as in h100:8x8."""
    micro_batch: str | None = None
    """Rows of a micro-batch on each device. Without it, phases.N.accumulation says how an update is cut."""
    price_per_chip_hour: float | None = None
    """What a chip costs for an hour, for the cost of the run; in any currency."""
    search: bool = False
    """First look for the mesh, micro-batches and model.remat that fit and are fastest, compiling at most 6 programs."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Evaluate:
    """Held-out metrics of a run's newest checkpoint with their baselines, on the devices that are here."""

    workdir: tyro.conf.Positional[Place]
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
    """Fill the [MASK]s of a text."""

    model: tyro.conf.Positional[Place]
    """Work directory of a run, or an exported model."""
    text: tyro.conf.Positional[str]
    """Text with one or more [MASK]."""
    top: int = 5
    """Candidates per [MASK]."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Convert:
    """Write a model in another format, and prove that it is the same one."""

    source: tyro.conf.Positional[Place]
    """A run's work directory, or a model: a directory of Hugging Face's, of TensorFlow 1 or Flax, a .pt of fairseq or
    NVIDIA, one of ours. Which it is, is seen (docs/conversion.md)."""
    destination: tyro.conf.Positional[Place]
    """Directory to make; it must not exist."""
    to: Literal["huggingface", "pytorch", "tensorflow1", "bert-jax", "stablehlo"] = "huggingface"
    """Format to write."""
    moments: Literal["drop", "keep"] = "drop"
    """What becomes of the optimizer's moments; bert-jax and tensorflow1 can hold them."""
    drop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="PATTERN")] = ()
    """Leave out tensors of the source by their names (* stands for anything). Give it once for each of several."""
    trim_vocabulary: bool = False
    """Cut the rows behind the tokenizer's last token, which padded vocabularies have."""
    force: bool = False
    """Keep what was written even if the parity report fails."""
    json: bool = False
    """Print the parity report as JSON instead of a table."""
