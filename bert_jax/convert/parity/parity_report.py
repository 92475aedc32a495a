"""The parity report of a conversion: compares two forward passes layer by layer, the tokenizers, and the parameters.

Shapes in names: B rows, S positions.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import numpy_forward, transformers_forward
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import first_architecture_difference
from bert_jax.training.param_paths import name_leaves

LIMIT = 1e-4
"""Largest difference of values whose root mean square is at most 1. Float32 has about 7 digits; 24 layers of sums lose
two of them. For larger values, the limit is multiplied by their root mean square."""
RELATIVE_LIMIT = 0.5
"""Root mean square of the difference of an int8 model, relative to that of the values. On the published MiniLM of 6
layers it is 0.17 with inputs that are quantised per batch, and 0.06 per group; logits near 0 have more,
another model has about 1.4 (docs/log/conversion.md, 2026-11-25)."""
ROUNDED_LIMITS = {"float16": 0.01, "bfloat16": 0.05}
"""The same for weights that were rounded to these dtypes, which have 11 and 8 bits; the computation is in float32."""
MEASURES = {
    "largest": "largest difference",
    "relative": "root mean square of the difference / of the values",
}
"""What the report gives of a layer or head, and its name in the table."""


class TokenizerAgreement(NamedTuple):
    """Agreement of several tokenizers on the same texts."""

    equal: int
    """Number of texts with the same ids in all tokenizers."""
    total: int
    first_difference: str | None
    """The first text with different ids."""
    source_library: str
    """The library that read the source's tokenizer, e.g. "transformers 5.23.0"."""
    written_library: str
    """The library that read the written tokenizer."""


class Difference(NamedTuple):
    """The difference of one layer or head."""

    name: str
    """Name in the report, e.g. "layer 3"."""
    value: float
    """At real tokens: the largest absolute difference, or another of MEASURES; NaN if either side has a value anywhere
    that is not finite."""
    limit: float
    """Upper bound of `value`."""
    measure: str = "largest"
    """One of MEASURES."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within its limit; NaN is not."""
        return self.value <= self.limit


Comparison = Callable[[str, np.ndarray, np.ndarray, np.ndarray], Difference]
"""(name, actual, expected, real_BS): the difference of one layer or head."""


@dataclass(frozen=True)
class ParityReport:
    """The report that a conversion prints and writes into the model card."""

    library: str
    """The library of the reference forward pass, e.g. "transformers 5.23.0", or "numpy"."""
    rows: int
    tokens: int
    """Real tokens in those rows."""
    differences: tuple[Difference, ...]
    """Of the layers, the first one first, then of the heads."""
    tokenizer: TokenizerAgreement | None
    """None if no tokenizers were compared."""
    problems: tuple[str, ...] = ()
    """One line for each part that could not be compared."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons why the report fails, one line each, bottom layer first; empty if it passes."""
        above = [
            f"{part.name} differs by {_number(part.value)}, the limit is {_number(part.limit)}"
            for part in self.differences
            if not part.passed
        ]
        if self.tokenizer and self.tokenizer.equal < self.tokenizer.total:
            above.append(f"the tokenizers give different ids for {self.tokenizer.first_difference!r}")
        return (*self.problems, *above)

    @property
    def passed(self) -> bool:
        """Whether both sides are the same model."""
        return not self.failures

    def lines(self) -> list[str]:
        """The report as a table, one string per line."""
        width = max((len(part.name) for part in self.differences), default=0)
        measure = self.differences[0].measure if self.differences else "largest"
        head = f"parity with {self.library}, {self.rows} rows of {self.tokens} tokens: {MEASURES[measure]} (limit)"
        report_lines = [head]
        for part in self.differences:
            if part.measure != measure:
                measure = part.measure
                report_lines.append(f"  {MEASURES[measure]} (limit):")
            verdict = "" if part.passed else "  <- FAILS"
            report_lines.append(f"  {part.name:<{width}}  {_number(part.value)} ({_number(part.limit)}){verdict}")
        if self.tokenizer:
            equal, total, first, source, written = self.tokenizer
            different = f", first not {first!r}" if first else ""
            libraries = f"source read by {source}, written files by {written}"
            report_lines.append(f"  tokenizer: {equal} of {total} texts equal{different}; {libraries}")
        report_lines += [f"  {problem}" for problem in self.problems]
        return [*report_lines, "parity: passed" if self.passed else f"parity: FAILED, {self.failures[0]}"]

    def to_dict(self) -> dict[str, Any]:
        """The report with JSON types only; a difference that is not finite is None."""
        finite = {part.name: part.value if math.isfinite(part.value) else None for part in self.differences}
        return {
            "library": self.library,
            "rows": self.rows,
            "tokens": self.tokens,
            "differences": {
                part.name: {part.measure: finite[part.name], "limit": part.limit} for part in self.differences
            },
            "tokenizer": self.tokenizer._asdict() if self.tokenizer else None,
            "failures": list(self.failures),
            "passed": self.passed,
        }


