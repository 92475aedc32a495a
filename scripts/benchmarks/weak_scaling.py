"""Step time and efficiency of BERT-large from 8 to 2,048 chips, as the roofline of `bert-jax plan` predicts them.

    python scripts/benchmarks/weak_scaling.py --plot weak_scaling.png

Nothing is measured and no device is needed. The rows per chip are constant (weak scaling); parameters are replicated,
and data parallelism spans slices. Efficiency is the step time of a single chip with the same rows, which sends nothing,
divided by the step time.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bert_jax.bench import harness
from bert_jax.bench.harness import listed, one_of, positive
from bert_jax.chips import CHIPS, Sizes, min_slices
from bert_jax.config import Config
from bert_jax.config.presets import load_config
from bert_jax.errors import UserError
from bert_jax.planning.roofline import Prediction, predict

COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def predict_at(config: Config, chip: str, count: int, rows: int, micro_batch: int) -> Prediction:
    """Prediction of the last phase for `count` chips with `rows` rows each."""
    *phases, last = config.phases
    last = dataclasses.replace(last, batch_size=rows * count, accumulation=rows // micro_batch)
    scaled = dataclasses.replace(config, phases=(*phases, last))
    sizes = Sizes(count, 1, 1, min_slices(CHIPS[chip], count))
    return predict(scaled, len(phases), sizes, rows // micro_batch, CHIPS[chip])


def draw(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot efficiency over the number of chips, with a line for each kind of chip and number of rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (chip, rows), group in itertools.groupby(lines, lambda line: (line["chip"], line["rows"])):
        shares = [100 * line["efficiency"] for line in group]
        axes.plot(COUNTS, shares, "o-", markersize=4, label=f"{chip}, {rows} rows per chip")
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
    axes.set(xlabel="chips", ylabel="efficiency, % of a chip that sends nothing", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predict all rows of the table, and plot them."""
    if uneven := [rows for rows in options.rows if rows % options.micro_batch]:
        raise UserError(f"--rows {uneven[0]} is not divisible by --micro-batch {options.micro_batch}")
    config, lines = load_config(options.preset), []
    for chip, rows, count in itertools.product(options.chips, options.rows, COUNTS):
        alone, prediction = (predict_at(config, chip, n, rows, options.micro_batch) for n in (1, count))
        seconds = prediction.seconds
        lines.append(
            {
                "chip": chip,
                "rows": rows,
                "chips": count,
                "slices": min_slices(CHIPS[chip], count),
                "step_seconds": prediction.step_seconds,
                "links": seconds["data"] + seconds["fsdp"] + seconds["tensor"],
                "network": seconds["network"],
                "efficiency": alone.step_seconds / prediction.step_seconds,
                "mfu": prediction.mfu,
                "bound": prediction.bound,
            }
        )
    if options.plot:
        title = f"Model, not measured: weak scaling of {config.name}, {config.phases[-1].seq_len} tokens per row"
        draw(lines, title, options.plot)
    return {"predictions": lines}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", default="bert_large_lamb")
    add("--chips", type=listed(one_of(*CHIPS)), default=["v5e", "v5p", "v6e"], help=f"of {', '.join(CHIPS)}")
    add("--rows", type=listed(positive), default=[16, 128], help="rows per chip and step")
    add("--micro-batch", type=positive, default=4, help="rows of a micro-batch")
    add("--plot", type=Path, help="write a PNG here")


main = functools.partial(harness.run, __doc__, flags, measure, harness.tables)


if __name__ == "__main__":
    raise SystemExit(main())
