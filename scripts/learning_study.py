"""Learning study on a laptop: LAMB with large batches, AdamW with small and large ones, progressive stacking.

    python scripts/learning_study.py --corpus corpus --out runs/learning             all runs, then the report
    python scripts/learning_study.py --out runs/learning --report                    the report alone

Runs are `bert-jax pretrain` commands in sequence; the same call continues an interrupted study. ARMS and CLAIMS are the
protocol of docs/learning.md, fixed before the runs. If a run fails, the study exits with the last line of its log.

The stacked arm has one layer, then two copies of it (Gong et al. 2019), and this file is its config. Its compute equals
that of two layers for 3,264 steps, counted as in bert_jax/model/flops.py, for a row of 64 tokens:

    a layer        3 * 64 * 2 * 128 * (4 * 128 + 2 * 512) + 3 * 64 * 4 * 128 * 64   =  81,788,928
    the MLM head   3 * 19 * 2 * 128 * (128 + 8,192), 19 of 64 tokens being masked    = 121,405,440

A step with one layer costs 203,194,368 / 284,983,296 = 159 / 223 of a step with two, so 1,338 of them cost as much as
954 with two: 1,338 * 159 / 223 = 954, and 3,264 - 954 = 2,310 steps remain, exactly. The first stage has 37 % of the
steps and 29 % of the compute; the paper also spends most of its time at full depth. The learning rate is continuous,
decreasing linearly from its peak to 0 over both stages, with a warmup in the first stage only. Moments are reset
between the stages.
"""

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Run as a script from a clone, nothing needs to be installed.
sys.path[:0] = [path for path in (str(ROOT),) if path not in sys.path]

from bert_jax.config import Config  # noqa: E402
from bert_jax.config.presets import load_config  # noqa: E402
from bert_jax.training.run_directory.metrics import read_metrics  # noqa: E402
from bert_jax.training.run_directory.workdir import read_config  # noqa: E402

COMMON = "--model.vocab-size 8192 --evaluation.rows 512 --checkpoint.every 1000000 --log.no-layers --log.no-tensorboard"
"""Flags of all runs. Runs save only at their end."""
BATCH_16 = (
    "--phases.0.batch-size 16 --phases.0.steps 3264 --phases.0.warmup-steps 204 --evaluation.every 272 --log.every 68"
)
BATCH_128 = (
    "--phases.0.batch-size 128 --phases.0.steps 408 --phases.0.warmup-steps 26 --evaluation.every 34 --log.every 17"
)
"""The same rows in the same order as BATCH_16, with eight times as many per step."""
ONE_LAYER, TWO_LAYERS = 1338, 2310
"""Steps of the two stages of the stacked arm."""
COST = 159 / 223
"""Cost of a step with one layer, in steps with two layers."""
ARMS = {
    "adamw_16": ("bert_tiny", f"{BATCH_16} --optimizer.name adamw --phases.0.learning-rate 2e-3"),
    "adamw_128": ("bert_tiny", f"{BATCH_128} --optimizer.name adamw --phases.0.learning-rate 5.7e-3"),
    "lamb_128": ("bert_tiny", f"{BATCH_128} --optimizer.name lamb --phases.0.learning-rate 4e-2"),
    "stacked": (str(Path(__file__).resolve()), "--evaluation.every 304 --log.every 76"),
}
"""Config and flags of each arm. AdamW's rate for large batches is the preset's times the square root of 8."""


def config() -> Config:
    """Config of the stacked arm; settings shared by all arms are given as flags, rate and warmup are adamw_16's."""
    tiny, rate = load_config("bert_tiny"), 2e-3
    between = rate * TWO_LAYERS / (ONE_LAYER + TWO_LAYERS)
    start = {"learning_rate": rate, "warmup_steps": 204, "end_learning_rate": between}
    end = {"learning_rate": between, "warmup_steps": 0, "end_learning_rate": 0.0}
    one = dataclasses.replace(tiny.phases[0], steps=ONE_LAYER, num_layers=1, **start)
    two = dataclasses.replace(one, steps=TWO_LAYERS, num_layers=2, moments="reset", step_count="reset", **end)
    return dataclasses.replace(tiny, name="bert_tiny_stacked", phases=(one, two))


CLAIMS = {
    "a": ("lamb_128", "adamw_16", "tokens"),
    "b": ("lamb_128", "adamw_128", "tokens"),
    "c": ("stacked", "adamw_16", "compute"),
}
"""The new arm, the old one, and the cost at which their held-out losses are compared, seed by seed."""
MARGIN = 0.05
"""Nats of held-out MLM loss; smaller differences are treated as equal."""
CONFIDENCE = 0.95


def held_out(workdir: Path) -> list[dict[str, Any]]:
    """Held-out metrics of a finished run, one dict per evaluation; none if the run is not finished."""
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if line["split"] == "validation"]
    return lines if lines and lines[-1]["step"] == read_config(workdir).total_steps else []


