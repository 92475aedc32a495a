"""The parity report of a conversion: compares two forward passes layer by layer, the tokenizers, and the parameters.

Shapes in names: B rows, S positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.forward_types import ForwardInputs, ForwardOutputs, TaskKind
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import numpy_forward, transformers_forward
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import first_architecture_difference
from bert_jax.training.param_paths import name_leaves

LIMIT = 1e-4
"""Largest difference of values whose root mean square is at most 1. Float32 has about 7 digits; 24 layers of sums lose
two of them. For larger values, the limit is multiplied by their root mean square."""


class TokenizerAgreement(NamedTuple):
    """Agreement of several tokenizers on the same texts."""

    equal: int
    """Number of texts with the same ids in all tokenizers."""
    total: int
    first_difference: str | None
    """The first text with different ids."""
    library: str
    """The library that ran the source's tokenizer, e.g. "transformers 5.23.0"."""


@dataclass(frozen=True)
class Difference:
    """The difference of one layer or head."""

    name: str
    """Name in the report, e.g. "layer 3"."""
    largest: float
    """Largest absolute difference at real tokens; NaN if either side has a value anywhere that is not finite."""
    size: float
    """Root mean square of the reference values at real tokens."""
    limit: float
    """Upper bound of `largest`."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within its limit; NaN is not."""
        return self.largest <= self.limit


