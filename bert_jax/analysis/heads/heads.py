"""The suite: importances of heads, losses without them, and pruning curves, for the MLM loss or a task."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, bootstrap_mean, cross_fit, percentiles, resampled_means
from bert_jax.analysis.heads.ablation import WithoutHead, leave_one_out, prune, without_layers
from bert_jax.analysis.heads.head_measures import counts_to_remove, removable_share, top_share
from bert_jax.analysis.heads.section import LOSS, RISE, blocks, scalars
from bert_jax.analysis.item_scores import MODEL, ItemScores, mean_of_seeds
from bert_jax.analysis.rank_correlation import rank_correlation
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.array_types import Float
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
    random_seeds: Count = 1
    """Seeds of random weights, from --seed on, each as costly as the first; their numbers are means over them."""

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

    def derivatives_in(model: LoadedModel) -> np.ndarray:
        return np.abs(mask_derivatives(model, data.for_importance, everything)[CONTEXT].astype(np.float64))

    of_examples = derivatives_in(model)
    randoms = inputs.of_random_weights("heads", derivatives_in, settings.random_seeds)
    importances = of_examples.mean(0)
    unchanged = evaluate(model, data.for_losses, everything)
    removed, alone, evaluations = _remove(inputs, settings, data, importances, unchanged)
    shares = np.array(removed["pruning"]["iterative"]["removed"]) / importances.size
    heads, weights = alone.sums.reshape(importances.size, -1), unchanged.weights
    differences = heads - unchanged.sums
    resampled = resampled_means(differences, np.broadcast_to(weights, differences.shape))
    of_importance = resampled_means(of_examples.reshape(len(of_examples), -1).T, seed=1)
    pruned = np.stack([one.sums for one in evaluations])
    of_pruned = resampled_means(pruned, np.broadcast_to(weights, pruned.shape))
    items = loss_items(data.names, unchanged, heads, pruned[-1], is_mlm=not settings.task)
    return {
        "layers": shape[0],
        "heads": shape[1],
        "seed": inputs.seed,
        **data.about,
        "importance_examples": data.for_importance.count,
        "examples": data.for_losses.count,
        "labels": int(weights.sum()),
        "normalize_by_layer": settings.normalize_by_layer,
        "loss": bootstrap_mean(unchanged.sums, None, weights)._asdict(),
        "score": unchanged.score,
        "importance": importances,
        "importance_half_width": bootstrap_mean(np.moveaxis(of_examples, 0, -1)).half_width,
        "importance_normalized": normalize_by_layer(importances),
        "random_seeds": settings.random_seeds,
        "top_tenth_share": _top_tenth([of_examples]),
        "random_weights_top_tenth_share": _top_tenth(randoms),
        "importance_ablation_correlation": BootstrapMean(
            rank_correlation(of_importance[0], resampled[0]),
            *percentiles(rank_correlation(of_importance[1], resampled[1])),
        )._asdict(),
        **removed,
        "rise": settings.rise,
        "removable_share": _mean(lambda one: removable_share(shares, one, settings.rise), of_pruned),
        "removable_share_random_order": removable_share(
            shares, np.array(removed["pruning"]["random"]["loss_mean"]), settings.rise
        ),
        ITEMS: items,
    }


def _top_tenth(of_seeds: Sequence[Float[np.ndarray, "E L N"]]) -> dict[str, Any]:
    """Share of the importance in the top tenth of the heads, mean over seeds with the standard deviation of one."""
    shares = [_mean(lambda one: top_share(one), resampled_means(of.reshape(len(of), -1).T)) for of in of_seeds]
    deviation = np.std([one["value"] for one in shares], ddof=1) if len(shares) > 1 else None
    return mean_of_seeds(shares) | {"deviation_of_seeds": deviation}


def _mean(measure: Callable[[np.ndarray], np.ndarray], means: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """A measure of means, with the interval of its values in the bootstrap samples."""
    value, resampled = means
    return BootstrapMean(measure(value), *percentiles(measure(resampled)))._asdict()


def loss_items(
    names: tuple[str, ...],
    unchanged: Evaluation,
    without_head: Float[np.ndarray, "heads E"],
    without_any: Float[np.ndarray, " E"],
    *,
    is_mlm: bool,
) -> dict[str, ItemScores]:
    """Tests of the loss, and of its rise without the head that matters most in the other half of the examples.

    Args:
      names: of the examples.
      unchanged: the losses with all heads.
      without_head: sums of losses without each head.
      without_any: without all heads.
      is_mlm: whether labels are tokens, which models with other tokenizers do not share.
    """
    rises = without_head - unchanged.sums
    most = cross_fit(rises, unchanged.weights)
    tests = {
        LOSS: {MODEL: unchanged.sums, "no_head": without_any},
        RISE: {MODEL: most.scores, "mean_of_all_heads": rises.mean(0)},
    }
    return {
        test: ItemScores(names, None, scores, dict.fromkeys(scores, unchanged.weights), "nats", same_tokenizer=is_mlm)
        for test, scores in tests.items()
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
) -> tuple[dict[str, Any], WithoutHead, list[Evaluation]]:
    """Losses without heads: one by one, by layer, and growing shares in three kinds of order; and the losses of the
    examples without each head, and with growing shares of the least important ones removed."""
    model, shape, rng = inputs.model, importances.shape, np.random.default_rng(inputs.seed)

    def losses(mask: np.ndarray) -> Evaluation:
        return evaluate(model, data.for_losses, {CONTEXT: mask})

    def current(mask: np.ndarray) -> np.ndarray:
        found = importance(mask_derivatives(model, data.for_importance, {CONTEXT: mask})[CONTEXT]) * mask
        return normalize_by_layer(found) if settings.normalize_by_layer else found

    steps = len(counts_to_remove(importances.size, settings.step))
    total = importances.size + 2 * shape[0] + (2 + settings.random_orders) * steps
    with progress_bar("heads", total, "pass", shown=inputs.progress) as bar:
        alone = leave_one_out(losses, shape, bar)
        weights = unchanged.weights
        found: dict[str, Any] = {
            "leave_one_out": {
                "loss": bootstrap_mean(alone.sums, None, weights).value,
                "loss_difference": bootstrap_mean(alone.sums - unchanged.sums, None, weights)._asdict(),
                "score": alone.score,
            },
            "layers_removed": without_layers(losses, importances, bar),
        }
        how = {"step": settings.step, "bar": bar}
        iterative, evaluations = prune(losses, current, shape, iterative=True, **how)
        once, _ = prune(losses, current, shape, iterative=False, **how)
        orders = rng.random((settings.random_orders, *shape))
        randoms = [prune(losses, lambda mask, one=one: one, shape, iterative=False, **how)[0] for one in orders]
    values = {"loss": [one["loss"]["value"] for one in randoms], "score": [one["score"] for one in randoms]}
    random = {"removed": randoms[0]["removed"]} | {
        f"{name}_{kind}": reduce(of_orders, axis=0).tolist()
        for name, of_orders in values.items()
        for kind, reduce in (("mean", np.mean), ("lowest", np.min), ("highest", np.max))
    }
    pruning = {"iterative": iterative, "once": once, "random": random}
    return found | {"pruning": pruning}, alone, evaluations


SUITE = Suite("heads", HeadsSettings, ("text", "task"), run, blocks, scalars, any_folder=True, unsuited=unsuited)
