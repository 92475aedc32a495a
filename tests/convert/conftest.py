"""Fixtures of tests that convert models."""

import pytest

from bert_jax.convert.parity import transformers_forward


@pytest.fixture(scope="module")
def only_numpy():
    """The reference forward pass is numpy's, whatever is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_forward, "available", lambda: False)
        yield
