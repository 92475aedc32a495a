"""The suite: importances of heads, losses without them, and pruning curves, for the MLM loss or a task."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.analysis.heads.ablation import leave_one_out, prune, without_layers
from bert_jax.analysis.heads.head_measures import counts_to_remove, removable_share, top_share
from bert_jax.analysis.heads.section import blocks, scalars
from bert_jax.analysis.rank_correlation import rank_correlation
from bert_jax.analysis.suite import Suite, SuiteInputs, SuiteResult
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.field_validation import Count, NonNegative, Rate, Share, check
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.importance import importance, normalize_by_layer
from bert_jax.interventions.importance_data import ImportanceData, read_task, read_texts
from bert_jax.interventions.pruning_masks import CONTEXT, Evaluation, evaluate, mask_derivatives


@dataclass(frozen=True)
class HeadsSettings(FileOptions):
    """Which loss is measured, on what, and how heads are removed."""

    task: str = ""
    """Name of the task that MODEL was fine-tuned on, as of `bert-jax finetune --task`; its files are in task/. Without
    it the loss is that of masked tokens in text/."""
    examples: Count = 24
    """Texts, or examples of the task's train split, from which importances are computed; losses have as many other
    texts, or examples of each dev split."""
    max_length: Count = 64
    """Tokens of a text or example, special ones included, at most the model's positions; longer texts are skipped,
    longer examples of a task are truncated."""
    mask_share: Rate = 0.15
    """Share of a text's tokens that are masked, all by the mask token; at least one token is."""
    normalize_by_layer: bool = False
    """Divide importances by their L2 norm in the layer before heads are ordered for pruning, as Michel et al. did for
    translation; on pretrained MLMs the plain ones keep the loss lower (docs/log/analysis.md, 2026-11-25)."""
    step: Share = 0.1
    """Share of all heads that is removed at a time."""
    random_orders: Count = 2
    """Random orders of removal, the baseline."""
    rise: NonNegative = 0.1
    """Rise of the loss, as a share of its value, up to which heads count as removable."""

    def __post_init__(self) -> None:
        check(self, "heads.")
        require(self.mask_share > 0, "heads.mask_share is 0: it must be above 0")
        require(self.step > 0, "heads.step is 0: it must be above 0")

    def finetune_options(self, positions: int) -> FinetuneOptions:
        """The options of fine-tuning that read the task, for a model with this many positions."""
        return FinetuneOptions(**self.file_options(), max_length=min(self.max_length, positions))


def unsuited(inputs: SuiteInputs, settings: HeadsSettings) -> str | None:
    """Why the model or the data do not have what the loss needs."""
    heads, folder = inputs.model.heads, "task" if settings.task else "text"
    if settings.task and heads.task is None:
        return "--heads.task needs a fine-tuned model, and the model has no task head"
    if not settings.task and not heads.mlm:
        return "the model has no MLM head: give the task that it was fine-tuned on as --heads.task"
    if not settings.task and inputs.model.config.direction != "bidirectional":
        return "a causal model does not predict masked tokens: give a task as --heads.task"
    return None if (inputs.data / folder).is_dir() else f"{inputs.data} has no folder {folder}"


def run(inputs: SuiteInputs, settings: HeadsSettings) -> SuiteResult:
    """Importances, losses without heads and layers, and losses of pruned models.

    Raises:
      UserError: neither an MLM head nor a task, or texts or task data that cannot be used.
    """
    reason = unsuited(inputs, settings)
    require(reason is None, f"heads: {reason}")
    model, config = inputs.model, inputs.model.config
    shape = (config.num_layers, config.num_heads)
    data = _read(inputs, settings)
    everything = {CONTEXT: np.ones(shape, bool)}

    def importance_in(model: LoadedModel) -> np.ndarray:
        return importance(mask_derivatives(model, data.for_importance, everything)[CONTEXT])

    importances, random = importance_in(model), inputs.of_random_weights("heads", importance_in)
    unchanged = evaluate(model, data.for_losses, everything)
    removed = _remove(inputs, settings, data, importances, unchanged)
    curve = removed["pruning"]["iterative"]
    shares = [count / importances.size for count in curve["removed"]]
    differences = removed["leave_one_out"]["loss_difference"]
    return {
        "layers": shape[0],
        "heads": shape[1],
        "seed": inputs.seed,
        **data.about,
        "importance_examples": data.for_importance.count,
        "examples": data.for_losses.count,
        "labels": int(unchanged.weights.sum()),
        "normalize_by_layer": settings.normalize_by_layer,
        "loss": unchanged.loss,
        "score": unchanged.score,
        "importance": importances,
        "importance_normalized": normalize_by_layer(importances),
        "top_tenth_share": top_share(importances),
        "random_weights_top_tenth_share": top_share(random),
        "importance_ablation_correlation": rank_correlation(importances.ravel(), differences.ravel()),
        **removed,
        "rise": settings.rise,
        "removable_share": removable_share(shares, curve["loss"], settings.rise),
        "removable_share_random_order": removable_share(
            shares, removed["pruning"]["random"]["loss_mean"], settings.rise
        ),
    }


def _read(inputs: SuiteInputs, settings: HeadsSettings) -> ImportanceData:
    model, count, seed = inputs.model, settings.examples, inputs.seed
    if not settings.task:
        paths = inputs.files("text", ".txt")
        return read_texts(model, paths, count, settings.max_length, settings.mask_share, seed)
    options = settings.finetune_options(model.config.max_positions)
    return read_task(model, inputs.data / "task", settings.task, options, count, seed, max_dev_examples=count)


def _remove(
    inputs: SuiteInputs, settings: HeadsSettings, data: ImportanceData, importances: np.ndarray, unchanged: Evaluation
) -> dict[str, Any]:
    """Losses without heads: one by one, by layer, and growing shares in three kinds of order."""
    model, shape, rng = inputs.model, importances.shape, np.random.default_rng(inputs.seed)

    def losses(mask: np.ndarray) -> Evaluation:
        return evaluate(model, data.for_losses, {CONTEXT: mask})

    def current(mask: np.ndarray) -> np.ndarray:
        found = importance(mask_derivatives(model, data.for_importance, {CONTEXT: mask})[CONTEXT]) * mask
        return normalize_by_layer(found) if settings.normalize_by_layer else found

    steps = len(counts_to_remove(importances.size, settings.step))
    total = importances.size + 2 * shape[0] + (2 + settings.random_orders) * steps
    with progress_bar("heads", total, "pass", shown=inputs.progress) as bar:
        found: dict[str, Any] = {"leave_one_out": leave_one_out(losses, unchanged, shape, bar)}
        found["layers_removed"] = without_layers(losses, importances, bar)
        how = {"step": settings.step, "bar": bar}
        curves: dict[str, Any] = {
            name: prune(losses, current, shape, iterative=iterative, **how)
            for name, iterative in (("iterative", True), ("once", False))
        }
        orders = rng.random((settings.random_orders, *shape))
        randoms = [prune(losses, lambda mask, one=one: one, shape, iterative=False, **how) for one in orders]
    curves["random"] = {"removed": randoms[0]["removed"]} | {
        f"{name}_{kind}": reduce([one[name] for one in randoms], axis=0).tolist()
        for name in ("loss", "score")
        for kind, reduce in (("mean", np.mean), ("lowest", np.min), ("highest", np.max))
    }
    return found | {"pruning": curves}


SUITE = Suite("heads", HeadsSettings, ("text", "task"), run, blocks, scalars, any_folder=True, unsuited=unsuited)
