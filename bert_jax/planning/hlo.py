"""Collectives of a compiled program, parsed from its HLO text as XLA prints it for CPUs, GPUs and TPUs."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from bert_jax.chips import Sizes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "send"
"""Operation of XLA for TPUs that transfers data between slices through the hosts; collectives stay within a slice."""
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective, and how often a run of the program executes it."""

    kind: str
    """One of `KINDS`, or `BETWEEN_SLICES`."""
    shapes: tuple[str, ...]
    """Shapes of the results on each device, as in ``f32[512,128]``; of the sent array for `BETWEEN_SLICES`."""
    bytes: int
    """Bytes of the whole arrays of one execution: results of all-gather, operands of reduce-scatter, else either."""
    executions: int
    """Executions per run of the program: the product of the trip counts of the enclosing loops."""
    group: tuple[int, ...]
    """Positions in the mesh (of a slice) of one group of devices that take part in the collective together."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that a device sends in a ring of many devices: twice the array for an all-reduce, else once."""
        return self.executions * self.bytes * (2 if self.kind == "all-reduce" else 1)


def parse_collectives(hlo: str, unknown_trip_count: int = 1) -> list[Collective]:
    """All collectives of one run of a program, in the order of its text.

    Both branches of a conditional count. A collective that XLA for TPUs spreads over a chain of fusions counts once.

    Args:
      hlo: `compiled.as_text()`.
      unknown_trip_count: trip count of loops whose bound is known only at run time.
    """
    computations, entry = split_computations(hlo)
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    return list(_walk(computations, entry, 1, unknown_trip_count, int(partitions[1]) if partitions else 0))


def split_computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation of a program, by its name, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = lines = None
    for line in hlo.splitlines():
        if header := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif lines is not None:
            lines.append(line)
    assert entry, "no ENTRY computation"
    return computations, entry


def array_bytes_by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes of whole arrays over all executions, by kind."""
    totals: Counter[str] = Counter()
    for collective in collectives:
        totals[collective.kind] += collective.executions * collective.bytes
    return dict(totals)


def bytes_sent_by_axis(collectives: Iterable[Collective], sizes: Sizes) -> dict[str, float]:
    """Bytes that a device sends per step along each axis of the mesh and between slices, for the roofline.

    A collective over several axes counts for the first of them. In a ring of n devices, each keeps its own n-th part.
    One across slices (nodes of GPUs) has two stages: rings inside of them, then rings of the parts between them.
    """
    inside = (sizes.data // sizes.slices, sizes.fsdp, sizes.tensor)
    sent = dict.fromkeys(("data", "fsdp", "tensor", "network"), 0.0)
    for one in collectives:
        if one.kind == BETWEEN_SLICES:  # the hosts compute the sum
            sent["network"] += 2 * one.executions * one.bytes * (sizes.slices - 1) / sizes.slices
        elif len(one.group) > 1:
            positions = np.array(one.group)
            slices = len(set(positions // math.prod(inside)))
            near = len(positions) // slices
            sent["network"] += one.bytes_sent / near * (slices - 1) / slices
            if near > 1:
                coordinates = np.unravel_index(positions[:near] % math.prod(inside), inside)
                axis = next(name for name, along in zip(sent, coordinates, strict=False) if np.ptp(along))
                sent[axis] += one.bytes_sent * (near - 1) / near
    return sent


def _walk(
    computations: dict[str, list[str]], name: str, executions: int, unknown: int, partitions: int
) -> Iterator[Collective]:
    lines = computations.get(name, [])
    # All links of a chain repeat its collective; the first link is recognised by this call.
    starts_chain = any('custom_call_target="AsyncCollectiveStart"' in line for line in lines)
    for line in lines:
        instruction = re.search(r"= (.*?) ([a-z][\w\-]*)\((.*?)\)", line)
        if not instruction:
            continue
        arrays, operation = arrays_of(instruction[1]), instruction[2]
        if operation.endswith(("-done", "-update")):
            continue
        kind = operation.removesuffix("-start")
        if kind in KINDS and (starts_chain or "chain_id=" not in line):
            if operation in ("all-gather-start", "reduce-scatter-start", "collective-permute-start"):
                # (operands, results, ...)
                operands = instruction[3].count("%")
                arrays = arrays[operands : 2 * operands]
            group = _group(line, partitions)
            size = num_bytes(arrays) * (len(group) if kind == "reduce-scatter" else 1)
            yield Collective(kind, _shapes(arrays), size, executions, group)
        elif operation == BETWEEN_SLICES and "is_host_transfer=true" in line:
            yield Collective(BETWEEN_SLICES, _shapes(arrays[:1]), num_bytes(arrays[:1]), executions, ())
        trips = trip_count(computations, line, unknown) if operation == "while" else 1
        for callee in called(line):
            yield from _walk(computations, callee, executions * trips, unknown, partitions)


def called(line: str) -> list[str]:
    """Names of the computations that an instruction calls, conditions of loops left out."""
    branches = [name.strip(" %") for listed in _BRANCHES.findall(line) for name in listed.split(",")]
    return _CALLED.findall(line) + branches


def _group(line: str, partitions: int) -> tuple[int, ...]:
    """The first group of devices, given as a list, as [groups,devices]<=[...], or as axes of a mesh."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, listed[1].split(",")))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", line):
        grid = tuple(map(int, iota[2].split(",")))
        order = tuple(map(int, iota[3].split(","))) if iota[3] else None
        devices = np.arange(math.prod(grid)).reshape(grid).transpose(order)
        return tuple(devices.reshape(-1, int(iota[1]))[0].tolist())
    if mesh := re.search(r"replica_groups=\w+\[([^\]]*)\] *\{([^}]*)\}", line):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        axes = re.findall(r"'(\w+)'", mesh[2])
        return tuple(devices[tuple(slice(None) if axis in axes else 0 for axis in sizes)].ravel().tolist())
    return tuple(range(partitions))


def trip_count(computations: dict[str, list[str]], line: str, unknown: int) -> int:
    """Trip count of a while loop: as noted by XLA, or from a condition that compares a counter with a constant.

    The counter is assumed to start at 0, as that of `jax.lax.scan`.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = "\n".join(computations.get(re.search(r"condition=%?([\w.\-]+)", line)[1], []))
    compared = re.search(r"^\s*ROOT .* compare\(.*%([\w.\-]+)\), direction=LT", condition, re.M)
    bound = compared and re.search(rf"^\s*%{re.escape(compared[1])} = .* constant\((\d+)\)", condition, re.M)
    return int(bound[1]) if bound else unknown


def _shapes(arrays: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{kind}[{dims}]" for kind, dims in arrays)


def arrays_of(text: str) -> list[tuple[str, str]]:
    """Types and dimensions of all arrays in a shape, as in ``("f32", "512,128")``."""
    return _ARRAY.findall(text)


def num_bytes(arrays: Iterable[tuple[str, str]]) -> int:
    """Bytes of all arrays, without padding to tiles; types smaller than a byte count as one byte."""
    total = 0
    for kind, dims in arrays:
        bits = re.search(r"\d+", kind)
        width = 1 if kind == "pred" else 0 if bits is None else max(1, int(bits[0]) // 8)  # none: token, opaque
        total += width * math.prod(map(int, filter(None, dims.split(","))))
    return total