@dataclass(frozen=True)
class ParityReport:
    """The report that a conversion prints and writes into the model card."""

    library: str
    """The library of the reference forward pass, e.g. "transformers 5.23.0", or "numpy"."""
    rows: int
    tokens: int
    """Real tokens in those rows."""
    layers: tuple[Difference, ...]
    heads: tuple[Difference, ...]
    agreement: dict[str, float]
    """Share of equal top-1 predictions by head. It does not affect `passed`: if differences are within their limits,
    only nearly tied predictions can differ."""
    tokenizer: TokenizerAgreement | None
    """None if no tokenizers were compared."""
    problems: tuple[str, ...] = ()
    """One line for each part that could not be compared."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Reasons why the report fails, one line each, bottom layer first; empty if it passes."""
        above = [
            f"{part.name} differs by {_number(part.largest)}, the limit is {_number(part.limit)}"
            for part in (*self.layers, *self.heads)
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
        width = max(len(part.name) for part in (*self.layers, *self.heads)) if self.layers or self.heads else 0
        report_lines = [
            f"parity with {self.library}, {self.rows} rows of {self.tokens} tokens: largest difference (limit)"
        ]
        for part in (*self.layers, *self.heads):
            verdict = "" if part.passed else "  <- FAILS"
            report_lines.append(f"  {part.name:<{width}}  {_number(part.largest)} ({_number(part.limit)}){verdict}")
        report_lines += [f"  top-1 of {name}: {_percent(share)} equal" for name, share in self.agreement.items()]
        if self.tokenizer:
            equal, total, first, library = self.tokenizer
            different = f", first not {first!r}" if first else ""
            report_lines.append(f"  tokenizer: {equal} of {total} texts equal to {library}{different}")
        report_lines += [f"  {problem}" for problem in self.problems]
        return [*report_lines, "parity: passed" if self.passed else f"parity: FAILED, {self.failures[0]}"]

    def to_dict(self) -> dict[str, Any]:
        """The report with JSON types only; a difference that is NaN is None."""

        def to_json(parts: Sequence[Difference]) -> dict[str, Any]:
            return {p.name: {"largest": _finite(p.largest), "limit": _finite(p.limit)} for p in parts}

        return {
            "library": self.library,
            "rows": self.rows,
            "tokens": self.tokens,
            "layers": to_json(self.layers),
            "heads": to_json(self.heads),
            "top1_agreement": dict(self.agreement),
            "tokenizer": self.tokenizer._asdict() if self.tokenizer else None,
            "failures": list(self.failures),
            "passed": self.passed,
        }


def reference_forward(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> tuple[ForwardOutputs, str]:
    """Forward pass in transformers if it is installed, else in numpy; also returns the library's name.

    Raises:
      UserError: the model is incomplete, or its family has no reference.
    """
    if transformers_forward.available():
        return transformers_forward.run(hf_model, inputs), transformers_forward.library_version()
    return numpy_forward.run(hf_model, inputs), numpy_forward.LIBRARY


def tokenizer_agreement(
    encoders: Sequence[Callable[[str], Sequence[int]]], texts: Sequence[str], library: str
) -> TokenizerAgreement:
    """Agreement of functions from text to ids; `library` is the name of the first one's library."""
    different = [text for text in texts if len({tuple(encode(text)) for encode in encoders}) > 1]
    first = different[0] if different else None
    return TokenizerAgreement(len(texts) - len(different), len(texts), first, library)


def compare(
    outputs: ForwardOutputs,
    reference: ForwardOutputs,
    attention_mask_BS: np.ndarray,
    *,
    library: str,
    tokenizer: TokenizerAgreement | None = None,
    limit: float = LIMIT,
    first_layer: int = 0,
) -> ParityReport:
    """Compare two forward passes of the same batch.

    Args:
      outputs: of the converted model.
      reference: of the reference library; its `task` decides how task logits are compared.
      attention_mask_BS: padded positions are not compared, but a value there that is not finite is an error.
      library: name of the reference library.
      tokenizer: agreement of the tokenizers, if they were compared.
      limit: see `LIMIT`.
      first_layer: index of the first hidden state; 0 is the input of the first layer.
    """
    real_BS = np.asarray(attention_mask_BS) > 0
    problems = [f"tensor '{name}' is not used by the model of {library}" for name in reference.unused_tensors]
    layers, heads, agreement = [], [], {}
    if len(outputs.hidden_states) != len(reference.hidden_states):
        depths = len(outputs.hidden_states) - 1, len(reference.hidden_states) - 1
        problems.append(f"the converted model has {depths[0]} layers, the reference {depths[1]}")
    pairs = zip(outputs.hidden_states, reference.hidden_states, strict=False)
    for layer, (actual, expected) in enumerate(pairs, first_layer):
        _add(layers, problems, f"layer {layer}" if layer else "embeddings", actual, expected, real_BS, limit)
    for name in sorted(outputs.logits.keys() | reference.logits.keys()):
        if name not in outputs.logits or name not in reference.logits:
            problems.append(
                f"only {'the converted' if name in outputs.logits else 'the reference'} model has a head '{name}'"
            )
            continue
        actual, expected = outputs.logits[name], reference.logits[name]
        by_token = name == "mlm" or (name == "task" and reference.task is not TaskKind.SEQUENCE)
        known = real_BS if by_token else None
        if _add(heads, problems, f"{name} logits", actual, expected, known, limit):
            share = _agreement(actual, expected, known, reference.task if name == "task" else None)
            agreement |= {name: share} if share is not None else {}
    if outputs.pooled_BH is not None and reference.pooled_BH is not None:
        _add(heads, problems, "pooled vector", outputs.pooled_BH, reference.pooled_BH, None, limit)
    return ParityReport(
        library,
        len(real_BS),
        int(real_BS.sum()),
        tuple(layers),
        tuple(heads),
        agreement,
        tokenizer,
        tuple(problems),
    )


def _add(
    parts: list[Difference],
    problems: list[str],
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    real_BS: np.ndarray | None,
    limit: float,
) -> bool:
    """Append a difference, or a problem if the shapes differ; returns whether they could be compared."""
    if actual.shape != expected.shape:
        problems.append(f"{name}: shape {list(actual.shape)}, the reference has {list(expected.shape)}")
        return False
    largest, squares, count = 0.0, 0.0, 0
    # By row, because all logits in float64 need much memory.
    for row, (actual_row, expected_row) in enumerate(zip(actual, expected, strict=True)):
        finite = np.isfinite(actual_row).all() and np.isfinite(expected_row).all()
        if real_BS is not None:
            actual_row, expected_row = actual_row[real_BS[row]], expected_row[real_BS[row]]
        expected_row = expected_row.astype(np.float64)
        largest = max(largest, float(np.abs(actual_row - expected_row).max(initial=0.0))) if finite else math.nan
        if math.isnan(largest):
            break
        squares, count = squares + float((expected_row**2).sum()), count + expected_row.size
    size = math.sqrt(squares / max(count, 1))
    parts.append(Difference(name, largest, size, limit * max(1.0, size)))
    return True


def _agreement(
    actual: np.ndarray, expected: np.ndarray, real_BS: np.ndarray | None, task: TaskKind | None
) -> float | None:
    """Share of equal predictions: classes of rows or real tokens, ends of answers; None for a regression."""
    if task is TaskKind.REPLACED:
        equal = ((actual > 0) == (expected > 0))[real_BS]
    elif task is TaskKind.SPAN:
        mask_BS1 = np.where(real_BS, 0.0, -np.inf)[:, :, None]
        equal = (actual + mask_BS1).argmax(1) == (expected + mask_BS1).argmax(1)
    elif actual.shape[-1] == 1:
        return None
    else:
        equal = actual.argmax(-1) == expected.argmax(-1)
        equal = equal if real_BS is None else equal[real_BS]
    return float(np.mean(equal))


def bitwise_differences(before: SourceModel, after: SourceModel) -> tuple[str, ...]:
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


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not a number"


def _percent(share: float) -> str:
    """Rounded down: 100 % only if all are equal."""
    return f"{math.floor(share * 10000) / 100:.2f} %"
