"""What a traced function is made of, so that an equivalence test can prove that its two sides differ."""

from collections import Counter
from typing import Any

import jax


def primitives(function, *arguments: Any) -> Counter:
    """How often each primitive occurs in the traced function, inner functions included."""
    counts: Counter = Counter()
    _count(jax.make_jaxpr(function)(*arguments).jaxpr, counts)
    return counts


def scans(function, *arguments: Any) -> list[tuple[int, int]]:
    """(length, unroll) of every scan."""
    found: list[tuple[int, int]] = []
    _count(jax.make_jaxpr(function)(*arguments).jaxpr, Counter(), found)
    return found


def _count(jaxpr: Any, counts: Counter, scans: list | None = None) -> None:
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        if scans is not None and equation.primitive.name == "scan":
            scans.append((equation.params["length"], equation.params["unroll"]))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    _count(inner, counts, scans)


SLOW = {"exp", "exp2", "erf", "tanh"}
"""Primitives that count as 20 operations."""
NO_OPERATION = {"broadcast_in_dim", "convert_element_type", "dot_general", "get", "reshape", "swap"}


def operations(function, *arguments: Any, elements: int) -> int:
    """Operations that a traced function computes on arrays of this many elements, per element.

    Equal operations on equal operands count once, as a compiler computes them once; a reduction counts by its operand.
    Of the branches by platform, the last one counts: it is that of all platforms which are not named.
    """
    traced = jax.make_jaxpr(function)(*arguments).jaxpr
    found: dict[tuple, str] = {}
    _find_operations(traced, list(traced.invars), elements, found)
    return sum(20 if name in SLOW else 1 for name in found.values() if name not in NO_OPERATION)


def _find_operations(jaxpr: Any, inputs: list, elements: int, found: dict[tuple, str]) -> list:
    """Add the operations on large arrays to `found`, by what they compute; returns what the outputs are."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(value: Any) -> Any:
        return known.get(value, value) if isinstance(value, jax.extend.core.Var) else str(value)

    for equation in jaxpr.eqns:
        name, params, operands = equation.primitive.name, equation.params, [of(x) for x in equation.invars]
        inner = params.get("jaxpr", params.get("call_jaxpr"))
        if name == "cond":
            inner, operands = params["branches"][-1], operands[1:]
        if inner is not None:
            inner = getattr(inner, "jaxpr", inner)
            is_kernel = len(inner.invars) != len(operands)
            results = _find_operations(inner, list(inner.invars) if is_kernel else operands, elements, found)
            results = list(equation.outvars) if is_kernel else results
        else:
            key = (name, *map(str, params.items()), *operands)
            results = [(key, i) for i in range(len(equation.outvars))]
            arrays = [*equation.outvars, *(equation.invars if name.startswith("reduce") else ())]
            if any(getattr(x.aval, "size", 0) >= elements for x in arrays):
                found[key] = name
        known |= dict(zip(equation.outvars, results, strict=True))
    return [of(x) for x in jaxpr.outvars]
