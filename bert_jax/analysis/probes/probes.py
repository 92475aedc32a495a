"""The suite: probes of every hidden state for parts of speech, dependency relations, entities and trees."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, bootstrap_mean
from bert_jax.analysis.item_scores import ItemScores, Values, mean_of_seeds, tests_over_seeds
from bert_jax.analysis.probes import erasure
from bert_jax.analysis.probes.attention_trees import baselines as attention_baselines
from bert_jax.analysis.probes.attention_trees import head_edges
from bert_jax.analysis.probes.by_state import (
    LabelScores,
    chain_scores,
    gold_trees,
    probe_control_trees,
    probe_labels,
    probe_trees,
    summarize_labels,
)
from bert_jax.analysis.probes.label_tasks import (
    LabelTask,
    constant_predictions,
    describe,
    entity_task,
    part_of_speech_task,
    relation_task,
    score_sentences,
)
from bert_jax.analysis.probes.probe_items import attention_items, label_items, tree_items
from bert_jax.analysis.probes.section import blocks, scalars
from bert_jax.analysis.probes.structural import TreeScores, mean_scores
from bert_jax.analysis.probes.vectors import ProbeVectors, Sample, draw_sentences, word_vectors
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult
from bert_jax.analysis.treebank import read_splits, split_of
from bert_jax.errors import require
from bert_jax.field_validation import Count, NonNegative, Rate, check
from bert_jax.finetune.tagging import TaggedSentence, read_conll
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.storage.paths import StoredPath

TaskResult = dict[str, Any]
"""Of one task: sizes and baselines, and the scores of each of ROWS."""
ROWS = ("model", "random_weights")
CONSTANTS = {"majority": "most_frequent_label", "word_type": "word's_most_frequent_label"}
"""Columns of tests by `label_tasks.constant_predictions`."""


@dataclass(frozen=True)
class ProbesSettings:
    """What the probes are fitted and scored on."""

    train_sentences: Count = 1000
    """Sentences of the train split on which probes are fitted, drawn at random."""
    dev_sentences: Count = 400
    """Sentences of the dev split on which they are scored, drawn at random."""
    max_length: Count = 128
    """Tokens of a sentence, special ones included, at most the model's positions; longer sentences are skipped."""
    epochs: Count = 8
    """Visits of each training example by a linear probe, on average, after which its training is stopped."""
    penalty: NonNegative = 1.0
    """Of half the squared norm of a linear probe's weights, in nats over all training examples."""
    mix_epochs: Count = 8
    """Visits of each training example by the probes of scalar mixes, on average."""
    tree_epochs: Count = 15
    """Passes of structural probes over the training sentences."""
    rank: Count = 64
    """Rank of structural probes, at most the hidden size."""
    erasure_sentences: Count = 500
    """Of the training sentences, those on which erasers are fitted."""
    erased_sentences: Count = 100
    """Of the dev sentences, those on which erasure is scored."""
    erasure_draws: Count = 5
    """Random subspaces, and shuffles of the labels, whose erasure is the baseline of erasing parts of speech."""
    seeds: Count = 1
    """Seeds of the probes, their control tasks and random weights, from --seed on, each as costly as the first; scores
    are means over them."""
    mask_share: Rate = 0.15
    """Share of a sentence's tokens that are masked where erasure is scored; at least one token is."""

    def __post_init__(self) -> None:
        check(self, "probes.")


def run(inputs: SuiteInputs, settings: ProbesSettings) -> SuiteResult:
    """Probes of the model and of random weights; a folder that is not there is left out.

    Raises:
      UserError: malformed data, a missing split, or too few sentences that fit.
    """
    result: SuiteResult = {
        "layers": inputs.model.config.num_layers,
        "seed": inputs.seed,
        "treebank": None,
        "entities": None,
    }
    tasks: dict[str, TaskResult] = {}
    items: dict[str, ItemScores] = {}
    if (inputs.data / "treebank").is_dir():
        result["treebank"] = _treebank(inputs, settings, tasks, items)
    if (inputs.data / "entities").is_dir():
        result["entities"] = _entities(inputs, settings, tasks, items)
    return result | {"tasks": tasks, ITEMS: items}


class TreebankProbes(NamedTuple):
    """Probes of one seed."""

    labels: dict[str, LabelScores]
    trees: TreeScores
    head_edges: np.ndarray
    """[L, N, m], of `attention_trees.head_edges`."""


