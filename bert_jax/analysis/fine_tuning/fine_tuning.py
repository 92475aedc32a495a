"""The suite: a fine-tuned model beside the one that it was fine-tuned from, on the data of the task."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import PARTS, BootstrapMean, bootstrap_mean
from bert_jax.analysis.fine_tuning import weights
from bert_jax.analysis.fine_tuning.dev_scores import dev_scores, restored_parts, score_items, score_means
from bert_jax.analysis.fine_tuning.section import blocks, scalars
from bert_jax.analysis.fine_tuning.similarities import (
    attention_cosines,
    cka_with_interval,
    cosines,
    relative_parameter_changes,
)
from bert_jax.analysis.item_scores import MODEL
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.command.progress import progress_bar
from bert_jax.errors import require
from bert_jax.field_validation import Count, check
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.finetune import read_source
from bert_jax.finetune.label_order import check_head
from bert_jax.finetune.options import FileOptions, FinetuneOptions
from bert_jax.finetune.seed_run import SourceEncoder
from bert_jax.finetune.task_data import TaskData, baseline_score
from bert_jax.finetune.tasks import check_one_label, open_task
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextRow, batches
from bert_jax.interventions.task_evaluation import rows_of, task_logits, task_losses, with_params
from bert_jax.storage.paths import to_path
from bert_jax.training.task import Params

TOKENS = 2048
"""Tokens whose vectors are compared."""
TOKENS_PER_BATCH = 1024
"""Of the comparison, which keeps the attention of all heads."""


@dataclass(frozen=True)
class FineTuningSettings(FileOptions):
    """Which models are compared, and on what."""

    base: str = ""
    """The model that MODEL was fine-tuned from."""
    task: str = ""
    """Name of the task, as of `bert-jax finetune --task`; its files are in task/."""
    max_length: Count = 128
    """Tokens of an example, special ones included, at most the model's positions: as in fine-tuning (squad: 384)."""
    examples: Count = 500
    """Examples of dev whose vectors and attention are compared."""
    loss_examples: Count = 200
    """Examples of train, and of dev, over which losses are averaged."""
    line: tuple[float, ...] = (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    """Points on the line: 0 is the pretrained body, 1 the fine-tuned one."""

    def __post_init__(self) -> None:
        check(self, "fine-tuning.")
        require(bool(self.line), "fine-tuning.line needs at least one number")


class Setup(NamedTuple):
    """The models and the data, read and checked."""

    model: LoadedModel
    base: SourceEncoder
    data: TaskData
    params: Params
    """Of the model, NumPy."""


def run(inputs: SuiteInputs, settings: FineTuningSettings) -> SuiteResult:
    """Compare the models, restore early layers, and compute losses on the line.

    Raises:
      UserError: no task head; the base is missing, another architecture or has another vocabulary; task data that do
        not have the form or the labels of the task.
    """
    setup = _read(inputs, settings)
    dev = next(name for name, split in setup.data.splits.items() if split.is_scored)
    examples = setup.data.splits[dev].examples
    chosen = _draw(len(examples.lengths), settings.examples, inputs.seed)
    result: dict[str, Any] = {
        "layers": setup.model.config.num_layers,
        "seed": inputs.seed,
        "task": settings.task,
        "base_sha256": setup.base.sha256,
        "compared_examples": len(chosen),
        "similarity": _similarity(inputs, setup, rows_of(examples, chosen)),
        "parameter_distance": relative_parameter_changes(setup.params, setup.base.model.params),
    }
    losses = {
        "train": (setup.data.train, _draw(len(setup.data.train.lengths), settings.loss_examples, inputs.seed)),
        "dev": (examples, _draw(len(examples.lengths), settings.loss_examples, inputs.seed)),
    }
    result["loss_examples"] = {name: len(indices) for name, (_, indices) in losses.items()}
    return result | _restored(inputs, setup, losses) | _line(inputs, setup, settings, losses)


def _read(inputs: SuiteInputs, settings: FineTuningSettings) -> Setup:
    model = inputs.model
    require(model.heads.task is not None, "fine-tuning: the model has no task head: give a fine-tuned model")
    require(bool(settings.base), "--fine-tuning.base is missing: give the model that MODEL was fine-tuned from")
    require(bool(settings.task), "--fine-tuning.task is missing: give the task that MODEL was fine-tuned on, as sst2")
    base, named = read_source(to_path(settings.base)), f"--fine-tuning.base {settings.base}"
    weights.check_same_architecture(model.config, base.model.config, named)
    same = base.tokenizer.fingerprint == model.tokenizer.fingerprint
    require(same, f"{named} has another vocabulary than the model: give the model that it was fine-tuned from")
    length = min(settings.max_length, model.config.max_positions)
    options = FinetuneOptions(**settings.file_options(), max_length=length)
    data, _ = open_task(settings.task, inputs.data / "task", options, base)
    check_one_label(settings.task, data, "the suite fine-tuning")
    check_head(model.heads.task, data, "the model", "give the data in task/ that it was fine-tuned on")
    params = weights.with_body_of(model.params, model.params)
    return Setup(model, base, data, params)


def _draw(total: int, count: int, seed: int) -> np.ndarray:
    """Indices of examples, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(total)[:count])


def _similarity(inputs: SuiteInputs, setup: Setup, rows: list[TextRow]) -> dict[str, Any]:
    """Similarities of the fine-tuned model to the pretrained one, and to random weights."""
    random = inputs.with_random_weights().params
    others = {"base": setup.base.model.params, "random_weights": random}
    models = [with_params(setup.model, weights.with_body_of(setup.params, params)) for params in others.values()]
    positions = np.repeat(np.arange(len(rows)), [len(row.input_ids) for row in rows])
    tokens = np.sort(np.random.default_rng(inputs.seed).permutation(len(positions))[:TOKENS])
    firsts = np.cumsum([0, *(len(row.input_ids) for row in rows[:-1])])
    of_row = {int(row): tokens[positions[tokens] == row] - firsts[row] for row in np.unique(positions[tokens])}
    shape = (len(others), setup.model.config.num_layers)
    vectors: list[list[np.ndarray]] = [[] for _ in range(3)]
    cls = np.zeros((len(others), shape[1] + 1, len(rows)))
    attention = np.zeros((*shape, setup.model.config.num_heads, len(rows)))
    owners: list[np.ndarray] = []
    names = ["hidden_states", "layers.*.attention.probabilities"]
    with progress_bar("fine-tuning: similarity", len(rows), "example", shown=inputs.progress) as bar:
        for batch in batches(rows, setup.model.tokenizer.pad_id, TOKENS_PER_BATCH):
            states, maps = zip(*(capture(one, batch, names).values() for one in (setup.model, *models)), strict=True)
            for b, index in enumerate(batch.indices):
                if index < 0:
                    continue
                n, kept = batch.lengths[b], of_row.get(int(index), np.zeros(0, np.int64))
                owners.append(np.full(len(kept), index))
                for collection, state in zip(vectors, states, strict=True):
                    collection.append(state[:, b, kept])
                for i, (state, other) in enumerate(zip(states[1:], maps[1:], strict=True)):
                    cls[i, ..., index] = cosines(states[0][:, b, 0], state[:, b, 0])
                    attention[i, ..., index] = attention_cosines(maps[0][:, b, :, :n, :n], other[:, b, :, :n, :n])
            bar.update(int((batch.indices >= 0).sum()))
    first, *of_others = (np.concatenate(one, axis=1) for one in vectors)
    owner = np.concatenate(owners)
    found: dict[str, Any] = {"tokens": len(tokens)}
    for i, (name, other) in enumerate(zip(others, of_others, strict=True)):
        of_tokens = np.stack([np.bincount(owner, one, len(rows)) for one in cosines(first, other)])
        cka = [cka_with_interval(x, y, owner % PARTS) for x, y in zip(first, other, strict=True)]
        of_heads = bootstrap_mean(attention[i])
        found[name] = {
            "cosine_of_tokens": bootstrap_mean(of_tokens, None, np.bincount(owner, minlength=len(rows)))._asdict(),
            "cosine_of_cls": bootstrap_mean(cls[i])._asdict(),
            "cka_of_tokens": dict(zip(BootstrapMean._fields, zip(*cka, strict=True), strict=True)),
            "attention_cosine": of_heads.value.tolist(),
            "attention_half_width": of_heads.half_width,
            "attention_cosine_of_layers": bootstrap_mean(attention[i].mean(1))._asdict(),
            "attention_cosine_mean": bootstrap_mean(attention[i].mean((0, 1)))._asdict(),
        }
    return found


LossExamples = dict[str, tuple[EncodedExamples, np.ndarray]]
"""Examples of a split, and which of them a loss is averaged over."""


def _losses(setup: Setup, params: Params, losses: LossExamples) -> dict[str, dict[str, Any]]:
    """The mean loss of each split with its interval over examples."""
    model, kind = with_params(setup.model, params), setup.data.kind
    found = {}
    for name, (examples, indices) in losses.items():
        of_examples = task_losses(task_logits(model, examples, indices), examples, indices, kind)
        found[name] = bootstrap_mean(of_examples.sums, None, of_examples.weights)._asdict()
    return found


def _restored(inputs: SuiteInputs, setup: Setup, losses: LossExamples) -> dict[str, Any]:
    """Score and losses with the first parts of the body restored, and with a body of random weights."""
    base, stages = setup.base.model.params, weights.num_stages(setup.params)
    restored, scores = [], []
    with progress_bar("fine-tuning: restored layers", stages + 2, "model", shown=inputs.progress) as bar:
        for count in range(stages + 2):
            params = (
                weights.restore_early(setup.params, base, count)
                if count <= stages
                else weights.with_body_of(setup.params, inputs.with_random_weights().params)
            )
            scores.append(dev_scores(with_params(setup.model, params), setup.data))
            restored.append(_losses(setup, params, losses))
            bar.update()
    names = [MODEL, *(f"base's {part}" for part in restored_parts(stages - 1)[1:]), "random body"]
    tests = score_items(dict(zip(names, scores, strict=True)))
    means = score_means([one.score for one in scores], setup.data.main_metrics, tests)
    examples = sum(len(one.examples.lengths) for one in setup.data.splits.values() if one.is_scored)
    return {
        "metric": f"mean of {', '.join(setup.data.main_metrics)} on dev",
        "best_constant_score": baseline_score(setup.data),
        "scored_examples": next((len(one.items) for one in tests.values()), examples),
        "restored_score": {key: of_models[:-1] for key, of_models in means.items()},
        "restored_loss": restored[:-1],
        "random_body_score": {key: of_models[-1] for key, of_models in means.items()},
        "random_body_loss": restored[-1],
        **({ITEMS: tests} if tests else {}),
    }


def _line(inputs: SuiteInputs, setup: Setup, settings: FineTuningSettings, losses: LossExamples) -> dict[str, Any]:
    """Losses between and beyond the pretrained and the fine-tuned body."""
    found = []
    with progress_bar("fine-tuning: line", len(settings.line), "point", shown=inputs.progress) as bar:
        for alpha in settings.line:
            point = weights.point_on_line(setup.params, setup.base.model.params, alpha)
            found.append(_losses(setup, point, losses))
            bar.update()
    return {"line": list(settings.line), "line_loss": found}


SUITE = Suite("fine-tuning", FineTuningSettings, ("task",), run, blocks, scalars, required=("base", "task"))
