"""Iterative pruning: heads and feed-forward units removed by importance, to a checkpoint that lacks them.

Importance is that of Michel et al. (2019, arXiv:1905.10650, equation 2): the mean over examples of the absolute
derivative of the loss by a factor of a head's context or of a unit's activation. It is computed again before each of
several removals, as in TextPruner (Yang et al. 2022, arXiv:2203.15996): one-shot importances say nothing about a head
whose twin is removed with it. Shapes: L layers, n heads or units of a layer.
"""

from typing import Any, NamedTuple

import numpy as np
import tqdm

from bert_jax.command.progress import progress_bar
from bert_jax.compress.prune_options import TEXT_LENGTH, PruneOptions
from bert_jax.config import ModelConfig
from bert_jax.convert.conversion import check_destination
from bert_jax.errors import require
from bert_jax.inference import loaded_model
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.importance import importance, most_important
from bert_jax.interventions.importance_data import ImportanceData, read_task, read_texts
from bert_jax.interventions.pruning_masks import ACTIVATIONS, CONTEXT, Evaluation, Examples, evaluate, mask_derivatives
from bert_jax.interventions.smaller_model import Kept, heads_and_units, mask_of, write_smaller
from bert_jax.storage.paths import StoredPath


class PruneResult(NamedTuple):
    """The pruned model beside the whole one."""

    about: dict[str, Any]
    """Objective, metric, numbers of examples and labels, seed, iterations."""
    sizes: dict[str, tuple[int, int]]
    """Heads and units of a layer: of the whole and of the pruned model."""
    whole: Evaluation
    smaller: dict[str, Any]
    """Of `smaller_model.write_smaller`."""
    kept: Kept

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `kept_heads` has the numbers of each layer's heads."""
        heads = {"kept_heads": self.kept[CONTEXT].tolist()} if CONTEXT in self.kept else {}
        whole = {"loss": self.whole.loss, "score": self.whole.score}
        return self.about | {"sizes": self.sizes, "whole": whole, "pruned": self.smaller} | heads

    def summary_lines(self) -> list[str]:
        """Sizes, quality and speed of both models as a table, and how exact the pruned one is."""
        smaller, speed = self.smaller, self.smaller["speed"]
        lines = [
            f"pruned by {self.about['objective']}: {self.about['importance_examples']:,} examples for importances, "
            f"{self.about['iterations']} iterations; score: {self.about['metric']}",
            f"  {'':8}{'heads':>6}{'units':>8}{'parameters':>14}{'loss':>9}{'score':>9}{'ms a pass':>11}",
        ]
        for i, (name, key) in enumerate((("whole", "whole"), ("pruned", "smaller"))):
            found = {"loss": self.whole.loss, "score": self.whole.score} if i == 0 else smaller
            lines.append(
                f"  {name:8}{self.sizes['heads'][i]:>6}{self.sizes['units'][i]:>8,}{smaller['parameters'][key]:>14,}"
                f"{found['loss']:>9.4f}{found['score']:>9.4f}{speed['milliseconds'][key]:>11.1f}"
            )
        return [
            *lines,
            f"  {speed['ratio']:.2f} times as fast: {speed['rows']} x {speed['tokens_per_row']} tokens on "
            f"{speed['device']}, in turn, median of {speed['rounds']} passes of the encoder",
            f"  logits: at most {smaller['largest_logit_difference']:.1e} from those of the masked model, whose masks "
            f"change them by up to {smaller['largest_logit_change_by_mask']:.2g}",
        ]


