"""Report of the quickstart: writes summary.json, plots the curve, prints a few filled masks and a table.

Usage: python scripts/quickstart_report.py DIRECTORY
"""

import json
import statistics
import sys
import time
from pathlib import Path

import bert_jax
from bert_jax.training.eval_metrics import BASELINES
from bert_jax.training.run_directory.metrics import read_metrics

TEXTS = (
    "Return a new [MASK] with the same elements.",
    "If the file does not [MASK], an exception is raised.",
    "The number of [MASK] along each axis.",
    "This method must be called [MASK] any other.",
)
RULE = "─" * 78
NAMES = {
    "mlm_loss": "masked-token loss (nats)",
    "mlm_accuracy": "masked-token accuracy",
    "pair_accuracy": "sentence-pair accuracy",
}
"""Held-out metrics of the table; a run with objective.pair none has no pair accuracy."""


def summarize(directory: Path, lines: list[dict]) -> dict:
    """Figures of the table, also written to summary.json."""
    heldout = json.loads((directory / "heldout.json").read_text())
    trained = [line for line in lines if line["split"] == "train"]
    speeds = [line["timing"]["tokens_per_second"] for line in trained if "tokens_per_second" in line["timing"]]
    summary = {
        "heldout": {name: heldout[name] for name in NAMES if name in heldout},
        "baseline": {name: heldout[BASELINES[name][0]] for name in NAMES if name in heldout},
        "tokens_seen": trained[-1]["tokens_seen"],
        "tokens_per_second": statistics.median_high(speeds),
        "seconds": time.time() - int((directory / "started").read_text()),
        "export": str(directory / "export"),
    }
    (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def draw_curve(path: Path, lines: list[dict], unigram_loss: float) -> None:
    """Plot training and held-out MLM loss over steps, with the unigram baseline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    styles = {"color": "0.75", "linewidth": 1, "label": "training batch"}, {"marker": "o", "label": "held out"}
    for split, style in zip(("train", "validation"), styles, strict=True):
        points = [(line["step"], line["mlm_loss"]) for line in lines if line["split"] == split]
        axes.plot(*zip(*points, strict=True), **style)
    axes.axhline(unigram_loss, color="C3", linestyle="--", linewidth=1, label="unigram model, same positions")
    axes.set(xlabel="step", ylabel="masked-token loss (nats)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_report(directory: Path, summary: dict) -> None:
    """Print a few filled masks of the exported model, and the table of results."""
    model = bert_jax.load(directory / "export")
    print("\nMasks filled by the model:")
    for text in TEXTS:
        best = model.fill_mask(text, top=3)[0]
        print(f"  {text:<55} {', '.join(f'{c.token} {c.probability:.0%}' for c in best)}")
    print(f"\n{'held out':<34}{'this model':>14}{'baseline':>14}\n{RULE}")
    for name, value in summary["heldout"].items():
        baseline, kind = summary["baseline"][name], BASELINES[name][1]
        shown = ".3f" if name == "mlm_loss" else ".1%"
        print(f"{NAMES[name]:<34}{value:>14{shown}}{baseline:>14{shown}}  {kind}")
    print(
        f"""{RULE}
tokens seen                       {summary["tokens_seen"]:,} ({summary["tokens_per_second"]:,.0f} a second)
minutes, from text to export      {summary["seconds"] / 60:.1f}
tokenizer and corpus              {directory}/tokenizer.json, {directory}/corpus/
run: checkpoints, metrics, events {directory}/model/
model for other tools             {summary["export"]}/
training curve                    {directory}/curve.png
these figures                     {directory}/summary.json
{RULE}
What to try next
  bert-jax fill-mask {summary["export"]} "The [MASK] of the array."
  tensorboard --logdir {directory}/model/tensorboard        (pip install tensorboard)
  your own text: docs/corpus.md        without NSP: --objective.pair none        larger: bert_mini"""
    )


def main(arguments: list[str]) -> None:
    """Write the summary, plot the curve, print the report."""
    directory = Path(arguments[0])
    lines = read_metrics(directory / "model" / "metrics.jsonl")
    summary = summarize(directory, lines)
    draw_curve(directory / "curve.png", lines, summary["baseline"]["mlm_loss"])
    print_report(directory, summary)


if __name__ == "__main__":
    main(sys.argv[1:])
