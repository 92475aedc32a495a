"""Input and result of the checks of `bert-jax doctor`. Needs no jax."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bert_jax.config import Config
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CYCLE_ROWS, MixtureOrder, order_by_phase
from bert_jax.storage.paths import StoredPath

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """One finding: as text for people, as values for scripts."""

    level: Level
    """An error means that `bert-jax pretrain` would refuse the run, or that a documented guarantee does not hold."""
    name: str
    """What was checked, in one word."""
    text: str
    """The finding with its figures, and a remedy unless the level is ok."""
    values: dict[str, Any]
    """The same as plain values; shares are in [0, 1]."""

    def __str__(self) -> str:
        return f"{self.level:<7}  {self.name:<10}  {self.text}"


def finding(name: str, text: str, values: dict[str, Any], remedy: str = "", level: Level = "warning") -> Finding:
    """A finding of level ok, or with a remedy one of another level."""
    return Finding(level, name, f"{text}: {remedy}", values) if remedy else Finding("ok", name, text, values)


class Machine(NamedTuple):
    """Devices of a run: visible or planned ones."""

    devices: int
    """Number of devices of all processes."""
    hosts: int
    """Number of processes, one per host."""
    slices: int
    """Number of slices; the axes fsdp and tensor may not span slices."""
    memory: float | None
    """Bytes that a program may use on a device; None if unknown."""
    text: str
    """Description of the devices for the findings."""
    kind: str = ""
    """`device_kind` of jax; empty if unknown."""
    reports_memory: bool = False
    """Whether the devices report `memory` themselves, so that `pretrain` chooses micro-batches by it; CPUs do not."""
    most_memory: float | None = None
    """Bytes that no program on a device can exceed: of a CPU, its share of the host's memory, `memory` is the part that
    is free; None: unknown, or not the host's."""


ONE_DEVICE = Machine(1, 1, 1, None, "one device, assumed")


@dataclass(frozen=True)
class CheckContext:
    """Input of every check. The checks of corpora run only if the corpora could be opened."""

    config: Config
    corpora: list[Corpus]
    """Train splits, in the order of `open_corpora`; empty if they cannot be opened."""
    mixture_order: MixtureOrder | None
    """Order in which the corpora share the rows of phases without `corpus_weights`; None without corpora."""
    machine: Machine = ONE_DEVICE
    paths: tuple[str, ...] = ()
    """Paths of the corpora, as given."""
    workdir: StoredPath | None = None
    """Work directory of the run, if given."""
    micro_batch: int | Literal["auto"] | None = None
    """Same as the flag of `bert-jax pretrain`."""
    reports: tuple[dict[str, Any], ...] = ()
    """A report of each process (`doctor.run_doctor`)."""
    planned_tokens: float = 500e6
    """Tokens per corpus and phase that are planned to count rows and epochs, which takes a few seconds; of larger
    corpora, evenly spaced windows."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of the rows by `Corpus.identity`."""
        counts = [] if self.mixture_order is None else self.mixture_order.counts.tolist()
        return {corpus.identity: count / CYCLE_ROWS for corpus, count in zip(self.corpora, counts, strict=True)}

    @property
    def orders(self) -> list[MixtureOrder]:
        """The order in each phase.

        Raises:
          UserError: see `order_by_phase`.
        """
        return order_by_phase(self.config, [corpus.name for corpus in self.corpora], list(self.shares.values()))
