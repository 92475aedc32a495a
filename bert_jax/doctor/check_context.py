"""What the checks of `bert-jax doctor` look at. Needs no jax."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder
from bert_jax.storage import StoredPath


class Machine(NamedTuple):
    """Devices of a run: those that are seen, or those that are planned."""

    devices: int
    """Of all processes."""
    hosts: int
    """Processes, one per host."""
    slices: int
    """That the devices lie in, which fsdp and tensor may not span."""
    memory: float | None
    """Bytes that a program may use on a device; None if unknown."""
    text: str
    """Which devices these are, for a person."""
    kind: str = ""
    """As jax calls the devices; empty if unknown."""
    reports_memory: bool = False
    """Whether they report `memory` themselves, so that `pretrain` chooses micro-batches by it; CPUs do not."""


ONE = Machine(1, 1, 1, None, "one device, assumed")


@dataclass(frozen=True)
class Asked:
    """What the checks are about. Those of corpora come only if these could be opened."""

    config: Config
    corpora: list[Corpus]
    """Train splits, in the order of `parts.opened`; none if they cannot be opened."""
    turns: MixtureOrder | None
    """How they share the rows; None if there are none."""
    machine: Machine = ONE
    paths: tuple[str, ...] = ()
    """Where the corpora lie, as given."""
    workdir: StoredPath | None = None
    """Of the run, if it is given."""
    micro_batch: int | Literal["auto"] | None = None
    """As `bert-jax pretrain` takes it."""
    reports: tuple[dict[str, Any], ...] = ()
    """A report of each process (distributed/process_report.py), with its `sight` (shared_storage_probe.py)."""

    windows: int | None = None
    """Of a corpus (4 M tokens each) that are planned to count rows and epochs; None: as many as take some seconds."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of the rows by `Corpus.identity`."""
        counts = [] if self.turns is None else self.turns.counts.tolist()
        return {corpus.identity: count / CYCLE_ROWS for corpus, count in zip(self.corpora, counts, strict=True)}
