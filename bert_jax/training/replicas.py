"""Finds devices whose copy of the training state is corrupted: replicas are compared, bit for bit.

Devices that have the same part of an array compute the same values for it, so that their copies stay equal. A flipped
bit in the memory of one, or a wrong result, makes them differ from then on, and no metric need show it. So every
`recovery.replica_check_every` steps, and before the state is saved, each device sums a hash of its parts of parameters
and optimizer state, and every process compares the sums of all devices. Equal sums of different copies have a chance of
2^-32; a change of one element always changes the sum.

It cannot find what all replicas share, such as a corrupted gradient, which all of them add, nor a change of a part that
no other device has, as of what ``fsdp`` splits if ``data`` and ``tensor`` are 1.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from bert_jax.array_types import Array, UInt32
from bert_jax.distributed.agreement import all_gather
from bert_jax.distributed.device_errors import compile_program
from bert_jax.model.dropout import hash32
from bert_jax.training.divergence import DivergedError, DivergenceError, RollbackError
from bert_jax.training.programs import Programs
from bert_jax.training.sharding import AXES, compute_on_each_device, replica_axes, replicated
from bert_jax.training.state import TrainState

ODD = 0x9E3779B1
"""Multiplied with the index of an element; odd, so that the elements of an array have different products."""
CHECK_EVERY = {"cpu": 100, "tpu": 100}
"""Default of `recovery.replica_check_every` by platform; other platforms never compare by default."""
MAX_NAMED = 8
"""Devices in a message."""


class ReplicaError(RollbackError):
    """Replicas of the state differ; `first` and `last` are the step of the comparison."""

    event, what = "replicas", "replicas of the parameters differ"
    advice = (
        "replace the host that is named, or leave it out. If it happens on all hosts, set "
        "--recovery.replica-check-every 0: the sums of these devices may not be equal on all of them"
    )


class Comparison(NamedTuple):
    """How the states of a phase are compared."""

    leaves: list[int]
    """Indices of the leaves of a state that several devices have."""
    axes: list[tuple[str, ...]]
    """By column of the sums: the axes along which they must be equal."""
    sums: Callable[[list[Array]], UInt32[Array, "data fsdp tensor columns"]]
    """Of these leaves; compiled, on every device."""


def make_comparison(state: Any) -> Comparison | None:
    """How to compare states.

    Args:
      state: shapes and shardings, abstract or real.

    Returns:
      None if no leaf has replicas.
    """
    abstract = jax.tree.leaves(state)
    shared = [i for i, leaf in enumerate(abstract) if replica_axes(leaf.sharding)]
    if not shared:
        return None
    leaves = [abstract[i] for i in shared]
    shardings = [leaf.sharding for leaf in leaves]
    columns: dict[tuple[str, ...], list[int]] = {}
    for i, sharding in enumerate(shardings):
        columns.setdefault(replica_axes(sharding), []).append(i)

    def sums(parts: list[Array]) -> UInt32[Array, " columns"]:
        return jnp.stack([sum((hash_sum(parts[i], i) for i in of), jnp.uint32(0)) for of in columns.values()])

    gathered = replicated(shardings[0].mesh)
    program = jax.jit(compute_on_each_device(sums, shardings), in_shardings=(shardings,), out_shardings=gathered)
    return Comparison(shared, list(columns), compile_program(program.trace(leaves)))


def hash_sum(x: Array, salt: int) -> UInt32[Array, ""]:
    """The sum modulo 2^32 of a hash of each element, its place and a salt. One pass over memory: it has no reshape.

    For each place and salt, the hash is a bijection of the element's bits.
    """
    kind = jnp.uint8 if x.dtype == bool else f"uint{8 * x.dtype.itemsize}"
    words = (x.astype(kind) if x.dtype == bool else lax.bitcast_convert_type(x, kind)).astype(jnp.uint32)
    place, stride = jnp.full(x.shape, salt, jnp.uint32) << 16, 1
    for axis in reversed(range(x.ndim)):
        place += lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride * ODD % 2**32)
        stride *= x.shape[axis]
    return hash32(words ^ place).sum(dtype=jnp.uint32)


def find_corrupted(
    sums: UInt32[np.ndarray, "data fsdp tensor columns"], axes: Sequence[tuple[str, ...]]
) -> tuple[list[tuple[int, ...]], bool]:
    """The places on the mesh whose sums differ, and whether a majority of their replicas says so.

    Without a majority, as with two replicas, all of them are returned, unless one is found by another column.

    Args:
      sums: of each device.
      axes: by column, those along which the sums must be equal.
    """
    numbers = np.arange(sums[..., 0].size).reshape(sums.shape[:3])
    corrupted: set[int] = set()
    undecided: list[set[int]] = []
    for column, along in enumerate(axes):
        moved = [AXES.index(axis) for axis in along]
        last, replicas = range(-len(moved), 0), np.prod([sums.shape[i] for i in moved])
        values, devices = (np.moveaxis(x, moved, last).reshape(-1, replicas) for x in (sums[..., column], numbers))
        differing = (values != values[:, :1]).any(1)
        for copies, places in zip(values[differing], devices[differing], strict=True):
            found, counts = np.unique(copies, return_counts=True)
            if 2 * counts.max() > replicas:
                corrupted |= {*places[copies != found[counts.argmax()]].tolist()}
            else:
                undecided.append({*places.tolist()})
    ties = [places for places in undecided if not places & corrupted]
    named = sorted(corrupted.union(*ties))
    return [tuple(map(int, np.unravel_index(place, numbers.shape))) for place in named], not ties


def describe_corrupted(mesh: Mesh, places: Sequence[tuple[int, ...]], by_majority: bool, hosts: Sequence[str]) -> str:
    """The devices at these places, with their processes and hosts, in words."""
    devices = [mesh.devices[place] for place in places]
    shown = [f"device {one.id} of process {one.process_index} ({hosts[one.process_index]})" for one in devices]
    names = ", ".join(shown[:MAX_NAMED]) + (f" and {len(shown) - MAX_NAMED} more" * (len(shown) > MAX_NAMED))
    if by_majority:
        return f"parameters or moments of {names} differ from those of the other replicas"
    return f"parameters or moments of {names} differ from each other, and no majority of replicas says which are right"


class ReplicaCheck:
    """The comparisons of an attempt. All processes make the same calls, and find the same.

    A context manager: after a divergence it compares the newest state, and if a replica is corrupted, it raises
    ReplicaError instead: the rows are not to blame.
    """

    def __init__(self, programs: Programs, newest_state: Callable[[], tuple[int, TrainState]]):
        """Compiles nothing yet.

        Args:
          programs: of the run.
          newest_state: called after a divergence; the step whose metrics were read, and the state.
        """
        self._programs, self._newest_state = programs, newest_state
        every = programs.task.config.recovery.replica_check_every
        self._every = CHECK_EVERY.get(programs.mesh.devices.flat[0].platform, 0) if every is None else every
        self._comparison: Comparison | None = None
        self._pending: tuple[int, Array] | None = None

    def enter_phase(self, phase: int) -> None:
        """Compile the comparison of the phase's states, if it is not there yet."""
        if self._every:
            abstract = self._programs.abstract_state(phase)
            self._comparison = self._programs.once(("replicas", phase), lambda: make_comparison(abstract))

    def add_step(self, step: int, state: TrainState) -> None:
        """Start a comparison if it is due, and read the one that was started after the step before.

        It is called when the metrics of the step before have been read, and so hardly waits for the devices.

        Args:
          step: number of steps done, that of the state included.
          state: which a later step may donate.

        Raises:
          ReplicaError: the replicas differed.
        """
        self._read()
        if self._every and step % self._every == 0:
            self._start(step, state)

    def check(self, step: int, state: TrainState) -> None:
        """Compare the replicas of this state, after this step; waits for the devices.

        Raises:
          ReplicaError: they differ.
        """
        if self._pending is None or self._pending[0] != step:
            self._start(step, state)
        self._read()

    def _start(self, step: int, state: TrainState) -> None:
        if self._comparison is not None:
            leaves = jax.tree.leaves(state)
            self._pending = step, self._comparison.sums([leaves[i] for i in self._comparison.leaves])

    def _read(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or self._comparison is None:
            return
        step, sums = pending
        places, by_majority = find_corrupted(jax.device_get(sums), self._comparison.axes)
        if places:
            hosts = all_gather("hosts of replicas", socket.gethostname())
            found = describe_corrupted(self._programs.mesh, places, by_majority, hosts)
            raise ReplicaError(step, step, f"at step {step:,}, {found}")

    def __enter__(self) -> "ReplicaCheck":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DivergenceError | DivergedError):
            self.check(*self._newest_state())
