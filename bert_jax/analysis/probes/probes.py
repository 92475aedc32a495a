"""The suite: probes of every hidden state for parts of speech, dependency relations, entities and trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_jax.analysis.probes.linear import probe_state, uniform_code_bits
from bert_jax.analysis.probes.section import blocks, scalars
from bert_jax.analysis.probes.tasks import (
    LabelTask,
    control_task,
    describe,
    entity_task,
    part_of_speech_task,
    relation_task,
)
from bert_jax.analysis.probes.vectors import Sample, WordVectors, draw_sentences, word_vectors
from bert_jax.analysis.suite import Result, Suite, SuiteInputs
from bert_jax.analysis.treebank import SPLITS, read_splits
from bert_jax.errors import require
from bert_jax.field_validation import Count, NonNegative, check
from bert_jax.finetune.metrics import span_f1
from bert_jax.finetune.tagging import TaggedSentence, read_conll
from bert_jax.progress import progress_bar
from bert_jax.storage import StoredPath


@dataclass(frozen=True)
class ProbesSettings:
    """What the probes are fitted and scored on."""

    train_sentences: Count = 1500
    """Sentences of the train split on which probes are fitted, drawn at random."""
    dev_sentences: Count = 500
    """Sentences of the dev split on which they are scored, drawn at random."""
    max_length: Count = 128
    """Tokens of a sentence, special ones included, at most the model's positions; longer sentences are skipped."""
    epochs: Count = 8
    """Visits of each training example by a linear probe, on average."""
    penalty: NonNegative = 1.0
    """Of half the squared norm of a linear probe's weights, in nats over all training examples."""

    def __post_init__(self) -> None:
        check(self, "probes.")


def run(inputs: SuiteInputs, settings: ProbesSettings) -> Result:
    """Probes of the model and of random weights; a folder that is not there is left out.

    Raises:
      UserError: malformed data, a missing split, or too few sentences that fit.
    """
    result: Result = {"layers": inputs.model.config.num_layers, "seed": inputs.seed, "tasks": {}}
    for name, folder, measured in (("treebank", "treebank", _treebank), ("entities", "entities", _entities)):
        result[name] = None
        if (inputs.data / folder).is_dir():
            part, tasks = measured(inputs, settings)
            result[name], result["tasks"] = part, result["tasks"] | tasks
    return result


def _treebank(inputs: SuiteInputs, settings: ProbesSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    splits = read_splits(inputs.files("treebank", ".conllu"))
    train, dev = _draw(inputs, settings, splits, "treebank")
    tasks = {"pos": part_of_speech_task(train, dev), "relations": relation_task(train, dev)}
    found = {name: describe(task) for name, task in tasks.items()}
    for row, model in (("model", inputs.model), ("random_weights", inputs.with_random_weights())):
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", progress=inputs.progress)
        for name, task in tasks.items():
            found[name][row] = _linear(inputs, settings, vectors, task, dev, f"{name}, {row}")
    return _sizes(train, dev), found


def _entities(inputs: SuiteInputs, settings: ProbesSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    splits = _read_entities(inputs.files("entities", ""))
    train, dev = _draw(inputs, settings, splits, "entities")
    task = entity_task(train, dev)
    found = describe(task)
    for row, model in (("model", inputs.model), ("random_weights", inputs.with_random_weights())):
        vectors = word_vectors(model, train, dev, description=f"vectors, {row}", progress=inputs.progress)
        found[row] = _linear(inputs, settings, vectors, task, dev, f"entities, {row}")
    return _sizes(train, dev), {"entities": found}


def _read_entities(files: Sequence[StoredPath]) -> dict[str, list[TaggedSentence]]:
    splits: dict[str, list[TaggedSentence]] = {}
    for path in files:
        names = [split for split in SPLITS if split in path.name]
        require(len(names) == 1, f"{path}: the name of a file of entities must contain one of train, dev and test")
        splits.setdefault(names[0], []).extend(read_conll(path))
    return splits


def _draw(
    inputs: SuiteInputs, settings: ProbesSettings, splits: dict[str, list[Any]], folder: str
) -> tuple[Sample[Any], Sample[Any]]:
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


def _sizes(train: Sample[Any], dev: Sample[Any]) -> dict[str, int]:
    return {
        "train_sentences": len(train.rows),
        "dev_sentences": len(dev.rows),
        "train_words": int(train.lengths.sum()),
        "dev_words": int(dev.lengths.sum()),
        "skipped_sentences": train.skipped + dev.skipped,
    }


def _linear(
    inputs: SuiteInputs,
    settings: ProbesSettings,
    vectors: WordVectors,
    task: LabelTask,
    dev: Sample[Any],
    description: str,
) -> dict[str, Any]:
    """Scores of linear probes by hidden state."""
    control, scores = control_task(task, inputs.seed), []
    with progress_bar(description, len(vectors.train), "state", shown=inputs.progress) as bar:
        for train_state, dev_state in zip(vectors.train, vectors.dev, strict=True):
            scores.append(
                probe_state(
                    train_state,
                    dev_state,
                    task,
                    control,
                    epochs=settings.epochs,
                    penalty=settings.penalty,
                    seed=inputs.seed,
                )
            )
            bar.update()
    uniform = uniform_code_bits(len(task.train.labels), len(task.names))
    found = {
        "accuracy": [one.accuracy for one in scores],
        "control_accuracy": [one.control_accuracy for one in scores],
        "selectivity": [one.accuracy - one.control_accuracy for one in scores],
        "code_kilobits": [one.code_bits / 1000 for one in scores],
        "compression": [uniform / one.code_bits for one in scores],
    }
    if task.title == "entities":
        found["f1"] = [_span_f1(task, one.predictions, dev) for one in scores]
    return found


def _span_f1(task: LabelTask, predictions: np.ndarray, dev: Sample[TaggedSentence]) -> float:
    tags = [task.names[label] for label in predictions]
    predicted = [tags[start : start + n] for start, n in zip(dev.starts, dev.lengths, strict=True)]
    return span_f1([one.tags for one in dev.sentences], predicted)["f1"]


SUITE = Suite("probes", ProbesSettings, ("treebank", "entities"), run, blocks, scalars, any_folder=True)
