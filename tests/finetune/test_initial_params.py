"""Parameters of a fine-tuning run, from a source and new ones."""

import dataclasses

import jax
import numpy as np
import pytest

from bert_jax.errors import UserError
from bert_jax.finetune.initial_params import fit_params
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves
from tests.finetune.tiny_task import HEAD, MODEL, with_cls_norm

MODEL = dataclasses.replace(MODEL, num_layers=3)
TUNED = Heads(mlm=False, task=HEAD)


def params_of(heads=TUNED, seed=0, **changes):
    """New parameters, all of them random, so that equal ones are the same ones."""
    params = bert.init(dataclasses.replace(MODEL, **changes), jax.random.key(seed), heads)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x + rng.normal(size=x.shape), np.float32), params)


def fit(source, fresh, new_layers=0, new_head=True):
    """The result, the paths of the new ones, and both arguments by path."""
    params, names = fit_params(source, fresh, new_layers=new_layers, new_head=new_head)
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    return name_leaves(params), set(names), name_leaves(source), name_leaves(fresh)


def starting(tree, *beginnings):
    return {name for name in tree if name.startswith(beginnings)}


@pytest.mark.parametrize("new_head", [True, False])
def test_the_encoder_is_the_sources_and_the_head_on_request(new_head):
    found, names, source, fresh = fit(params_of(seed=1), params_of(seed=2), new_head=new_head)
    assert names == (starting(found, "task/") if new_head else set())
    for name, array in found.items():
        np.testing.assert_array_equal(array, (fresh if name in names else source)[name], err_msg=name)
        assert (source[name] != fresh[name]).any()


def test_parts_that_a_source_may_lack_are_new():
    heads = Heads(mlm=False, task=with_cls_norm("batch", mix=True))
    plain = params_of(Heads(mlm=False, task=dataclasses.replace(HEAD, reads="cls")), seed=1)
    found, names, _, fresh = fit(plain, params_of(heads, seed=2, adapter_size=4), new_head=False)
    assert names == starting(found, "encoder/pooler/", "task/mix/", "task/cls_norm/") | {
        name for name in found if "_adapter/" in name
    }
    assert all((found[name] == fresh[name]).all() for name in names)
    tuned = params_of(heads, seed=3, adapter_size=4)
    assert not fit(tuned, params_of(heads, seed=2, adapter_size=4), new_head=False)[1]


@pytest.mark.parametrize("count", [1, 3])
def test_new_top_layers(count):
    found, names, source, fresh = fit(params_of(seed=1), params_of(seed=2), new_layers=count, new_head=False)
    for name, array in found.items():
        if name.startswith("encoder/layers/"):
            np.testing.assert_array_equal(array[: 3 - count], source[name][: 3 - count])
            np.testing.assert_array_equal(array[3 - count :], fresh[name][3 - count :])
        else:
            expected = fresh if name.startswith("encoder/pooler/") else source
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert names == starting(found, "encoder/pooler/") | {f"encoder/layers[{3 - count}:3]"}


def without(tree, *path):
    """A copy of a tree without a branch."""
    first, *rest = path
    inner = {name: branch for name, branch in tree.items() if name != first}
    return inner | {first: without(tree[first], *rest)} if rest else inner


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (lambda: without(params_of(), "encoder", "layers"), {}, ["the source has no encoder/layers/", "architecture"]),
        (lambda: {"task": params_of()["task"]}, {}, ["the source has no encoder/embeddings/"]),
        (lambda: params_of(hidden_size=32), {}, ["has shape [32", "the run's encoder needs [16"]),
        (lambda: params_of(num_layers=2), {}, ["encoder/layers/", "has shape [2, ", "needs [3, "]),
        (lambda: without(params_of(), "task"), {"new_head": False}, ["the source has no task/output/", "a new head"]),
        (
            lambda: params_of(Heads(mlm=False, task=dataclasses.replace(HEAD, labels=("a", "b", "c")))),
            {"new_head": False},
            ["task/output/bias has shape [3]", "task head needs [2]", "a new head"],
        ),
        (params_of, {"new_layers": 4}, ["--new-layers 4", "3 layer(s)"]),
    ],
)
def test_what_does_not_fit_is_refused(source, arguments, words):
    with pytest.raises(UserError) as error:
        fit(source(), params_of(seed=2), **arguments)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
