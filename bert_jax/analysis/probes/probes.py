"""The suite: probes of every hidden state for parts of speech, dependency relations, entities and trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.analysis.probes import erasure
from bert_jax.analysis.probes.attention_trees import baselines as attention_baselines
from bert_jax.analysis.probes.attention_trees import head_uuas
from bert_jax.analysis.probes.by_state import chain_scores, gold_trees, linear_scores, mix_summary, structural_scores
from bert_jax.analysis.probes.label_tasks import LabelTask, describe, entity_task, part_of_speech_task, relation_task
from bert_jax.analysis.probes.section import blocks, scalars
from bert_jax.analysis.probes.vectors import ProbeVectors, Sample, draw_sentences, word_vectors
from bert_jax.analysis.suite import Suite, SuiteInputs, SuiteResult
from bert_jax.analysis.treebank import read_splits, split_of
from bert_jax.errors import require
from bert_jax.field_validation import Count, NonNegative, Rate, check
from bert_jax.finetune.tagging import TaggedSentence, read_conll
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.storage.paths import StoredPath

TaskResult = dict[str, Any]
"""Of one task: sizes and baselines, and the scores of each of ROWS."""
ROWS = ("model", "random_weights")


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
    if (inputs.data / "treebank").is_dir():
        result["treebank"] = _treebank(inputs, settings, tasks)
    if (inputs.data / "entities").is_dir():
        result["entities"] = _entities(inputs, settings, tasks)
    return result | {"tasks": tasks}


def _treebank(inputs: SuiteInputs, settings: ProbesSettings, tasks: dict[str, TaskResult]) -> dict[str, Any]:
    """Everything that reads treebank/; the tasks are added to `tasks`."""
    splits = read_splits(inputs.files("treebank", ".conllu"))
    train, dev = _draw(inputs, settings, splits, "treebank")
    label_tasks = {"pos": part_of_speech_task(train, dev), "relations": relation_task(train, dev)}
    tasks |= {name: describe(task) for name, task in label_tasks.items()}
    trees = gold_trees(dev)

    def probe_row(model: LoadedModel, row: str) -> dict[str, Any]:
        shown = {"progress": inputs.progress}
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", **shown)
        found: dict[str, Any] = {
            name: _label_scores(inputs, settings, vectors, task, dev, f"{name}, {row}")
            for name, task in label_tasks.items()
        }
        found["structure"] = structural_scores(
            vectors,
            train,
            dev,
            rank=settings.rank,
            epochs=settings.tree_epochs,
            seed=inputs.seed,
            with_control=row == ROWS[0],
            description=f"trees, {row}",
            **shown,
        )
        del vectors
        found["attention"] = head_uuas(model, dev.rows, trees, description=f"trees from attention, {row}", **shown)
        return found

    rows = _of_both(inputs, "treebank", probe_row)
    for name in label_tasks:
        tasks[name] |= {row: found[name] for row, found in rows.items()}
    structure = {row: found["structure"] for row, found in rows.items()}
    attention = {row: found["attention"] for row, found in rows.items()}
    erased = _erasure(inputs, settings, train, dev, label_tasks["pos"].names)
    return {
        **_sizes(train, dev),
        "structure": {"chain": chain_scores(trees)._asdict(), **structure},
        "attention_trees": {**attention_baselines(trees, inputs.seed), **attention},
        "erasure": erased,
    }


def _of_both(
    inputs: SuiteInputs, folder: str, probe_row: Callable[[LoadedModel, str], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What `probe_row` measures in the model and in random weights, by row."""
    name, random = f"probes, {folder}", ROWS[1]
    return {
        ROWS[0]: probe_row(inputs.model, ROWS[0]),
        random: inputs.of_random_weights(name, lambda model: probe_row(model, random)),
    }


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


def _entities(inputs: SuiteInputs, settings: ProbesSettings, tasks: dict[str, TaskResult]) -> dict[str, Any]:
    """Everything that reads entities/; the task is added to `tasks`."""
    train, dev = _draw(inputs, settings, _read_entities(inputs.files("entities", "")), "entities")
    task = entity_task(train, dev)

    def probe_row(model: LoadedModel, row: str) -> dict[str, Any]:
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", progress=inputs.progress)
        return _label_scores(inputs, settings, vectors, task, dev, f"entities, {row}")

    tasks["entities"] = describe(task) | _of_both(inputs, "entities", probe_row)
    return _sizes(train, dev)


def _label_scores(
    inputs: SuiteInputs,
    settings: ProbesSettings,
    vectors: ProbeVectors,
    task: LabelTask,
    dev: Sample,
    description: str,
) -> dict[str, Any]:
    """Linear probes and scalar mixes of one task."""
    shown = {"description": description, "progress": inputs.progress}
    probing = {"epochs": settings.epochs, "penalty": settings.penalty, "seed": inputs.seed}
    found: dict[str, Any] = linear_scores(vectors, task, dev, **probing, **shown)
    found["mix"] = mix_summary(vectors, task, epochs=settings.mix_epochs, seed=inputs.seed)
    return found


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
