"""Make the reference curves of `bert-jax doctor --against`, and measure the deviations of correct runs from them.

    python scripts/make_reference_curves.py bert_tiny --corpus ref/corpus

trains the reference and every correct variant (other meshes, orders of sums, precisions), each in its own process, and
writes bert_jax/doctor/curves/PRESET.json; with --wrong it also trains mistakes. The printed tables are in
docs/reference.md. Finished runs are kept in --scratch and not repeated.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bert_jax import config as config_lib
from bert_jax.config import CheckpointConfig, Config, EvaluationConfig, LogConfig, Phase, RecoveryConfig, presets
from bert_jax.data.corpus import Corpus
from bert_jax.data.mixture import CorpusWeight
from bert_jax.doctor import reference_curve
from bert_jax.doctor.reference_curve import Curve, CurveValues, Precision
from bert_jax.training.run_directory.metrics import read_metrics

METRICS = ("mlm_loss", "pair_loss", "gradient_norm", "parameter_norm", "learning_rate")
DIGITS = 8

RECIPES: dict[str, dict[str, Any]] = {
    "bert_tiny": {"learning_rate": 2e-3},
    # As in bert_tiny: with dropout, fewer targets, other weights or a higher rate, a model of this depth learns only
    # the frequencies of words in 200 steps.
    "bert_mini": {
        "model": {"initializer_range": 0.04, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "objective": {"mask_rate": 0.3},
        "learning_rate": 5e-4,
    },
}
"""Changes of the preset, so that 200 steps learn more than word frequencies."""

EIGHT = "--xla_force_host_platform_device_count=8"
RIGHT: dict[str, tuple[Precision, str, dict[str, Any]]] = {
    "accumulation 4": ("float32", "", {"accumulation": 4}),
    "8 devices, data 2, fsdp 2, tensor 2": ("float32", EIGHT, {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}}),
    # The float32 next to 0.999: different formulas of the bias correction deviate by as much.
    "beta2 0.99899995": ("float32", "", {"optimizer": {"beta2": 0.99899995}}),
    "bfloat16": ("bfloat16", "", {"model": {"compute_dtype": "bfloat16"}}),
    "bfloat16, accumulation 4": ("bfloat16", "", {"model": {"compute_dtype": "bfloat16"}, "accumulation": 4}),
    "bfloat16, 8 devices": ("bfloat16", EIGHT, {"model": {"compute_dtype": "bfloat16"}, "mesh": {"tensor": 2}}),
}
"""Settings that change only the rounding: precision, flags of XLA, changes."""
WRONG: dict[str, dict[str, Any]] = {
    "learning rate x 2": {"phase": {"learning_rate": 2.0}},
    "learning rate x 1.1": {"phase": {"learning_rate": 1.1}},
    "no warmup": {"phase": {"warmup_steps": 0}},
    "no decay of the learning rate": {"phase": {"end_learning_rate": 1.0}},
    "dropout on": {"model": {"hidden_dropout": 0.1}},
    "10 % masked": {"objective": {"mask_rate": 0.1}},
    "predicted tokens always [MASK]": {"objective": {"mask_token_share": 1.0, "random_token_share": 0.0}},
    "no weight decay": {"optimizer": {"weight_decay": 0.0}},
    "beta2 0.98": {"optimizer": {"beta2": 0.98}},
    "no clipping": {"optimizer": {"clip_norm": None}},
    "epsilon 1e-8": {"optimizer": {"epsilon": 1e-8}},
    "gelu by tanh": {"model": {"activation": "gelu_tanh"}},
    "another seed": {"seed": 1},
}
"""Settings that are mistakes; learning rates are relative to the peak."""


def recipe(name: str) -> Config:
    """Config of a preset's reference run."""
    preset, changes = presets.load_config(name), RECIPES[name]
    return config_lib.replace(
        preset,
        model={"vocab_size": 1000, "scan_unroll": 1, **changes.get("model", {})},
        objective=changes.get("objective", {}),
        # Ten times BERT's, so that wrongly decayed parameters show in 200 steps.
        optimizer={"weight_decay": 0.1},
        phases=(Phase(steps=200, seq_len=64, batch_size=16, learning_rate=changes["learning_rate"], warmup_steps=20),),
        checkpoint=CheckpointConfig(),
        log=LogConfig(every=1, layers=False, tensorboard=False),
        evaluation=EvaluationConfig(every=0, rows=16, batch_size=16),
        recovery=RecoveryConfig(spike=None),
    )


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The reference config with the changes of a variant."""
    changes = json.loads(json.dumps(changes))
    phase = config.phases[0]
    by = changes.pop("phase", {})
    for rate in ("learning_rate", "end_learning_rate"):
        by[rate] = by.get(rate, getattr(phase, rate) / phase.learning_rate) * phase.learning_rate
    by["accumulation"] = changes.pop("accumulation", 1)
    return config_lib.replace(config, phases=(dataclasses.replace(phase, **by),), **changes)


def train(config: Config, corpus: Path, workdir: Path) -> None:
    """Train one run in this process."""
    from bert_jax.training import pretraining

    pretraining.pretrain(config, [CorpusWeight(corpus)], workdir)
    (workdir / "done").touch()


def trained(arguments: argparse.Namespace, variant: str, flags: str = "", **changes: Any) -> CurveValues:
    """Metrics of one run, trained in its own process unless it is finished."""
    workdir = arguments.scratch / arguments.preset / "".join(c if c.isalnum() else "_" for c in variant)
    if not (workdir / "done").exists():
        os.environ.update(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")  # of the process
        config = changed(recipe(arguments.preset), changes)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(train, config, arguments.corpus, workdir).result()
    values = reference_curve.metric_values(read_metrics(workdir / "metrics.jsonl"), METRICS)
    return {metric: [float(f"{value:.{DIGITS}g}") for value in row] for metric, row in values.items()}


def spread(runs: Sequence[CurveValues], reference: CurveValues) -> CurveValues:
    """Largest deviation of each window's mean among runs."""
    off = {
        metric: [reference_curve.window_deviations(run[metric], reference[metric]) for run in runs]
        for metric in METRICS
    }
    return {metric: [float(f"{max(column):.2g}") for column in zip(*rows, strict=True)] for metric, rows in off.items()}


