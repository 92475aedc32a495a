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
