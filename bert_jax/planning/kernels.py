"""Kernels of a program that XLA compiled for a GPU or a TPU: what each one reads and writes, by kind of work.

The figures are those of the program's text; nothing is timed. A kernel is an instruction outside of fusions. Programs
for TPUs have the compiler's estimate of the cycles of most kernels, not of those of Pallas. The bytes of a kernel are
those of its operands and results: each array once, however often the kernel reads it from caches. Of an array that a
fusion only slices, or updates in place, the part counts.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.planning import hlo

KINDS = (
    "products",
    "attention",
    "other Pallas kernels",
    "collectives",
    "copies",
    "optimizer",
    "lookups",
    "reductions",
    "element-wise",
)
"""Kinds of kernels, in the order of tables.

- products: matrix products of libraries and of XLA, with the epilogue that is part of them;
- attention: the kernels of `model.attention pallas_gpu` and `pallas_tpu`;
- copies: slices, transposes, casts, concatenations and padding, and what is cheaper than they are;
- optimizer: all other kernels outside of the gradient;
- lookups: gathers and scatters."""
ATTENTION = re.compile(r"\b(forward|backward|query_gradient|key_gradient)_kernel\b")
NO_KERNEL = {
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "while", "call", "conditional", "async-start", "async-done", "async-update", "AllocateBuffer"),
    "ConcatBitcast",
}
"""Operations, and targets of custom calls, that no kernel computes."""
MOVES = {"transpose", "copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "reshape"}
MOVES |= {"copy-start", "slice-start"}
CHEAP = {"convert", "compare", "select", "add", "multiply", "subtract", "clamp", "reverse", "bitcast-convert"}
"""Operations that a kernel of copies may have besides."""
FREE = {"parameter", "constant", "bitcast", "tuple", "broadcast", "iota", "get-tuple-element"}
UNKNOWN_CYCLES = str(2**64 - 1)
"""libtpu's estimate for a kernel that it cannot rate."""
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)")


class Kernel(NamedTuple):
    """One kernel of a program."""

    name: str
    """Of the instruction."""
    kind: str
    """One of `KINDS`."""
    op_name: str
    """Path of the jax operation that it comes from."""
    result: str
    """Shapes of its results, as in ``f32[512,128] s32[7]``."""
    read: int
    """Bytes of one execution."""
    written: int
    """Bytes of one execution."""
    executions: int
    """Per run of the program: the product of the trip counts of the enclosing loops."""
    product: str | None
    """Batch x rows x columns x contracted size, type, and epilogue of a library's product."""
    cycles: int
    """Of one execution, as the compiler for TPUs estimates; 0 if it does not."""

    @property
    def bytes(self) -> int:
        """Bytes read and written in all executions."""
        return (self.read + self.written) * self.executions


class Total(NamedTuple):
    """Sum over kernels."""

    executions: int
    bytes: int
    cycles: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    is_root: bool
    shape: str
    operation: str
    operands: tuple[str, ...]
    line: str

    @property
    def bytes(self) -> int:
        """Of its results, without the workspace of a library's product."""
        arrays = hlo.arrays_of(self.shape)
        if "__cublas" in self.line:
            arrays = arrays[:1] if len(arrays) == 2 and arrays[1][0] == "s8" else arrays
        return hlo.num_bytes(arrays)


_Program = Mapping[str, Sequence[_Instruction]]


def parse_kernels(text: str, unknown_trip_count: int = 1) -> list[Kernel]:
    """All kernels of a program for one device, in the order in which they are scheduled.

    Both branches of a conditional count.

    Args:
      text: `compiled.as_text()`.
      unknown_trip_count: trip count of loops whose bound is known only at run time.
    """
    lines, entry = hlo.split_computations(text)
    program = {name: [one for line in body if (one := _parse(line))] for name, body in lines.items()}

    def walk(name: str, executions: int) -> Iterator[Kernel]:
        named = {one.name: one for one in program[name]}
        for one in program[name]:
            if one.operation in ("while", "call", "conditional", "async-start"):
                trips = hlo.trip_count(lines, one.line, unknown_trip_count) if one.operation == "while" else 1
                for callee in hlo.called(one.line):
                    yield from walk(callee, executions * trips)
            elif not one.operation.endswith("-done") and NO_KERNEL.isdisjoint((one.operation, _target(one))):
                yield _kernel(one, named, program, executions)

    return list(walk(entry, 1))


def sum_kernels_by_kind(kernels: Iterable[Kernel]) -> dict[str, Total]:
    """Executions, bytes and cycles of kernels by kind, in the order of `KINDS`."""
    kernels = list(kernels)
    by_kind = {kind: sum_kernels(one for one in kernels if one.kind == kind) for kind in KINDS}
    return {kind: found for kind, found in by_kind.items() if found.executions}


def sum_kernels(kernels: Iterable[Kernel]) -> Total:
    """Executions, bytes and cycles of kernels."""
    rows = [(one.executions, one.bytes, one.cycles * one.executions) for one in kernels]
    return Total(*map(sum, zip(*rows, strict=True))) if rows else Total(0, 0, 0)


