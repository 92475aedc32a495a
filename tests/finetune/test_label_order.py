"""Outputs of a head in the order of the task's labels."""

import numpy as np
import pytest

from bert_jax.config import TaskHead
from bert_jax.convert.families.family import HuggingFaceConfig, describe_labels
from bert_jax.convert.families.task_heads import find_task_head_with_pooler
from bert_jax.convert.tensors import lazy_from_array
from bert_jax.convert.translate import NativeModel
from bert_jax.finetune.label_order import in_order_of_task
from bert_jax.finetune.sentence_data import SentenceData, SentenceTask
from bert_jax.finetune.tables import Example
from bert_jax.model.heads import Heads
from bert_jax.tokenizers.tokenizer import wordpiece
from tests.model.toy import BERT

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.mark.parametrize(
    ("head", "task", "order"),
    [
        (("b", "a"), ("a", "b"), [1, 0]),
        (("B", "a"), ("a", "b"), [1, 0]),
        (("a", "A"), ("A", "a"), [1, 0]),  # exact names first: without regard to case they are the same
        (("LABEL_0",), (), [0]),  # a regression of transformers
    ],
)
def test_order(head, task, order):
    letters = wordpiece([*SPECIALS, "a"], True, "test")
    data = SentenceData(SentenceTask(task, ("accuracy",), {"train": [Example(("a",), 0)]}), letters, 16, 2)
    count = len(head)
    output = {"kernel": np.arange(2.0 * count).reshape(2, count), "bias": np.arange(float(count))}
    heads = Heads(mlm=False, task=TaskHead("classification", head, "pooled"))
    model = NativeModel("bert", BERT, heads, {"task": {"output": output}})
    found = in_order_of_task(model, data, "it", "advice", lambda line: None)
    assert found.heads.task.labels == data.labels
    np.testing.assert_array_equal(found.params["task"]["output"]["kernel"], output["kernel"][:, order])
    np.testing.assert_array_equal(found.params["task"]["output"]["bias"], order)


def test_a_single_output_without_a_name_is_a_regression():
    """fairseq and TensorFlow 1 do not name outputs; without `problem_type`, the pipeline applies a sigmoid."""
    for count, labels, kind in ((1, ("score",), "regression"), (2, ("LABEL_0", "LABEL_1"), None)):
        tensors = {"classifier.weight": lazy_from_array(np.zeros((count, 4), np.float32))}
        settings = HuggingFaceConfig({"architectures": ["BertForSequenceClassification"]}, "source")
        head = find_task_head_with_pooler(settings, tensors, pooler=True)
        assert head.labels == labels
        assert describe_labels(Heads(task=head)).get("problem_type") == kind
