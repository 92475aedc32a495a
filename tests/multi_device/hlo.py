"""What a compiled program sends between devices, read from its HLO text."""

import math
import re

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8, "s64": 8}


def collective_bytes(hlo: str) -> int:
    """Bytes that all collectives of one run of the program produce; those in a loop count once per turn.

    Scalars and other small results (up to 4 kB: weights, metrics) are left out.
    """
    computations = _split(hlo)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry, "no ENTRY computation"
    return _count(computations, entry[1])


def _split(hlo: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    name = None
    for line in hlo.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header[1]
            computations[name] = []
        elif name is not None:
            computations[name].append(line)
    return computations


def _count(computations: dict[str, list[str]], name: str) -> int:
    total = 0
    for line in computations.get(name, []):
        instruction = re.search(r"= (.*?) ([a-z][\w\-]*)\(", line)
        if not instruction:
            continue
        operation = instruction[2].removesuffix("-start")
        if operation in COLLECTIVES:
            size = _size(instruction[1])
            total += size if size > 4096 else 0
        turns = 1
        if operation == "while":
            known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            assert known, f"a loop of unknown length: {line}"
            turns = int(known[1])
        for callee in re.findall(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line):
            total += turns * _count(computations, callee)
    return total


def _size(shape: str) -> int:
    sizes = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(_BYTES[kind] * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in sizes)