def _treebank(
    inputs: SuiteInputs, settings: ProbesSettings, tasks: dict[str, TaskResult], items: dict[str, ItemScores]
) -> dict[str, Any]:
    """Everything that reads treebank/; tasks and tests are added to `tasks` and `items`."""
    splits = read_splits(inputs.files("treebank", ".conllu"))
    train, dev = _draw(inputs, settings, splits, "treebank")
    label_tasks = {"pos": part_of_speech_task(train, dev), "relations": relation_task(train, dev)}
    trees, shown = gold_trees(dev), {"progress": inputs.progress}

    def probing(seed: int) -> dict[str, Any]:
        return {"rank": settings.rank, "epochs": settings.tree_epochs, "seed": seed}

    def probe_row(model: LoadedModel, row: str, seed: int) -> TreebankProbes:
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", **shown)
        labels = {
            name: _probe_labels(inputs, settings, vectors, task, dev, seed, f"{name}, {row}")
            for name, task in label_tasks.items()
        }
        structure = probe_trees(vectors, train, dev, **probing(seed), description=f"trees, {row}", **shown)
        del vectors
        edges = head_edges(model, dev.rows, trees, description=f"trees from attention, {row}", **shown)
        return TreebankProbes(labels, structure, edges)

    rows = _of_both(inputs, settings, "treebank", probe_row)
    for name, task in label_tasks.items():
        of_task = {row: [one.labels[name] for one in of_seeds] for row, of_seeds in rows.items()}
        tasks[name] = _task_result(task, of_task)
        items |= _label_items(name, task, dev, of_task)
    structure, edges = ({row: mean_of_seeds([one[i] for one in of]) for row, of in rows.items()} for i in (1, 2))
    means = {row: mean_scores(one) for row, one in structure.items()}
    chain = chain_scores(trees)
    baselines = attention_baselines(trees, inputs.seed)

    def tests_of(both: tuple[TreebankProbes, TreebankProbes]) -> dict[str, ItemScores]:
        by_row = dict(zip(ROWS, both, strict=True))
        structures = {row: one.trees for row, one in by_row.items()}
        of_heads = {row: one.head_edges for row, one in by_row.items()}
        return tree_items(dev.names, {**structures, "chain": chain}) | attention_items(dev.names, of_heads, baselines)

    items |= tests_over_seeds(tests_of, list(zip(*rows.values(), strict=True)))
    uuas = means["model"]["uuas"]["value"]
    best = int(np.nanargmax(uuas)) if np.isfinite(uuas).any() else 0
    vectors = word_vectors(inputs.model, train, dev, description="vectors, control trees", **shown)
    control = probe_control_trees(vectors, train, dev, best, **probing(inputs.seed))
    del vectors
    return {
        **_sizes(train, dev),
        "structure": {"chain": {name: one["value"] for name, one in mean_scores(chain).items()}, "control": control}
        | means,
        "attention_trees": {
            "edges": int(baselines.gold.sum()),
            **{row: _head_uuas(of_row, baselines.gold).value for row, of_row in edges.items()},
            "half_width": _head_uuas(edges["model"], baselines.gold).half_width,
        },
        "erasure": _erasure(inputs, settings, train, dev, label_tasks["pos"].names),
    }


def _head_uuas(edges: np.ndarray, gold: np.ndarray) -> BootstrapMean:
    return bootstrap_mean(edges, None, gold)


def _of_both(
    inputs: SuiteInputs,
    settings: ProbesSettings,
    folder: str,
    probe_row: Callable[[LoadedModel, str, int], Values],
) -> dict[str, list[Values]]:
    """What `probe_row` measures in the model and in random weights, by row, for every seed."""
    rows: dict[str, list[Values]] = {row: [] for row in ROWS}
    for seed in range(inputs.seed, inputs.seed + settings.seeds):
        of_seed = dataclasses.replace(inputs, seed=seed)
        measure = functools.partial(probe_row, row=ROWS[1], seed=seed)
        rows[ROWS[0]].append(probe_row(inputs.model, ROWS[0], seed))
        rows[ROWS[1]] += of_seed.of_random_weights(f"probes, {folder}", measure)
    return rows


