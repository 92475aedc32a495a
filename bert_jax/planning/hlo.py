"""What a compiled program sends between devices, read from its HLO text as XLA writes it for CPUs and TPUs."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BETWEEN_SLICES = "send"
"""How XLA for TPUs writes what leaves a slice: a transfer that the hosts carry out, beside collectives in the slice."""
_CALLED = re.compile(r"\b(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One exchange, and how often a run of the program makes it."""

    kind: str
    """One of `KINDS`, or `BETWEEN_SLICES`."""
    shapes: tuple[str, ...]
    """Of its results on each device, as in ``f32[512,128]``; of what is sent for `BETWEEN_SLICES`."""
    bytes: int
    """Of the whole arrays, once: all-gather's results, reduce-scatter's operands, of all others either."""
    turns: int
    """Times that a run of the program does it: turns of the loops that it stands in."""
    group: tuple[int, ...]
    """Of one group of devices that exchange with each other, their places in the (slice of the) mesh."""
    source: str
    """What it was in jax, as in ``jit(train_step)/shard_map/psum``; empty if XLA invented it."""

    @property
    def sent(self) -> int:
        """Bytes that a device sends for it in a ring of many devices: a sum passes twice, all others once."""
        return self.turns * self.bytes * (2 if self.kind == "all-reduce" else 1)


def collectives(hlo: str, unknown_turns: int = 1) -> list[Collective]:
    """All exchanges of one run of a program, in the order of its text.

    Both branches of a condition count. An exchange that XLA for TPUs has spread over a chain of fusions counts once.

    Args:
      hlo: `compiled.as_text()`.
      unknown_turns: of a loop whose bound only a run knows.
    """
    computations = _split(hlo)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry, "no ENTRY computation"
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    return list(_walk(computations, entry[1], 1, unknown_turns, int(partitions[1]) if partitions else 0))


def bytes_by_kind(found: Iterable[Collective]) -> dict[str, int]:
    """Bytes of whole arrays over all turns, for each kind that occurs."""
    totals: Counter[str] = Counter()
    for collective in found:
        totals[collective.kind] += collective.turns * collective.bytes
    return dict(totals)


def sent(found: Iterable[Collective]) -> int:
    """Bytes that a device sends in a run of the program, to others in its slice and to other slices."""
    return sum(collective.sent for collective in found)


def _split(hlo: str) -> dict[str, list[str]]:
    """Lines of each computation, without the comments that count elements of long tuples."""
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
    computations: dict[str, list[str]], name: str, turns: int, unknown: int, partitions: int
) -> Iterator[Collective]:
    lines = computations.get(name, [])
    # The links of a chain repeat its exchange; the one that starts it is told by this call beside it.
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
                yield _collective(line, shape, operation, turns, partitions)
        elif operation == BETWEEN_SLICES and "is_host_transfer=true" in line:
            yield _sent_away(line, shape, turns)
        inner = turns
        if operation == "while":
            inner *= _turns(computations, lines, line, unknown)
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [branch.strip(" %") for branch in branches.split(",")]
        for callee in called:
            yield from _walk(computations, callee, inner, unknown, partitions)


def _collective(line: str, shape: str, operation: str, turns: int, partitions: int) -> Collective:
    if operation in ("all-gather-start", "collective-permute-start"):
        shape = _parts(shape)[1]  # (operands, results, ...)
    kind, group = operation.removesuffix("-start"), _group(line, partitions)
    size = _size(shape) * (len(group) if kind == "reduce-scatter" else 1)
    return Collective(kind, _arrays(shape), size, turns, group, _source(line))


def _sent_away(line: str, shape: str, turns: int) -> Collective:
    array = _parts(shape)[0]
    return Collective(BETWEEN_SLICES, _arrays(array), _size(array), turns, (), _source(line))


def _source(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1] if name else ""


def _group(line: str, partitions: int) -> tuple[int, ...]:
    """The first group of devices: listed, as [groups,devices]<=[...], or as axes of a mesh."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, listed[1].split(",")))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", line):
        grid = _numbered(map(int, iota[2].split(",")))
        order = tuple(map(int, iota[3].split(","))) if iota[3] else None
        return tuple(grid.transpose(order).reshape(-1, int(iota[1]))[0].tolist())
    if mesh := re.search(r"replica_groups=\w+\[([^\]]*)\] *\{([^}]*)\}", line):
        sizes, axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1])), re.findall(r"'(\w+)'", mesh[2])
        index = tuple(slice(None) if axis in axes else 0 for axis in sizes)
        return tuple(_numbered(map(int, sizes.values()))[index].ravel().tolist())
    return tuple(range(partitions))


def _numbered(sizes: Iterable[int]) -> np.ndarray:
    grid = tuple(sizes)
    return np.arange(math.prod(grid)).reshape(grid)


def _turns(computations: dict[str, list[str]], lines: list[str], line: str, unknown: int) -> int:
    """Of a while loop: as XLA notes it, or as its condition compares a counter, which steps by one, with a constant."""
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
    """Value of an integer that is a constant, or a copy of one."""
    line = _definition(lines, name)
    if found := re.search(r" constant\((-?\d+)\)", line):
        return int(found[1])
    copied = re.search(r" copy\([^%]*%([\w.\-]+)\)", line)
    return _constant(lines, copied[1]) if copied else None


def _parts(shape: str) -> list[str]:
    """Elements of a tuple's shape; of anything else, itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for i, character in enumerate(shape):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:i].strip())
            begin = i + 1
    return parts


def _arrays(shape: str) -> tuple[str, ...]:
    return tuple(f"{kind}[{dims}]" for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape))


def _size(shape: str) -> int:
    """Bytes of all arrays of a shape, tiles not filled up; types of less than a byte count as one."""
    total = 0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", kind)
        width = 1 if kind == "pred" else 0 if bits is None else max(1, int(bits[0]) // 8)  # none: token, opaque
        total += width * math.prod(map(int, filter(None, dims.split(","))))
    return total