def _target(one: _Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.line)
    return found[1] if found else ""


def _parse(line: str) -> _Instruction | None:
    if not (found := _INSTRUCTION.match(line)):
        return None
    root, name, shape, operation, operands = found.groups()
    return _Instruction(name, bool(root), shape, operation, tuple(re.findall(r"%([\w.\-]+)", operands)), line)


def _kernel(one: _Instruction, named: Mapping[str, _Instruction], program: _Program, executions: int) -> Kernel:
    callees = hlo.called(one.line) if one.operation.startswith("fusion") else []
    body = program[callees[0]] if callees else []
    inside = {each.name: each for each in body}
    sizes = [named[name].bytes if name in named else 0 for name in one.operands]
    if body:
        read = sum(_read(body, number, size) for number, size in enumerate(sizes))
        written = sum(_written(each, inside) for each in body if each.is_root)
    else:
        read, written = sum(dict(zip(one.operands, sizes, strict=True)).values()), one.bytes
        if one.operation in ("slice", "dynamic-slice"):
            read = written
        elif one.operation == "dynamic-update-slice":
            read = written = sizes[1]
    product = next((each for each in (one, *body) if "__cublas" in each.line), None)
    origin = re.search(r'op_name="([^"]*)"', one.line)
    op_name = origin[1] if origin else ""
    result = " ".join(f"{kind}[{dims}]" for kind, dims in hlo.arrays_of(one.shape))
    described = _product(product, inside if product in body else named) if product else None
    estimate = re.search(r'"estimated_cycles":"(\d+)"', one.line)
    cycles = int(estimate[1]) if estimate and estimate[1] != UNKNOWN_CYCLES else 0
    return Kernel(one.name, _kind(one, body, op_name), op_name, result, read, written, executions, described, cycles)


def _kind(one: _Instruction, body: Sequence[_Instruction], op_name: str) -> str:
    operations = {each.operation for each in body or [one]} - FREE
    if "__cublas" in one.line or any("__cublas" in each.line for each in body) or operations & {"dot", "convolution"}:
        return "products"
    if one.operation == "custom-call":
        return "attention" if ATTENTION.search(op_name) else "other Pallas kernels"
    if one.operation.removesuffix("-start") in hlo.KINDS:
        return "collectives"
    moves = {"convert"} if "jvp" in op_name else set()
    if (operations <= MOVES | CHEAP and operations & MOVES) or operations <= moves:
        return "copies"
    if "jvp" not in op_name:
        return "optimizer"
    if operations & {"gather", "scatter"}:
        return "lookups"
    return "reductions" if operations & {"reduce", "reduce-window"} else "element-wise"


def _read(body: Sequence[_Instruction], number: int, size: int) -> int:
    """Bytes that a fusion reads of an operand: of one that it only slices, the slices."""
    users = defaultdict(list)
    for one in body:
        for operand in one.operands:
            users[operand].append(one)

    def of(name: str) -> int:
        total = 0
        for user in users[name]:
            if user.operation in ("slice", "dynamic-slice", "gather"):
                total += user.bytes
            elif user.operation == "bitcast":
                total += of(user.name)
            elif user.operation != "dynamic-update-slice" or user.operands[0] != name:
                return size
        return min(total, size)

    parameter = next((one for one in body if re.search(rf" parameter\({number}\)", one.line)), None)
    return of(parameter.name) if parameter else size


def _written(one: _Instruction, inside: Mapping[str, _Instruction]) -> int:
    """Bytes that the root of a fusion writes: of an array that it updates in place, the update."""
    operands = [inside[name] for name in one.operands if name in inside]
    if one.operation == "tuple":
        return sum(_written(each, inside) for each in operands)
    if one.operation == "dynamic-update-slice":
        return operands[1].bytes
    if one.operation == "bitcast":
        return _written(operands[0], inside)
    return one.bytes


def _product(one: _Instruction, named: Mapping[str, _Instruction]) -> str:
    """Sizes, type and epilogue of a product of cuBLAS."""
    (kind, left), (_, right) = (hlo.arrays_of(named[name].shape)[0] for name in one.operands[:2])

    def size(dims: str, side: str, group: str) -> int:
        found = re.search(rf'"{side}_{group}_dimensions":\[([^\]]*)\]', one.line)
        shape = [int(size) for size in dims.split(",") if size]
        return math.prod(shape[int(i)] for i in re.findall(r"\d+", found[1]))

    batch, contracted = size(left, "lhs", "batch"), size(left, "lhs", "contracting")
    sizes = (math.prod(map(int, dims.split(","))) // batch // contracted for dims in (left, right))
    epilogue = re.search(r'"epilogue":"(\w+)"', one.line)[1].replace("DEFAULT", "")
    added = "+C" if not re.search(r'"beta":0\b', one.line) else ""
    return " ".join(filter(None, ("x".join(map(str, (batch, *sizes, contracted))), kind, epilogue, added)))
