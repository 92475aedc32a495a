"""Weights of classes, label smoothing and several labels: losses equal plain loops (and PyTorch's: tests/live)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import TaskHead
from bert_jax.errors import UserError
from bert_jax.finetune.class_weights import class_weights
from bert_jax.finetune.encoding import encode_examples
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.sentence_data import SentenceData, SentenceTask
from bert_jax.finetune.tables import Example
from tests.finetune.tiny_task import make_task

LABELS = ("a", "b", "c")
WEIGHTS = (0.5, 2.0, 0.0)


def task_loss(kind, logits, labels, **settings):
    """The loss of a batch, [B, K]."""
    task = make_task(TaskHead(kind, ("score",) if kind == "multiple_choice" else LABELS, "pooled"))
    changed = dataclasses.replace(task.config.finetune, **settings)
    task = dataclasses.replace(task, config=dataclasses.replace(task.config, finetune=changed))
    batch = {"labels": jnp.asarray(labels)}
    found = task.logit_sums(jnp.asarray(logits), batch)["task_loss"]
    assert float(found.weight) == float(task.loss_weight_sums(batch)["task_loss"])
    return float(found.sum / found.weight)


def random_batch(kind, seed=0):
    rng = np.random.default_rng(seed)
    shape = (5, 4, 3) if kind == "multilabel" else (5, 4)
    labels = rng.integers(2 if kind == "multilabel" else 3, size=shape).astype(np.int32)
    labels[1, 2:] = labels[4] = -1
    return rng.normal(scale=3, size=(5, 4, 3)).astype(np.float32), labels


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(
    ("kind", "weights"), [("classification", ()), ("classification", WEIGHTS), ("multiple_choice", ())]
)
def test_cross_entropy(kind, weights, smoothing):
    """The formula in PyTorch's documentation: both parts are divided by the sum of the labels' weights."""
    logits, labels = random_batch(kind)
    total = weight = 0.0
    for row, label in zip(logits.reshape(-1, 3).astype(np.float64), labels.reshape(-1), strict=True):
        if label < 0:
            continue
        losses = np.log(np.exp(row).sum()) - row
        of_class = np.array(weights or (1.0, 1.0, 1.0))
        total += (1 - smoothing) * of_class[label] * losses[label] + smoothing / 3 * (of_class * losses).sum()
        weight += of_class[label]
    found = task_loss(kind, logits, labels, class_weights=weights, label_smoothing=smoothing)
    assert found == pytest.approx(total / weight, rel=1e-6)


def test_several_labels():
    logits, labels = random_batch("multilabel")
    has = labels[..., 0] >= 0
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    losses = -np.where(labels > 0, np.log(probabilities), np.log(1 - probabilities))
    assert task_loss("multilabel", logits, labels) == pytest.approx(losses[has].mean(), rel=1e-6)


@pytest.fixture(scope="module")
def data(letters):
    labels = [0] * 6 + [1] * 3 + [2]
    examples = [Example(("a",), label) for label in labels]
    return SentenceData(SentenceTask(LABELS, ("accuracy",), {"train": examples, "dev": examples}), letters, 8, 2)


@pytest.fixture(scope="module")
def letters():
    from bert_jax.tokenizers import tokenizer

    return tokenizer.wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"], True, "test")


def test_balanced_weights(data):
    compute = pytest.importorskip("sklearn.utils.class_weight").compute_class_weight
    found = class_weights("classification", FinetuneOptions(class_weights=("balanced",)), data)
    expected = compute("balanced", classes=np.arange(3), y=data.train.labels)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    given = FinetuneOptions(class_weights=("c=0", "a=1", "b=2.5"))
    assert class_weights("classification", given, data) == (1.0, 2.5, 0.0)
    assert class_weights("classification", FinetuneOptions(), data) == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a=1", "b=2"), r"--class-weights a=1 b=2: it must have one weight for each of a, b, c, or be `balanced`"),
        (("a=1", "b=2", "c=3", "a=4"), r"it must have one weight for each of a, b, c"),
        (("d=1",), r"--class-weights d=1: the task has no class 'd', it has a, b, c"),
        (("even",), r"--class-weights even: it must be `balanced`, or CLASS=WEIGHT with a weight of at least 0"),
        (("a=-1",), r"--class-weights a=-1: it must be"),
        (("a=nan",), r"--class-weights a=nan: it must be"),
        (("a=0", "b=0", "c=0"), r"--class-weights: all weights are 0"),
    ],
)
def test_bad_weights(given, message, data):
    with pytest.raises(UserError, match=message) as error:
        class_weights("classification", FinetuneOptions(class_weights=given), data)
    assert "\n" not in str(error.value)


def test_a_class_without_examples(data, letters):
    data.train, whole = encode_examples([Example(("a",), 0), Example(("a",), 2)], letters, 8, 2), data.train
    with pytest.raises(UserError, match="--class-weights balanced: train has no example of the class 'b': give all"):
        class_weights("classification", FinetuneOptions(class_weights=("balanced",)), data)
    data.train = whole


@pytest.mark.parametrize("options", [{"class_weights": ("balanced",)}, {"label_smoothing": 0.1}])
def test_tasks_without_classes(options, data, letters):
    numbers = [Example(("a",), 1.5), Example(("b",), 2.5)]
    regression = SentenceData(SentenceTask((), ("pearson",), {"train": numbers, "dev": numbers}), letters, 8, 2)
    with pytest.raises(UserError, match="is for tasks with one class per example or word, not regression: leave"):
        class_weights("regression", FinetuneOptions(**options), regression)


@pytest.mark.parametrize("smoothing", [1.0, -0.1, float("nan")])
def test_bad_smoothing(smoothing):
    with pytest.raises(UserError, match=r"--label-smoothing is .*: it must be a number in \[0, 1\)"):
        FinetuneOptions(label_smoothing=smoothing)
