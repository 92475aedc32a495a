"""Logits, losses and rows of task examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.config import TaskHead
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.finetuning_task import FineTuning
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions import loss_examples, pruning_masks, task_evaluation
from bert_jax.model import bert
from tests.finetune import tiny_task
from tests.interventions.models import small_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "span"])
def test_losses_are_those_of_fine_tuning(kind):
    """Which packs the examples; so packing, logits and losses are compared at once, and losses under masks of ones."""
    labels = {"regression": ("score",), "span": ("start", "end")}.get(kind, ("a", "b", "c"))
    reads = "tokens" if kind in ("tagging", "span") else "mean"
    head = TaskHead("classification" if kind == "regression" else kind, labels, reads)
    examples, rng = tiny_task.examples(20), np.random.default_rng(0)
    count, tokens = len(examples.lengths), len(examples.input_ids)
    made = {
        "classification": rng.integers(0, 3, count).astype(np.int32),
        "regression": rng.normal(size=count).astype(np.float32),
        "tagging": rng.integers(-1, 3, tokens).astype(np.int32),
        "span": rng.integers(0, examples.lengths[:, None], (count, 2)).astype(np.int32),
    }
    examples = examples._replace(labels=made[kind])
    task = tiny_task.make_task(head)
    rows = type(task.train)(examples, 32, 4, task.train.special_ids, 1)
    params = bert.init(task.config.model, jax.random.key(0), task.heads)
    packed = [jax.tree.map(jnp.asarray, batch) for batch in rows.in_order(8)]
    sums = [FineTuning.score(task, params, batch)[1]["task_loss"] for batch in packed]
    expected = sum(one.sum for one in sums) / sum(one.weight for one in sums)
    model = LoadedModel(task.config.model, task.heads, params, small_tokenizer())
    order = list(range(count))[::-1]
    logits = task_evaluation.task_logits(model, examples, order)
    losses = task_evaluation.task_losses(logits, examples, order, head.kind)
    np.testing.assert_allclose(losses.sums.sum() / losses.weights.sum(), expected, rtol=1e-5)
    labelled = loss_examples.labelled_examples(head.kind, examples, np.array(order), 0)
    found = pruning_masks.evaluate(model, labelled, {pruning_masks.CONTEXT: np.ones((2, 2))})
    assert found.weights.sum() == sum(one.weight for one in sums)
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)


def test_rows_of_pairs():
    ids, types = np.arange(7, dtype=np.int32), np.array([0, 0, 0, 0, 0, 1, 1], np.int32)
    examples = EncodedExamples(ids, types, np.array([0, 3, 7]), np.zeros(2, np.int32), 0)
    (row,) = task_evaluation.rows_of(examples, [1])
    assert row.input_ids.tolist() == [3, 4, 5, 6] and row.token_type_ids.tolist() == [0, 0, 1, 1]
