"""Step time and efficiency of BERT-large from 8 to 2,048 chips, as the roofline of `bert-jax plan` predicts them.

    python scripts/benchmarks/weak_scaling.py --plot weak_scaling.png

Nothing is measured and no device is needed. The rows per chip are constant (weak scaling); parameters are replicated,
and data parallelism spans slices. Efficiency is the step time of a single chip with the same rows, which sends nothing,
divided by the step time.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
from harness import listed, one_of, positive

from bert_jax.chips import CHIPS, Sizes, slices_for
from bert_jax.config import Config
from bert_jax.config.presets import load_config
from bert_jax.errors import UserError
from bert_jax.planning.roofline import Prediction, predict

COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LINKS = ("data", "fsdp", "tensor", "network")


def predict_at(config: Config, phase: int, chip: str, count: int, rows: int, micro_batch: int) -> Prediction:
    """Prediction for `count` chips with `rows` rows each."""
    phases = list(config.phases)
    phases[phase] = dataclasses.replace(phases[phase], batch_size=rows * count, accumulation=rows // micro_batch)
    slices = slices_for(CHIPS[chip], count)
    scaled = dataclasses.replace(config, phases=tuple(phases))
    return predict(scaled, phase, Sizes(count, 1, 1, slices), rows // micro_batch, CHIPS[chip])


def scale(config: Config, phase: int, chip: str, rows: int, micro_batch: int) -> list[dict[str, Any]]:
    """A row of the table for every number of chips."""
    alone = predict_at(config, phase, chip, 1, rows, micro_batch).step_seconds
    lines = []
    for count in COUNTS:
        prediction = predict_at(config, phase, chip, count, rows, micro_batch)
        links = {kind: prediction.seconds[kind] for kind in LINKS}
        lines.append(
            {
                "chip": chip,
                "chips": count,
                "slices": slices_for(CHIPS[chip], count),
                "rows": rows,
                "step_seconds": prediction.step_seconds,
                "links": sum(links.values()) - links["network"],
                "network": links["network"],
                "efficiency": alone / prediction.step_seconds,
                "mfu": prediction.mfu,
                "bound": prediction.bound,
            }
        )
    return lines


def render(report: dict[str, Any]) -> list[str]:
    """The table."""
    head = "| chip | chips | slices | rows/chip | ms/step | links, ms | network, ms | efficiency | MFU | bound |"
    table = [head, f"|{'---|' * (head.count('|') - 1)}"]
    for line in report["lines"]:
        times = " | ".join(f"{1e3 * line[kind]:.1f}" for kind in ("step_seconds", "links", "network"))
        table.append(
            f"| {line['chip']} | {line['chips']:,} | {line['slices']} | {line['rows']} | {times} | "
            f"{line['efficiency']:.1%} | {line['mfu']:.1%} | {line['bound']} |"
        )
    return table


def draw(lines: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Plot efficiency over the number of chips, with a line for each kind of chip and number of rows."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    chips = list(dict.fromkeys(line["chip"] for line in lines))
    all_rows = list(dict.fromkeys(line["rows"] for line in lines))
    for i, chip in enumerate(chips):
        for j, rows in enumerate(all_rows):
            selected = [line for line in lines if (line["chip"], line["rows"]) == (chip, rows)]
            counts, shares = [line["chips"] for line in selected], [100 * line["efficiency"] for line in selected]
            style = ("o-", "s--", "^:")[j % 3]
            axes.plot(counts, shares, style, color=f"C{i}", markersize=4, label=f"{chip}, {rows} rows per chip")
    axes.set_xscale("log", base=2)
    axes.set_xticks(COUNTS, [f"{count:,}" for count in COUNTS])
    axes.set_ylim(min(80, min(100 * line["efficiency"] for line in lines)), 101)
    axes.set_xlabel("chips")
    axes.set_ylabel("efficiency, % of a chip that sends nothing")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predict all lines of the table, and plot them."""
    if uneven := [rows for rows in options.rows if rows % options.micro_batch]:
        raise UserError(f"--rows {uneven[0]} is not divisible by --micro-batch {options.micro_batch}")
    config = load_config(options.preset)
    if not 0 <= options.phase < len(config.phases):
        raise UserError(f"--phase {options.phase}: {config.name} has {len(config.phases)}, counted from 0")
    lines = [
        line
        for chip in options.chips
        for rows in options.rows
        for line in scale(config, options.phase, chip, rows, options.micro_batch)
    ]
    if options.plot:
        seq_len = config.phases[options.phase].seq_len
        draw(lines, f"Model, not measured: weak scaling of {config.name}, {seq_len} tokens per row", options.plot)
    return {"lines": lines}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--preset", default="bert_large_lamb")
    add("--phase", type=int, default=1)
    add("--chips", type=listed(one_of(*CHIPS)), default=["v5e", "v5p", "v6e"], help=f"of {', '.join(CHIPS)}")
    add("--rows", type=listed(positive), default=[16, 128], help="rows per chip and step")
    add("--micro-batch", type=positive, default=4, help="rows of a micro-batch")
    add("--plot", type=Path, help="write a PNG here")


main = functools.partial(harness.run, __doc__, flags, measure, render)


if __name__ == "__main__":
    raise SystemExit(main())
