"""Scores of dev examples: their ratio of sums is the metric of every kind of task; intervals against plain loops."""

import numpy as np
import pytest

from bert_jax.analysis.fine_tuning.dev_scores import DevScores, score_items, score_means
from bert_jax.finetune.options import FinetuneOptions
from bert_jax.finetune.sentence_data import SentenceData, read_glue
from bert_jax.finetune.squad_data import SquadData, read_squad_splits
from bert_jax.finetune.tagging_data import TaggingData, read_tagging
from bert_jax.finetune.task_data import score
from bert_jax.tokenizers import tokenizer
from tests.finetune import task_files
from tests.fixtures import WORDS

RNG = np.random.default_rng(0)
OPTIONS = FinetuneOptions(max_length=32)


def task_data(name, directory):
    words = tokenizer.wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], True, "test")
    if name == "tagging":
        return TaggingData(read_tagging(task_files.write_tagging(directory), OPTIONS), words, 32)
    if name == "squad":
        splits = read_squad_splits(task_files.write_squad(directory, unanswerable=True), OPTIONS)
        return SquadData(splits, words, OPTIONS, 2, 1)
    return SentenceData(read_glue(name, task_files.write_glue(directory, name)), words, 32, 2)


def random_logits(data, split):
    examples = data.splits[split].examples
    rows = len(examples.input_ids) if data.kind in ("tagging", "span") else examples.count
    return RNG.normal(size=(rows, len(data.labels))).astype(np.float32)


def scores_of(data):
    logits = {name: random_logits(data, name) for name, split in data.splits.items() if split.is_scored}
    metrics = {name: data.metrics(name, one) for name, one in logits.items()}
    examples = {name: data.item_scores(name, one) for name, one in logits.items()}
    return DevScores(score(data, metrics.__getitem__), examples), metrics


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("mrpc", {"accuracy", "f1"}),
        ("mnli", {"accuracy"}),
        ("cola", {"accuracy"}),
        ("stsb", set()),
        ("tagging", {"accuracy", "f1"}),
        ("squad", {"exact_match", "f1"}),
    ],
)
def test_scores_of_examples_sum_to_the_metrics(name, metrics, tmp_path):
    data = task_data(name, tmp_path / name)
    models = {column: scores_of(data)[0] for column in ("model", "other")}
    found, of_splits = scores_of(data)
    for split, of_metrics in found.examples.items():
        assert of_metrics.keys() == metrics
        for metric, (sums, weights) in of_metrics.items():
            assert sums.sum() / weights.sum() == pytest.approx(of_splits[split][metric]) and sums.sum() > 0
    tests = score_items(models)
    assert tests.keys() == {f"{metric} on dev" for metric in metrics}
    means = score_means([one.score for one in models.values()], data.main_metrics, tests)
    assert means["value"] == [one.score for one in models.values()]
    counted = set(data.main_metrics) <= metrics
    assert [None not in means[end] for end in ("low", "high")] == [counted] * 2
    if counted:
        expected = [plain_interval(one, data.main_metrics) for one in models.values()]
        scale = 100 if name == "squad" else 1
        np.testing.assert_allclose(np.transpose([means["low"], means["high"]]), expected, atol=0.02 * scale)


def plain_interval(one, metrics):
    """By drawing the examples of every split again; all metrics in the same samples."""

    def statistic(*drawn):
        of_splits = zip(one.examples.values(), drawn, strict=True)
        return np.mean([of[m][0, i].sum() / of[m][1, i].sum() for of, i in of_splits for m in metrics])

    counts = [of[metrics[0]].shape[1] for of in one.examples.values()]
    resampled = [statistic(*(RNG.integers(n, size=n) for n in counts)) for _ in range(3000)]
    return np.quantile(resampled, [0.025, 0.975])
