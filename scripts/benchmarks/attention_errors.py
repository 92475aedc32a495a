"""Errors of the implementations of attention on this device, beside the reference in float32 at the highest precision.

    python scripts/benchmarks/attention_errors.py

Packed rows of random vectors with padding at the end. The numbers are relative errors, |x - reference| / |reference|,
of the context vectors and of the gradients of query, key and value; padding is left out. All that have dropout have
the masks of the reference; `xla` and `cudnn` have none. Rows without dropout have no window.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.array_types import Array
from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.config.sections import KERNEL_ROW_LENGTHS
from bert_jax.model.attention import attend
from bert_jax.model.dropout import DropoutKey
from bert_jax.training.implementation import NEEDS

ROWS, HEADS = 4, 3
RESULTS = ("context", "query gradient", "key gradient", "value gradient")


class Shape(NamedTuple):
    """Shape and settings of a comparison."""

    seq_len: int
    head_size: int
    dtype: str
    dropout: float
    window: int | None
    """Positions to either side that a query attends to; None: all."""

    def implementations(self) -> list[str]:
        """Those that this device has for it."""
        names = ["reference", "deferred", *KERNEL_ROW_LENGTHS, *(["xla", "cudnn"] if self.dropout == 0.0 else ())]
        platform = jax.default_backend()
        return [name for name in names if NEEDS.get(name, platform) == platform]


@functools.partial(jax.jit, static_argnums=(0, 1))
def results(name: str, shape: Shape, arrays: list[Array], segment_ids: Array) -> tuple[Array, ...]:
    """The context vectors and the gradients of query, key and value."""
    *inputs, gradient = (x.astype(shape.dtype) for x in arrays)
    key = DropoutKey(jnp.uint32(7), jnp.arange(ROWS, dtype=jnp.uint32))

    def context(*inputs: Array) -> Array:
        settings = {"before": shape.window, "after": shape.window, "dropout_rate": shape.dropout, "dropout_key": key}
        return jnp.where((segment_ids > 0)[:, :, None, None], attend(name, *inputs, segment_ids, **settings), 0)

    value, backward = jax.vjp(context, *inputs)
    return value, *backward(gradient)


def compare(shape: Shape) -> list[dict[str, Any]]:
    """A row per implementation."""
    draw = np.random.default_rng(0)
    size = ROWS, shape.seq_len, HEADS, shape.head_size
    arrays = [jnp.asarray(draw.standard_normal(size, np.float32)) for _ in range(4)]
    ends = np.sort(draw.integers(1, shape.seq_len, (ROWS, 3)))
    segments = (np.arange(shape.seq_len)[None, :, None] >= ends[:, None, :]).sum(-1)
    segment_ids = jnp.asarray(np.where(segments < 3, segments + 1, 0), jnp.int32)
    with jax.default_matmul_precision("highest"):
        expected = jax.device_get(results("reference", shape._replace(dtype="float32"), arrays, segment_ids))
    rows = []
    for name in shape.implementations():
        found = jax.device_get(results(name, shape, arrays, segment_ids))
        norms = [
            float(np.linalg.norm(x.astype(np.float32) - y) / np.linalg.norm(y))
            for x, y in zip(found, expected, strict=True)
        ]
        rows.append(shape._asdict() | {"attention": name} | dict(zip(RESULTS, norms, strict=True)))
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All shapes."""
    shapes = [
        Shape(seq_len, size, dtype, dropout, window)
        for dtype in options.dtype
        for size in options.head_sizes
        for seq_len in options.seq_lens
        for dropout, window in ((0.1, None), (0.0, None), (0.1, 64))
    ]
    return {"errors": [row for shape in shapes for row in compare(shape)]}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--seq-lens", type=listed(positive), default=[128, 512], help="tokens per row; default: 128,512")
    add("--head-sizes", type=listed(positive), default=[64], help="default: 64")
    dtypes = one_of("float32", "bfloat16")
    add("--dtype", type=listed(dtypes), default=["float32", "bfloat16"], help="default: float32,bfloat16")


main = functools.partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
