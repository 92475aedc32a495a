"""The parity report of a conversion: two forward passes beside each other, layer by layer, and two tokenizers.

Shapes in names: B rows, S positions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.convert.forward_io import ForwardInputs, ForwardOutputs, Task
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity import numpy_forward, transformers_forward

LIMIT = 1e-4
"""Largest difference of a value of ordinary size. Float32 keeps about 7 digits; 24 layers of sums lose two of them. A
layer whose values are larger (their root mean square above 1) is allowed as much more: its last digit is worth more."""


class TokenizerAgreement(NamedTuple):
    """How tokenizers cut the same texts."""

    equal: int
    """Texts that all gave the same ids."""
    total: int
    first_difference: str | None
    """The first text they cut differently."""
    library: str
    """What ran the source's own tokenizer, e.g. "transformers 5.23.0"."""


@dataclass(frozen=True)
class Difference:
    """One layer or head on both sides."""

    name: str
    """As the report prints it, e.g. "layer 3"."""
    largest: float
    """Largest absolute difference at real tokens; NaN if either side has a value anywhere that is not finite."""
    size: float
    """Root mean square of the other side's values there."""
    limit: float
    """What `largest` may be."""

    @property
    def passed(self) -> bool:
        """Whether the difference is within its limit; NaN is not."""
        return self.largest <= self.limit


@dataclass(frozen=True)
class Report:
    """What a conversion prints, and writes into the model's card."""

    library: str
    """What ran the other side, e.g. "transformers 5.23.0", or "numpy"."""
    rows: int
    tokens: int
    """Real tokens in those rows."""
    layers: tuple[Difference, ...]
    heads: tuple[Difference, ...]
    agreement: dict[str, float]
    """Share of equal top-1 predictions by head. Shown, but no ground for failing: where differences are within their
    limits, only predictions that were all but tied can differ."""
    tokenizer: TokenizerAgreement | None
    """None where no tokenizers were compared."""
    problems: tuple[str, ...] = ()
    """What could not be compared, a line each."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Why this report fails, a line each, bottom layer first; none: it passes."""
        above = [
            f"{part.name} differs by {_number(part.largest)}, the limit is {_number(part.limit)}"
            for part in (*self.layers, *self.heads)
            if not part.passed
        ]
        if self.tokenizer and self.tokenizer.equal < self.tokenizer.total:
            above.append(f"the tokenizers cut {self.tokenizer.first_difference!r} differently")
        return (*self.problems, *above)

    @property
    def passed(self) -> bool:
        """Whether both sides are the same model."""
        return not self.failures

    def lines(self) -> list[str]:
        """The report as a short table for people."""
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
        """For a model card or a script: only what JSON has, so a difference that is not a number is None."""

        def plain(parts: Sequence[Difference]) -> dict[str, Any]:
            return {p.name: {"largest": _finite(p.largest), "limit": _finite(p.limit)} for p in parts}

        return {
            "library": self.library,
            "rows": self.rows,
            "tokens": self.tokens,
            "layers": plain(self.layers),
            "heads": plain(self.heads),
            "top1_agreement": dict(self.agreement),
            "tokenizer": self.tokenizer._asdict() if self.tokenizer else None,
            "failures": list(self.failures),
            "passed": self.passed,
        }