def table(runs: dict[str, tuple[Precision, CurveValues]], curve: Curve) -> str:
    """Table of all runs: largest deviation relative to the tolerance, in bold if above it."""
    lines = [f"| run | {' | '.join(('first', *METRICS))} |", f"|---|{'---|' * (len(METRICS) + 1)}"]
    for name, (precision, values) in runs.items():
        cells = []
        for finding in reference_curve.compare(values, curve, precision):
            off = finding.values["deviations"]
            bounds = finding.values.get("bounds") or [finding.values["bound"]] * len(off)
            parts = off.values() if isinstance(off, dict) else off
            worst = max(one / bound for one, bound in zip(parts, bounds, strict=True))
            shown = "> 10,000" if worst > 1e4 else f"{worst:,.0f}" if worst >= 10 else f"{worst:.2g}"
            cells.append(f"**{shown}**" if finding.level == "error" else shown)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make(arguments: argparse.Namespace) -> None:
    """Write the curve, and print the tables."""
    reference = trained(arguments, "reference")
    runs = {name: (kind, trained(arguments, name, flags, **changes)) for name, (kind, flags, changes) in RIGHT.items()}
    kinds: tuple[Precision, ...] = ("float32", "bfloat16")
    spreads = {kind: spread([values for of, values in runs.values() if of == kind], reference) for kind in kinds}
    config = config_lib.to_dict(recipe(arguments.preset))
    curve = Curve(config, Corpus.open(arguments.corpus).identity, reference, spreads)
    reference_curve.CURVES_DIRECTORY.mkdir(exist_ok=True)
    text = json.dumps(vars(curve), separators=(",", ":"))
    (reference_curve.CURVES_DIRECTORY / f"{arguments.preset}.json").write_text(text.replace('],"', '],\n"') + "\n")
    print(table(runs, curve), "\n", flush=True)
    if not arguments.wrong:
        return
    wrong = {name: ("float32", trained(arguments, name, **changes)) for name, changes in WRONG.items()}
    print(table(wrong, curve), "\n")
    print(table({name: ("bfloat16", values) for name, (_, values) in wrong.items()}, curve))


def main() -> None:
    """Parse the command line, then make curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=RECIPES)
    parser.add_argument("--corpus", type=Path, required=True, help="the corpus of docs/reference.md")
    parser.add_argument("--scratch", type=Path, default=Path("runs/reference"), help="directory of the runs")
    parser.add_argument("--wrong", action="store_true", help="also train the mistakes")
    make(parser.parse_args())


if __name__ == "__main__":
    main()