def reference_forward(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> tuple[ForwardOutputs, str]:
    """Forward pass in transformers if it is installed, else in numpy; also returns the library's name.

    Raises:
      UserError: no class of transformers has these heads together, or it refuses the config.
    """
    if transformers_forward.available():
        return transformers_forward.run(hf_model, inputs), transformers_forward.library_version()
    return numpy_forward.run(hf_model, inputs), "numpy"


def largest_difference(name: str, actual: np.ndarray, expected: np.ndarray, real_BS: np.ndarray) -> Difference:
    """The largest difference of arrays of the same shape; those with three axes are [B, S, ...], and have padding."""
    if not _finite(actual, expected):
        return Difference(name, math.nan, LIMIT)
    largest, squares, count = 0.0, 0.0, 0
    for difference, expected_row in _real_differences(actual, expected, real_BS):
        largest = max(largest, float(np.abs(difference).max()))
        squares, count = squares + float((expected_row**2).sum()), count + expected_row.size
    return Difference(name, largest, LIMIT * max(1.0, math.sqrt(squares / count)))


def relative_difference(
    name: str, actual: np.ndarray, expected: np.ndarray, real_BS: np.ndarray, limit: float = RELATIVE_LIMIT
) -> Difference:
    """The root mean square of the difference over that of the values, for rounded models; arrays as above."""
    if not _finite(actual, expected):
        return Difference(name, math.nan, limit, "relative")
    errors, squares = 0.0, 0.0
    for difference, expected_row in _real_differences(actual, expected, real_BS):
        errors, squares = errors + float((difference**2).sum()), squares + float((expected_row**2).sum())
    value = math.sqrt(errors / squares) if squares else math.inf
    return Difference(name, value, limit, "relative")


def _real_differences(
    actual: np.ndarray, expected: np.ndarray, real_BS: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Difference and expected values at the real tokens, float64, by row: all logits at once need much memory."""
    for row, (actual_row, expected_row) in enumerate(zip(actual, expected, strict=True)):
        if actual.ndim == 3:
            actual_row, expected_row = actual_row[real_BS[row]], expected_row[real_BS[row]]
        expected_row = expected_row.astype(np.float64)
        yield actual_row - expected_row, expected_row


def _finite(*arrays: np.ndarray) -> bool:
    return all(np.isfinite(row).all() for array in arrays for row in array)


def compare_outputs(
    outputs: ForwardOutputs,
    reference: ForwardOutputs,
    attention_mask_BS: np.ndarray,
    *,
    library: str,
    tokenizer: TokenizerAgreement | None = None,
    compare: Comparison = largest_difference,
    file: str = "",
) -> ParityReport:
    """Compare two forward passes of the same batch.

    Args:
      outputs: of the converted model.
      reference: of the reference library. Most of its classes compute a pooled vector and do not return it: that is
        compared only if both sides have it.
      attention_mask_BS: padded positions are not compared, but a value there that is not finite is an error.
      library: name of the reference library.
      tokenizer: agreement of the tokenizers, if they were compared.
      compare: `largest_difference` or `relative_difference`.
      file: with these outputs, for the names in the report; "": there is one.
    """
    prefix = f"{file}: " if file else ""
    real_BS = np.asarray(attention_mask_BS) > 0
    differences, problems = [], []
    for name in dict.fromkeys([*reference, *outputs]):
        if name in outputs and name in reference:
            actual, expected = outputs[name], reference[name]
            if actual.shape == expected.shape:
                differences.append(compare(prefix + name, actual, expected, real_BS))
            else:
                problems.append(f"{prefix}{name}: shape {list(actual.shape)}, the reference has {list(expected.shape)}")
        elif name != "pooled vector":
            problems.append(
                f"{prefix}only {'the converted' if name in outputs else 'the reference'} model has '{name}'"
            )
    tokens = int(real_BS.sum())
    return ParityReport(library, len(real_BS), tokens, tuple(differences), tokenizer, tuple(problems))


def describe_differences(before: SourceModel, after: SourceModel) -> tuple[str, ...]:
    """Compare config, heads, parameters and optimizer state; one line per difference, empty if they are equal.

    Args:
      before: the source.
      after: the converted model, read again.
    """
    old, new, lines = before.model, after.model, []
    name = first_architecture_difference(old.config, new.config)
    if name is not None:
        lines.append(f"model.{name} was {getattr(old.config, name)} and is {getattr(new.config, name)}")
    parts = [
        (heads.mlm, heads.mlm_activation, heads.pair, heads.has_pooler, heads.task) for heads in (old.heads, new.heads)
    ]
    if parts[0] != parts[1]:
        lines.append(f"the heads were {old.heads} and are {new.heads}")
    lines += _different_leaves("parameter", old.params, new.params)
    if before.optimizer_state is not None and after.optimizer_state is not None:
        if before.optimizer_state.step != after.optimizer_state.step:
            lines.append(f"the moments had {before.optimizer_state.step} steps and have {after.optimizer_state.step}")
        lines += _different_leaves("moment", before.optimizer_state[1:], after.optimizer_state[1:])
    elif (before.optimizer_state is None) != (after.optimizer_state is None):
        lines.append("only one of the two has moments")
    return tuple(lines)


def _different_leaves(what: str, before: object, after: object) -> list[str]:
    old, new = (name_leaves(tree) for tree in (before, after))
    names = old.keys() ^ new.keys()
    names |= {name for name in old.keys() & new.keys() if not np.array_equal(old[name], new[name], equal_nan=True)}
    return [f"{what} {min(names)} differs ({len(names)} in all)"] if names else []


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not a number"