def _erasure(
    inputs: SuiteInputs, settings: ProbesSettings, train: Sample, dev: Sample, tags: tuple[str, ...]
) -> dict[str, Any]:
    masked = [
        erasure.mask(sample.first(count), tags, inputs.model, settings.mask_share, inputs.seed)
        for sample, count in ((train, settings.erasure_sentences), (dev, settings.erased_sentences))
    ]
    for name, one in zip(("train", "dev"), masked, strict=True):
        require(bool(one.rows), f"{inputs.data / 'treebank'}, {name}: no word of the sentences is in the vocabulary")
    return erasure.measure(
        inputs.model,
        *masked,
        draws=settings.erasure_draws,
        penalty=settings.penalty,
        seed=inputs.seed,
        progress=inputs.progress,
    )


def _entities(
    inputs: SuiteInputs, settings: ProbesSettings, tasks: dict[str, TaskResult], items: dict[str, ItemScores]
) -> dict[str, Any]:
    """Everything that reads entities/; the task and its tests are added to `tasks` and `items`."""
    train, dev = _draw(inputs, settings, _read_entities(inputs.files("entities", "")), "entities")
    task = entity_task(train, dev)

    def probe_row(model: LoadedModel, row: str, seed: int) -> LabelScores:
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", progress=inputs.progress)
        return _probe_labels(inputs, settings, vectors, task, dev, seed, f"entities, {row}")

    rows = _of_both(inputs, settings, "entities", probe_row)
    tasks["entities"] = _task_result(task, rows)
    items |= _label_items("entities", task, dev, rows)
    return _sizes(train, dev)


def _probe_labels(
    inputs: SuiteInputs,
    settings: ProbesSettings,
    vectors: ProbeVectors,
    task: LabelTask,
    dev: Sample,
    seed: int,
    description: str,
) -> LabelScores:
    epochs = {"epochs": settings.epochs, "mix_epochs": settings.mix_epochs}
    shown = {"description": description, "progress": inputs.progress}
    return probe_labels(vectors, task, dev, **epochs, penalty=settings.penalty, seed=seed, **shown)


def _task_result(task: LabelTask, rows: dict[str, list[LabelScores]]) -> TaskResult:
    return describe(task) | {row: summarize_labels(of_seeds, task) for row, of_seeds in rows.items()}


def _label_items(name: str, task: LabelTask, dev: Sample, rows: dict[str, list[LabelScores]]) -> dict[str, ItemScores]:
    constants = {
        CONSTANTS[key]: score_sentences(task, found, task.dev.labels, dev.starts)
        for key, found in constant_predictions(task).items()
    }
    return tests_over_seeds(
        lambda both: label_items(name, task.metric, dev.names, *both, constants), list(zip(*rows.values(), strict=True))
    )


def _read_entities(files: Sequence[StoredPath]) -> dict[str, list[TaggedSentence]]:
    splits: dict[str, list[TaggedSentence]] = {}
    for path in files:
        splits.setdefault(split_of(path), []).extend(read_conll(path))
    return splits


def _draw(
    inputs: SuiteInputs, settings: ProbesSettings, splits: dict[str, list[Any]], folder: str
) -> tuple[Sample, Sample]:
    """Training and dev sentences; without a dev split, those of the test split."""
    evaluated = "dev" if "dev" in splits else "test"
    for split in ("train", evaluated):
        require(split in splits, f"{inputs.data / folder}: probes need a train split and a dev or test split")
    length = min(settings.max_length, inputs.model.config.max_positions)
    rng = np.random.default_rng(inputs.seed)
    drawn = []
    for split, count in (("train", settings.train_sentences), (evaluated, settings.dev_sentences)):
        where = f"{inputs.data / folder}, {split}"
        words_of = lambda one: one.words  # noqa: E731
        drawn.append(draw_sentences(splits[split], words_of, inputs.model.tokenizer, length, count, rng, where))
    return drawn[0], drawn[1]


def _sizes(train: Sample, dev: Sample) -> dict[str, int]:
    return {
        "train_sentences": len(train.rows),
        "dev_sentences": len(dev.rows),
        "train_words": int(train.lengths.sum()),
        "dev_words": int(dev.lengths.sum()),
        "skipped_sentences": train.skipped + dev.skipped,
    }


SUITE = Suite("probes", ProbesSettings, ("treebank", "entities"), run, blocks, scalars, any_folder=True)
