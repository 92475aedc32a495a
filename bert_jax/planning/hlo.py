"""Collectives of a compiled program, parsed from its HLO text as XLA prints it for CPUs and TPUs."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "send"
"""Operation of XLA for TPUs that transfers data between slices through the hosts; collectives stay within a slice."""
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


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
    computations = _split_computations(hlo)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry, "no ENTRY computation"
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    return list(_walk(computations, entry[1], 1, unknown_trip_count, int(partitions[1]) if partitions else 0))


def bytes_by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    """Bytes of whole arrays over all executions, by kind."""
    totals: Counter[str] = Counter()
    for collective in collectives:
        totals[collective.kind] += collective.executions * collective.bytes
    return dict(totals)


def _split_computations(hlo: str) -> dict[str, list[str]]:
    """Lines of each computation, without the comments that number the elements of long tuples."""
    computations: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header[1]
            computations[name] = []
        elif name is not None:
            computations[name].append(re.sub(r"/\*.*?\*/", "", line))
    return computations


def _walk(
    computations: dict[str, list[str]], name: str, executions: int, unknown: int, partitions: int
) -> Iterator[Collective]:
    lines = computations.get(name, [])
    # All links of a chain repeat its collective; the first link is recognised by this call.
    starts_chain = any('custom_call_target="AsyncCollectiveStart"' in line for line in lines)
    for line in lines:
        instruction = re.search(r"= (.*?) ([a-z][\w\-]*)\(", line)
        if not instruction:
            continue
        shape, operation = instruction[1], instruction[2]
        if operation.endswith(("-done", "-update")):
            continue
        if operation.removesuffix("-start") in KINDS:
            if starts_chain or "chain_id=" not in line:
                yield _collective(line, shape, operation, executions, partitions)
        elif operation == BETWEEN_SLICES and "is_host_transfer=true" in line:
            array = _tuple_elements(shape)[0]
            yield Collective(BETWEEN_SLICES, _array_shapes(array), _num_bytes(array), executions, ())
        inner_executions = executions
        if operation == "while":
            inner_executions *= _trip_count(computations, lines, line, unknown)
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip(" %") for branch in branches.split(",")]
        for callee in called:
            yield from _walk(computations, callee, inner_executions, unknown, partitions)


def _collective(line: str, shape: str, operation: str, executions: int, partitions: int) -> Collective:
    if operation in ("all-gather-start", "collective-permute-start"):
        shape = _tuple_elements(shape)[1]  # (operands, results, ...)
    kind, group = operation.removesuffix("-start"), _group(line, partitions)
    size = _num_bytes(shape) * (len(group) if kind == "reduce-scatter" else 1)
    return Collective(kind, _array_shapes(shape), size, executions, group)


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


def _trip_count(computations: dict[str, list[str]], lines: list[str], line: str, unknown: int) -> int:
    """Trip count of a while loop: as noted by XLA, or from a condition that compares a counter with a constant."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = computations.get(re.search(r"condition=%?([\w.\-]+)", line)[1], [])
    root = next((one for one in condition if one.lstrip().startswith("ROOT")), "")
    compared = re.search(r" compare\([^%]*%([\w.\-]+), [^%]*%([\w.\-]+)\), direction=LT", root)
    if not compared:
        return unknown
    counter = re.search(r"index=(\d+)", _definition(condition, compared[1]))
    bound = _constant(condition, compared[2])
    if counter is None or bound is None:
        return unknown
    start = None
    if carried := re.search(r" while\([^%]*%([\w.\-]+)\)", line):
        elements = re.search(r" tuple\((.*?)\)", _definition(lines, carried[1]))
        names = re.findall(r"%([\w.\-]+)", elements[1]) if elements else []
        start = _constant(lines, names[int(counter[1])]) if names else None
    return bound - (start or 0)


def _definition(lines: list[str], name: str) -> str:
    return next((line for line in lines if re.match(rf"\s*(?:ROOT )?%?{re.escape(name)} = ", line)), "")


def _constant(lines: list[str], name: str) -> int | None:
    """Value of an integer constant or of a copy of one; None for anything else."""
    line = _definition(lines, name)
    if match := re.search(r" constant\((-?\d+)\)", line):
        return int(match[1])
    copied = re.search(r" copy\([^%]*%([\w.\-]+)\)", line)
    return _constant(lines, copied[1]) if copied else None


def _tuple_elements(shape: str) -> list[str]:
    """Shapes of a tuple's elements; for other shapes, the shape itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:i].strip())
            begin = i + 1
    return parts


def _array_shapes(shape: str) -> tuple[str, ...]:
    return tuple(f"{kind}[{dims}]" for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape))


def _num_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, without padding to tiles; types smaller than a byte count as one byte."""
    total = 0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", kind)
        width = 1 if kind == "pred" else 0 if bits is None else max(1, int(bits[0]) // 8)  # none: token, opaque
        total += width * math.prod(map(int, filter(None, dims.split(","))))
    return total
