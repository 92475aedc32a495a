"""Learning study on a laptop: LAMB with large batches, AdamW with small and large ones, progressive stacking.

    python scripts/learning_study.py --corpus corpus --out runs/learning --sweep     runs that chose the learning rates
    python scripts/learning_study.py --corpus corpus --out runs/learning             all runs, then the report
    python scripts/learning_study.py --out runs/learning --report                    the report alone

Runs are `bert-jax pretrain` commands in sequence; the same call continues an interrupted study. ARMS and CLAIMS are the
protocol of docs/learning.md, fixed before the runs. If a run fails, the study exits with the last line of its log.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "scripts")) if path not in sys.path]

import learning_stacked  # noqa: E402

from bert_jax.training.run_directory.metrics import read_metrics  # noqa: E402
from bert_jax.training.run_directory.workdir import read_config  # noqa: E402

COMMON = {
    "--model.vocab-size": "8192",
    "--evaluation.rows": "512",
    "--checkpoint.every": "1000000",
    "--log.no-layers": "",
    "--log.no-tensorboard": "",
}
"""Flags of all runs. Runs save only at their end."""
SMALL_BATCH = {
    "--phases.0.batch-size": "16",
    "--phases.0.steps": "3264",
    "--phases.0.warmup-steps": "204",
    "--evaluation.every": "272",
    "--log.every": "68",
}
LARGE_BATCH = {
    "--phases.0.batch-size": "128",
    "--phases.0.steps": "408",
    "--phases.0.warmup-steps": "26",
    "--evaluation.every": "34",
    "--log.every": "17",
}
"""The same rows in the same order as SMALL_BATCH, with eight times as many per step."""
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "adamw_16": ("bert_tiny", SMALL_BATCH | {"--optimizer.name": "adamw", "--phases.0.learning-rate": "2e-3"}),
    "adamw_128": ("bert_tiny", LARGE_BATCH | {"--optimizer.name": "adamw", "--phases.0.learning-rate": "5.7e-3"}),
    "lamb_128": ("bert_tiny", LARGE_BATCH | {"--optimizer.name": "lamb", "--phases.0.learning-rate": "4e-2"}),
    "stacked": (str(learning_stacked.__file__), {"--evaluation.every": "304", "--log.every": "76"}),
}
"""Config and flags of each arm. AdamW's rate for large batches is the preset's times the square root of 8."""
SWEEP = {"adamw_128": ("4e-3", "8e-3"), "lamb_128": ("2e-2", "8e-2")}
"""Other rates for large batches."""
SWEEP_SEED = 100
SWEEP_SHARE = 1
"""Share of a run's steps. With a quarter of them, batches of 128 did not beat the unigram model at any rate."""


class Claim(NamedTuple):
    """Two arms at equal cost; the held-out losses of `new` and `old` are compared seed by seed."""

    name: str
    new: str
    old: str
    cost: str


CLAIMS = (
    Claim("a", "lamb_128", "adamw_16", "tokens"),
    Claim("b", "lamb_128", "adamw_128", "tokens"),
    Claim("c", "stacked", "adamw_16", "compute"),
)
MARGIN = 0.05
"""Nats of held-out MLM loss; smaller differences are treated as equal."""
CONFIDENCE = 0.95