def reference_forward(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> tuple[ForwardOutputs, str]:
    """The form's forward pass by transformers where it is installed, else by numpy; and the library's name.

    Raises:
      UserError: the form is incomplete, or of a family that has no reference.
    """
    if transformers_forward.available():
        return transformers_forward.run(hf_model, inputs), transformers_forward.library_version()
    return numpy_forward.run(hf_model, inputs), numpy_forward.LIBRARY


def tokenizer_agreement(
    encoders: Sequence[Callable[[str], Sequence[int]]], texts: Sequence[str], library: str
) -> TokenizerAgreement:
    """How often functions from text to ids agree; `library` is what runs the first of them."""
    different = [text for text in texts if len({tuple(encode(text)) for encode in encoders}) > 1]
    first = different[0] if different else None
    return TokenizerAgreement(len(texts) - len(different), len(texts), first, library)


def compare(
    ours: ForwardOutputs,
    theirs: ForwardOutputs,
    attention_mask_BS: np.ndarray,
    *,
    library: str,
    tokenizer: TokenizerAgreement | None = None,
    limit: float = LIMIT,
    first_layer: int = 0,
) -> Report:
    """Two forward passes of the same batch.

    Args:
      ours: of our model.
      theirs: of the other side, which says what the task is.
      attention_mask_BS: padded positions are left out, but a value that is not finite is found there too.
      library: what ran the other side.
      tokenizer: the tokenizers' agreement, if there are two.
      limit: largest difference of a value of ordinary size.
      first_layer: number of the first of the hidden states; 0 is what enters the layers.
    """
    real_BS = np.asarray(attention_mask_BS) > 0
    problems = [f"tensor '{name}' has no part in the model of {library}" for name in theirs.unused_tensors]
    layers, heads, agreement = [], [], {}
    if len(ours.hidden_states) != len(theirs.hidden_states):
        depths = len(ours.hidden_states) - 1, len(theirs.hidden_states) - 1
        problems.append(f"our model has {depths[0]} layers, the other {depths[1]}")
    pairs = zip(ours.hidden_states, theirs.hidden_states, strict=False)
    for layer, (mine, other) in enumerate(pairs, first_layer):
        _add(layers, problems, f"layer {layer}" if layer else "embeddings", mine, other, real_BS, limit)
    for name in sorted(ours.logits.keys() | theirs.logits.keys()):
        if name not in ours.logits or name not in theirs.logits:
            problems.append(f"only {'our' if name in ours.logits else 'the other'} model has a head '{name}'")
            continue
        mine, other = ours.logits[name], theirs.logits[name]
        by_token = name == "mlm" or (name == "task" and theirs.task is not Task.SEQUENCE)
        known = real_BS if by_token else None
        if _add(heads, problems, f"{name} logits", mine, other, known, limit):
            share = _agreement(mine, other, known, theirs.task if name == "task" else None)
            agreement |= {name: share} if share is not None else {}
    if ours.pooled_BH is not None and theirs.pooled_BH is not None:
        _add(heads, problems, "pooled vector", ours.pooled_BH, theirs.pooled_BH, None, limit)
    return Report(
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
    ours: np.ndarray,
    theirs: np.ndarray,
    real_BS: np.ndarray | None,
    limit: float,
) -> bool:
    """Append a difference, or a problem where the shapes differ; returns whether they could be compared."""
    if ours.shape != theirs.shape:
        problems.append(f"{name}: ours are {list(ours.shape)}, the other side's {list(theirs.shape)}")
        return False
    largest, squares, count = 0.0, 0.0, 0
    for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):  # by row: all logits are large in float64
        finite = np.isfinite(mine).all() and np.isfinite(other).all()
        if real_BS is not None:
            mine, other = mine[real_BS[row]], other[real_BS[row]]
        other = other.astype(np.float64)
        largest = max(largest, float(np.abs(mine - other).max(initial=0.0))) if finite else math.nan
        if math.isnan(largest):
            break
        squares, count = squares + float((other**2).sum()), count + other.size
    size = math.sqrt(squares / max(count, 1))
    parts.append(Difference(name, largest, size, limit * max(1.0, size)))
    return True


def _agreement(ours: np.ndarray, theirs: np.ndarray, real_BS: np.ndarray | None, task: Task | None) -> float | None:
    """Share of equal predictions: classes of rows or real tokens, ends of answers; None of a regression."""
    if task is Task.REPLACED:
        equal = ((ours > 0) == (theirs > 0))[real_BS]
    elif task is Task.SPAN:
        hidden = np.where(real_BS, 0.0, -np.inf)[:, :, None]
        equal = (ours + hidden).argmax(1) == (theirs + hidden).argmax(1)
    elif ours.shape[-1] == 1:
        return None
    else:
        equal = ours.argmax(-1) == theirs.argmax(-1)
        equal = equal if real_BS is None else equal[real_BS]
    return float(np.mean(equal))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not a number"


def _percent(share: float) -> str:
    """Never 100 % unless all are equal."""
    return f"{math.floor(share * 10000) / 100:.2f} %"
