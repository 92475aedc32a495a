"""Time of masking relative to the train step that contains it, for every mask unit, one example per row and two.

    python scripts/benchmarks/bench_masking.py --seq-len 128 --batch 8 --json masking.json

One process. Each round times one step and then some calls of each masking program; ratios are medians over rounds (the
target is at most 1 % of the step). Masking rows of two examples is also compared with the step on rows of one: packing
only adds predictions to the step, so the true ratio is a little smaller. A fourth of the synthetic tokens continue a
word. Needs jax, flax, optax, numpy and tyro.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.bench import harness, train_step
from bert_jax.bench.harness import positive
from bert_jax.config import ObjectiveConfig
from bert_jax.objectives.masking import mask_tokens

UNITS = ("token", "word", "ngram", "span")
CONTINUED = 0.25
"""Share of ids that continue a word: a rough guess; the time hardly depends on it."""
MASKING_READS = ("input_ids", "segment_ids", "position_ids", "example_id", "mask_epoch")


def compile_masking(rows: dict[str, np.ndarray], unit: str) -> Callable[[], Any]:
    """`mask_tokens` compiled for these rows, as a function without arguments."""
    continues = np.random.default_rng(0).random(train_step.VOCABULARY.size) < CONTINUED
    continues[: train_step.FIRST_WORD] = False
    words = train_step.VOCABULARY._replace(continues_word=continues.tobytes())
    key, objective = jnp.uint32(1), ObjectiveConfig(mask_unit=unit)
    batch = {name: jnp.asarray(rows[name]) for name in MASKING_READS}
    program = jax.jit(lambda batch, key: mask_tokens(batch, key, objective, words)).lower(batch, key).compile()
    return lambda: program(batch, key)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each side, and ratios to the step."""
    case = train_step.Case(options.preset, options.seq_len, options.batch)
    step = train_step.TrainStep(train_step.config_of(case))
    step.run(1)
    sides = {"step": harness.timer(lambda: step.run(1))}
    for contents, slots in {"full": 1, "packed": 2}.items():
        rows = train_step.synthetic_rows(options.batch, options.seq_len, contents, slots)
        for unit in UNITS:
            program = compile_masking(rows, unit)
            sides[f"{contents} {unit}"] = functools.partial(train_step.queued, program, options.calls)
    samples = harness.interleave(sides, options.rounds)
    return {"masking": harness.summary(samples, "step", ("seconds",)), "samples": samples}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", choices=train_step.PRESETS, default="bert_base", help="preset of the step")
    add("--seq-len", type=positive, default=128, help="tokens per row")
    add("--batch", type=positive, default=8, help="rows")
    add("--rounds", type=positive, default=7, help="number of rounds for the medians")
    add("--calls", type=positive, default=10, help="of each masking program per round")


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