def sweep_flags(arm: str, rate: str) -> dict[str, str]:
    """Flags of the arm in a shorter run with another learning rate and a scaled schedule."""
    flags = ARMS[arm][1]
    steps = round(int(flags["--phases.0.steps"]) * SWEEP_SHARE)
    shorter = {"--phases.0.steps": steps, "--phases.0.warmup-steps": steps // 16, "--evaluation.every": steps // 4}
    return flags | {flag: str(value) for flag, value in shorter.items()} | {"--phases.0.learning-rate": rate}


def finished(workdir: Path) -> bool:
    """Whether the run has the held-out line of its last step."""
    lines = held_out(workdir)
    return bool(lines) and lines[-1]["step"] == read_config(workdir).total_steps


def held_out(workdir: Path) -> list[dict[str, Any]]:
    """Held-out metrics of a run, one dict per evaluation."""
    return [line for line in read_metrics(workdir / "metrics.jsonl") if line["split"] == "validation"]


def run(corpus: Path, workdir: Path, config: str, flags: dict[str, str], seed: int) -> None:
    """Train in `workdir` unless the run is finished; its output is appended to `workdir`.log."""
    if finished(workdir):
        return
    words = [word for flag, value in (COMMON | flags).items() for word in (flag, value) if word]
    command = ["nice", "-n", "15", sys.executable, "-m", "bert_jax", "pretrain", config, *words]
    command += ["--corpus", str(corpus), "--workdir", str(workdir), "--seed", str(seed)]
    log, start = workdir.with_suffix(".log"), time.monotonic()
    workdir.parent.mkdir(parents=True, exist_ok=True)
    print(f"{workdir.name} ...", file=sys.stderr, flush=True)
    with log.open("a") as output:
        # Run the code of this clone, in any working directory.
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        failed = subprocess.run(command, stdout=output, stderr=output, env=environment).returncode
    if failed or not finished(workdir):
        last = (log.read_text().strip() or "it printed nothing").splitlines()[-1]
        sys.exit(f"error: {workdir.name} ended early ({last}); {log} has more")
    loss = held_out(workdir)[-1]["mlm_loss"]
    print(f"{workdir.name}: {loss:.4f} after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def sweep(corpus: Path, out: Path, arms: Sequence[str]) -> None:
    """Short runs with a separate seed, and the table for the choice of learning rates."""
    print("| arm | learning rate | held-out MLM loss |\n|---|---|---|")
    for arm in arms:
        for rate in SWEEP.get(arm, ()):
            workdir = out / "sweep" / f"{arm}-{rate}"
            run(corpus, workdir, ARMS[arm][0], sweep_flags(arm, rate), SWEEP_SEED)
            print(f"| {arm} | {rate} | {held_out(workdir)[-1]['mlm_loss']:.3f} |", flush=True)


def losses(out: Path, arm: str) -> dict[int, float]:
    """Final held-out MLM loss of the arm's finished runs, by seed."""
    runs = {int(path.name.rpartition("-")[2]): path for path in out.glob(f"{arm}-*") if path.is_dir()}
    return {seed: held_out(path)[-1]["mlm_loss"] for seed, path in sorted(runs.items()) if finished(path)}


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Student's confidence interval of the mean; needs at least two differences."""
    from scipy.stats import t  # a dependency of jax

    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * error
    return mean - half, mean + half


def verdict(low: float, high: float) -> str:
    """Verdict for an interval of (new - old); a significant difference may still be smaller than MARGIN."""
    if low > -MARGIN and high < MARGIN:
        return f"equal within {MARGIN} nats"
    if high < 0:
        return "lower"
    if low > 0:
        return "higher"
    return "undecided"


def report(out: Path) -> str:
    """The tables, in Markdown."""
    finals = {arm: losses(out, arm) for arm in ARMS}
    lines = ["| arm | seeds | held-out MLM loss, mean ± sd | each |", "|---|---|---|---|"]
    for arm, by_seed in finals.items():
        values = list(by_seed.values())
        if len(values) > 1:
            each = ", ".join(f"{value:.3f}" for value in values)
            center = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
            lines.append(f"| {arm} | {len(values)} | {center} | {each} |")
    lines += ["", f"| claim | new - old, each seed | mean, {CONFIDENCE:.0%} interval | new is |", "|---|---|---|---|"]
    for claim in CLAIMS:
        new, old = finals[claim.new], finals[claim.old]
        differences = [new[seed] - old[seed] for seed in new if seed in old]
        if len(differences) > 1:
            low, high = interval(differences)
            each = ", ".join(f"{value:+.3f}" for value in differences)
            mean = f"{statistics.mean(differences):+.3f} ({low:+.3f} to {high:+.3f})"
            title = f"({claim.name}) {claim.new} - {claim.old}, equal {claim.cost}"
            lines.append(f"| {title} | {each} | {mean} | {verdict(low, high)} |")
    return "\n".join(lines)


def curves(out: Path, arm: str, cost: str) -> tuple[list[float], list[list[float]]]:
    """Cost at each evaluation of the arm, in millions of tokens or steps of adamw_16, and the losses of each seed."""
    costs: list[float] = []
    values = []
    for seed in losses(out, arm):
        workdir = out / f"{arm}-{seed}"
        tokens = {
            line["step"]: line["tokens_seen"]
            for line in read_metrics(workdir / "metrics.jsonl")
            if "tokens_seen" in line
        }
        lines = held_out(workdir)
        steps = [line["step"] for line in lines]
        costs = [tokens[step] / 1e6 for step in steps] if cost == "tokens" else [compute(arm, step) for step in steps]
        values.append([line["mlm_loss"] for line in lines])
    return costs, values


def compute(arm: str, step: int) -> float:
    """Model FLOPs of the first `step` steps, in steps of adamw_16."""
    shallow = min(step, learning_stacked.ONE_LAYER) if arm == "stacked" else 0
    return step - shallow * (1 - learning_stacked.COST)


def draw(out: Path) -> Path:
    """Held-out loss of each arm, mean and range over seeds: against tokens, and stacking against compute."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained", sharey=True)
    titles = {"tokens": "tokens seen (millions)", "compute": "compute (steps with two layers)"}
    colors = {arm: f"C{i}" for i, arm in enumerate(ARMS)}
    for axes, (cost, title) in zip(panels, titles.items(), strict=True):
        wanted: Iterable[str] = dict.fromkeys(arm for c in CLAIMS if c.cost == cost for arm in (c.old, c.new))
        for arm in wanted:
            costs, values = curves(out, arm, cost)
            if values:
                columns = list(zip(*values, strict=True))
                axes.plot(costs, [statistics.mean(column) for column in columns], color=colors[arm], label=arm)
                low, high = [min(column) for column in columns], [max(column) for column in columns]
                axes.fill_between(costs, low, high, color=colors[arm], alpha=0.2, linewidth=0)
        axes.set(xlabel=title)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False)
    panels[0].set_ylabel("held-out masked-token loss (nats)")
    path = out / "learning.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="directory that bert-data build made, with 8,192 token ids")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and of learning.png")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms to run; default: %(default)s")
    parser.add_argument("--seeds", default="0,1,2")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sweep", action="store_true", help="only the short runs for the choice of learning rates")
    what.add_argument("--report", action="store_true", help="only report on finished runs")
    args = parser.parse_args(arguments)
    if args.corpus is None and not args.report:
        parser.error("--corpus is required without --report")
    if unknown := set(args.arms.split(",")) - set(ARMS):
        parser.error(f"--arms: there is no {', '.join(sorted(unknown))}; arms are {', '.join(ARMS)}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the arms seed by seed, so that an interrupted study has complete comparisons."""
    args = parse(arguments)
    arms = args.arms.split(",")
    if args.sweep:
        return sweep(args.corpus, args.out, arms)
    if not args.report:
        for seed in map(int, args.seeds.split(",")):
            for arm in arms:
                run(args.corpus, args.out / f"{arm}-{seed}", *ARMS[arm], seed)
    print(report(args.out))
    print(f"\n{draw(args.out)}")
    return None


if __name__ == "__main__":
    main()