def prune(
    source: StoredPath,
    data: StoredPath,
    out: StoredPath,
    options: PruneOptions = PruneOptions(),  # noqa: B008 (frozen)
    *,
    progress: bool = False,
) -> PruneResult:
    """Write a model without the less important heads and units of another one.

    Args:
      source: any model that `bert-jax convert` reads.
      data: directory with the files of the task, or .txt files.
      out: the directory to create, in the native format.
      options: what to remove.
      progress: whether a progress bar is shown.

    Raises:
      UserError: the source has no head for the loss, the data do not have the form of the task, the shares leave or
        remove nothing, or `out` exists or cannot be written.
    """
    check_destination(out, "--out ")
    model = loaded_model.load(source)
    require(
        model.config.dense_dtype != "int8",
        f"{source} is in 8-bit integers, whose scales change with what is removed: prune it before it is quantised",
    )
    require(
        options.units == 1 or model.config.feed_forward_networks == 1,
        f"{source} has several feed-forward networks in a layer, whose units cannot be removed: give --units 1",
    )
    counts = _counts(options, model.config)
    examples = _read(model, source, data, options)
    whole = evaluate(model, examples.for_losses, {})
    iterations = min(options.iterations, max(heads_and_units(model.config)[site] - n for site, n in counts.items()))
    with progress_bar("prune", iterations, "iteration", shown=progress) as bar:
        kept = choose_kept_indices(model, examples.for_importance, counts, iterations, bar)
    smaller = write_smaller(model, source, examples.for_losses, kept, out)
    about = examples.about | {
        "importance_examples": examples.for_importance.count,
        "examples": examples.for_losses.count,
        "labels": int(whole.weights.sum()),
        "iterations": iterations,
        "seed": options.seed,
    }
    before = heads_and_units(model.config)
    names = {"heads": CONTEXT, "units": ACTIVATIONS}
    both = {name: (before[site], counts.get(site, before[site])) for name, site in names.items()}
    return PruneResult(about, both, whole, smaller, kept)


def _counts(options: PruneOptions, config: ModelConfig) -> dict[str, int]:
    """Heads and units that a layer keeps, by site, where some are removed.

    Raises:
      UserError: a share that leaves none, or removes none.
    """
    counts = {}
    for site, share, flag in ((CONTEXT, options.heads, "--heads"), (ACTIVATIONS, options.units, "--units")):
        size = heads_and_units(config)[site]
        kept = round(share * size)
        require(kept > 0, f"{flag} {share:g} leaves none of the {size:,} of a layer: give at least {1 / size:.2g}")
        if kept < size:
            counts[site] = kept
    require(
        bool(counts),
        f"--heads {options.heads:g} and --units {options.units:g} remove nothing: a layer has {config.num_heads} heads "
        f"and {config.intermediate_size:,} units: give smaller shares",
    )
    return counts


def choose_kept_indices(
    model: LoadedModel, examples: Examples, counts: dict[str, int], iterations: int, bar: tqdm.tqdm
) -> dict[str, np.ndarray]:
    """What every layer keeps by site, after removals of equal parts.

    Args:
      model: the whole model.
      examples: for importances.
      counts: heads and units that a layer keeps in the end, by site.
      iterations: number of removals; one that would remove less than one head and one unit is skipped.
      bar: updated once per iteration.
    """
    whole = heads_and_units(model.config)
    masks = {site: np.ones((model.config.num_layers, whole[site]), bool) for site in counts}
    kept: dict[str, np.ndarray] = {}
    for iteration in range(1, iterations + 1):
        targets = {site: whole[site] - (whole[site] - n) * iteration // iterations for site, n in counts.items()}
        if any(targets[site] < masks[site][0].sum() for site in counts):
            derivatives = mask_derivatives(model, examples, masks)
            kept = {
                site: most_important(importance(derivatives[site]), model.config, targets[site], masks[site])
                for site in counts
            }
            masks = {site: mask_of(chosen, whole[site]) for site, chosen in kept.items()}
        bar.update()
    return kept


def _read(model: LoadedModel, source: StoredPath, data: StoredPath, options: PruneOptions) -> ImportanceData:
    heads, task = model.heads, options.task
    require(data.is_dir(), f"--data {data} is not a directory: give the one with the texts or the files of the task")
    if task:
        require(
            heads.task is not None,
            f"{source} has no head of a task: fine-tune it first (bert-jax finetune), or leave --task out",
        )
        return read_task(model, data, task, options.finetune_options(), options.examples, options.seed)
    require(heads.mlm, f"{source} has no MLM head: give the task that it was fine-tuned on as --task")
    require(
        model.config.direction == "bidirectional",
        f"{source} is a causal model, which does not predict masked tokens: give a task as --task",
    )
    paths = sorted(data.glob("*.txt"), key=str)
    require(bool(paths), f"--data {data} has no .txt files, and without --task texts are needed: add them, or --task")
    length = options.max_length or TEXT_LENGTH
    return read_texts(model, paths, options.examples, length, options.mask_share, options.seed)