def run(corpus: Path, workdir: Path, config: str, flags: str, seed: int) -> None:
    """Train in `workdir` unless the run is finished; its output is appended to `workdir`.log."""
    if held_out(workdir):
        return
    command = ["nice", "-n", "15", sys.executable, "-m", "bert_jax", "pretrain", config, *f"{COMMON} {flags}".split()]
    command += ["--corpus", str(corpus), "--workdir", str(workdir), "--seed", str(seed)]
    log = workdir.with_suffix(".log")
    workdir.parent.mkdir(parents=True, exist_ok=True)
    print(f"{workdir.name} ...", file=sys.stderr, flush=True)
    with log.open("a") as output:
        # Run the code of this clone, in any working directory.
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        failed = subprocess.run(command, stdout=output, stderr=output, env=environment).returncode
    if failed or not held_out(workdir):
        last = (log.read_text().strip() or "it printed nothing").splitlines()[-1]
        sys.exit(f"error: {workdir.name} ended early ({last}); {log} has more")


def curves(out: Path) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Held-out metrics of the finished runs, by arm and seed."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for arm in ARMS:
        seeds = sorted(int(path.name.rpartition("-")[2]) for path in out.glob(f"{arm}-*") if path.is_dir())
        by_seed = {seed: held_out(out / f"{arm}-{seed}") for seed in seeds}
        found[arm] = {seed: lines for seed, lines in by_seed.items() if lines}
    return found


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Student's confidence interval of the mean; needs at least two differences."""
    from scipy.stats import t  # a dependency of jax

    mean, error = statistics.mean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * error
    return mean - half, mean + half


def verdict(low: float, high: float) -> str:
    """Verdict for an interval of (new - old); a significant difference may still be smaller than MARGIN."""
    if low > -MARGIN and high < MARGIN:
        return f"equal within {MARGIN} nats"
    return "lower" if high < 0 else "higher" if low > 0 else "undecided"


def report(out: Path) -> str:
    """The tables, in Markdown."""
    runs = curves(out)
    finals = {arm: {seed: lines[-1]["mlm_loss"] for seed, lines in runs[arm].items()} for arm in ARMS}
    lines = ["| arm | seeds | held-out MLM loss, mean ± sd | each |", "|---|---|---|---|"]
    for arm, by_seed in finals.items():
        values = list(by_seed.values())
        if len(values) > 1:
            each = ", ".join(f"{value:.3f}" for value in values)
            center = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
            lines.append(f"| {arm} | {len(values)} | {center} | {each} |")
    lines += ["", f"| claim | new - old, each seed | mean, {CONFIDENCE:.0%} interval | new is |", "|---|---|---|---|"]
    for name, (new, old, cost) in CLAIMS.items():
        differences = [loss - finals[old][seed] for seed, loss in finals[new].items() if seed in finals[old]]
        if len(differences) > 1:
            low, high = interval(differences)
            each = ", ".join(f"{value:+.3f}" for value in differences)
            mean = f"{statistics.mean(differences):+.3f} ({low:+.3f} to {high:+.3f})"
            lines.append(f"| ({name}) {new} - {old}, equal {cost} | {each} | {mean} | {verdict(low, high)} |")
    return "\n".join(lines)


def cost_of(arm: str, step: int, cost: str) -> float:
    """Millions of tokens, or model FLOPs in steps of adamw_16, of the first `step` steps."""
    if cost == "compute":
        return step - (min(step, ONE_LAYER) * (1 - COST) if arm == "stacked" else 0)
    return step * (128 if arm.endswith("_128") else 16) * 64 / 1e6


def draw(out: Path) -> Path:
    """Held-out loss of each arm, mean and range over seeds: against tokens, and stacking against compute."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained", sharey=True)
    titles, runs = {"tokens": "tokens seen (millions)", "compute": "compute (steps with two layers)"}, curves(out)
    for axes, (cost, title) in zip(panels, titles.items(), strict=True):
        compared = dict.fromkeys(arm for *arms, of in CLAIMS.values() if of == cost for arm in reversed(arms))
        for arm in (arm for arm in compared if runs[arm]):
            by_seed, color = list(runs[arm].values()), f"C{list(ARMS).index(arm)}"
            costs = [cost_of(arm, line["step"], cost) for line in by_seed[0]]
            losses = [[line["mlm_loss"] for line in lines] for lines in zip(*by_seed, strict=True)]
            axes.plot(costs, list(map(statistics.mean, losses)), color=color, label=arm)
            axes.fill_between(costs, list(map(min, losses)), list(map(max, losses)), color=color, alpha=0.2)
        axes.set(xlabel=title)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False)
    panels[0].set_ylabel("held-out masked-token loss (nats)")
    path = out / "learning.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the arms seed by seed, so that an interrupted study has complete comparisons; then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="directory that bert-data build made, with 8,192 token ids")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs and of learning.png")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="only report on finished runs")
    args = parser.parse_args(arguments)
    if args.corpus is None and not args.report:
        parser.error("--corpus is required without --report")
    for seed in [] if args.report else args.seeds:
        for arm, (config, flags) in ARMS.items():
            run(args.corpus, args.out / f"{arm}-{seed}", config, flags, seed)
    print(f"{report(args.out)}\n\n{draw(args.out)}")


if __name__ == "__main__":
    main()
