"""Losses of fine-tuning equal those of PyTorch. Needs the extra `parity`."""

import numpy as np
import pytest

from tests.finetune.test_label_losses import WEIGHTS, random_batch, task_loss
from tests.live.small_models import BESIDE_TRANSFORMERS

pytestmark = BESIDE_TRANSFORMERS
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("weights", [(), WEIGHTS, (3.0, 1e-3, 1.0)])
def test_cross_entropy(weights, smoothing):
    logits, labels = random_batch("classification", 1)
    loss = torch.nn.CrossEntropyLoss(
        weight=torch.tensor(weights) if weights else None, ignore_index=-1, label_smoothing=smoothing
    )
    expected = loss(torch.tensor(logits).reshape(-1, 3), torch.tensor(labels).reshape(-1).long()).item()
    found = task_loss("classification", logits, labels, class_weights=weights, label_smoothing=smoothing)
    assert found == pytest.approx(expected, rel=1e-6)


def test_several_labels():
    logits, labels = random_batch("multilabel", 1)
    has = labels[..., 0] >= 0
    expected = torch.nn.BCEWithLogitsLoss()(torch.tensor(logits[has]), torch.tensor(labels[has]).float()).item()
    assert task_loss("multilabel", logits, labels) == pytest.approx(expected, rel=1e-6)
    assert np.isfinite(expected)
