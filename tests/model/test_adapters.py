"""Adapters: nearly the identity at first, counted as in the paper, and treated like other stacked parameters."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.flops import pretraining_flops
from bert_jax.model.heads import Heads
from bert_jax.training.optimizers.param_rules import ParamRule, param_rules
from bert_jax.training.param_paths import name_leaves
from tests.model.toy import BERT, encode, inputs, real


@pytest.mark.slow
@pytest.mark.parametrize("norm_placement", ["post", "pre"])
def test_at_first_the_output_is_nearly_that_of_the_plain_model(norm_placement):
    plain = dataclasses.replace(BERT, norm_placement=norm_placement)
    adapted = dataclasses.replace(plain, adapter_size=8)
    (before, after) = (bert.init(config, jax.random.key(0), Heads(pair=True)) for config in (plain, adapted))
    new = name_leaves(after)
    for name, leaf in name_leaves(before).items():
        np.testing.assert_array_equal(leaf, new[name], err_msg=name)
    assert 0.5e-3 < float(new["encoder/layers/attention_adapter/down/kernel"].std()) < 1e-3
    batch = inputs()
    outputs = [
        np.asarray(encode(config, params, batch).hidden * real(batch))
        for config, params in ((plain, before), (adapted, after))
    ]
    difference = np.abs(outputs[0] - outputs[1]).max()
    assert 0 < difference < 1e-2 < np.abs(outputs[0]).max()


def test_size_of_base_and_flops():
    """2md + d + m parameters per adapter: 2.2 % of BERT-base with m = 64; a product with each, three times a step."""
    adapted = ModelConfig(adapter_size=64)
    sizes = [
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(bert.shapes(config, Heads(mlm=False))))
        for config in (ModelConfig(), adapted)
    ]
    assert sizes[1] - sizes[0] == 12 * 2 * (2 * 64 * 768 + 768 + 64) == 2_379_264
    added = pretraining_flops(adapted, 8, 128, 0) - pretraining_flops(ModelConfig(), 8, 128, 0)
    assert added == 3 * 8 * 128 * 12 * 2 * 2 * 2 * 64 * 768


def test_adapters_decay_and_have_a_ratio_per_layer():
    shapes = bert.shapes(dataclasses.replace(BERT, adapter_size=8), Heads())
    rules = {name: rule for name, rule in name_leaves(param_rules(shapes)).items() if "_adapter/" in name}
    assert len(rules) == 8
    for name, rule in rules.items():
        is_kernel = name.endswith("/kernel")
        assert rule == ParamRule(decayed=is_kernel, tensor_axes=(0,), input_axes=(1,) if is_kernel else ()), name
