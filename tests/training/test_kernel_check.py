"""A run whose kernels compute something else than `reference` is refused before it begins."""

import functools

import jax.numpy as jnp
import pytest

from bert_jax.config import ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import gpu_attention, gpu_norm, tpu_attention
from bert_jax.training.kernel_check import LARGEST_ERROR, check_kernels, kernel_errors

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODULES = {"pallas_gpu": gpu_attention, "pallas_tpu": tpu_attention}
RIGHT = {name: functools.partial(module.kernel_attention, interpret=True) for name, module in MODULES.items()}


@pytest.fixture(autouse=True)
def compare_again():
    kernel_errors.cache_clear()


def model(name: str, **settings) -> ModelConfig:
    shapes = {"vocab_size": 64, "hidden_size": 128, "num_heads": 2, "intermediate_size": 64, "max_positions": 256}
    return ModelConfig(attention=name, **shapes | settings)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("pallas_gpu", "float32"),
        pytest.param("pallas_gpu", "bfloat16", marks=pytest.mark.slow),
        ("pallas_tpu", "float32"),
    ],
)
def test_right_kernels_pass(name, dtype, monkeypatch):
    monkeypatch.setattr(MODULES[name], "kernel_attention", RIGHT[name])
    mixed = {"attention_window": 40, "global_every": 3, "positions": "rotary", "norm_placement": "pre"}
    settings = mixed if name == "pallas_gpu" else {}
    errors = kernel_errors(model(name, compute_dtype=dtype, **settings))
    assert 0 < max(errors.values()) < (1e-5 if dtype == "float32" else LARGEST_ERROR / 4), errors
    check_kernels(model(name, compute_dtype=dtype, **settings))


WRONG = {
    "another dropout mask": lambda x, ids, key: (x, ids, key.fold_in(1)),
    "another attention mask": lambda x, ids, key: (x, jnp.ones_like(ids), key),
    "not finite": lambda x, ids, key: (x * jnp.nan, ids, key),
}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * ("mask" in f)) for f in WRONG])
def test_wrong_kernels_are_refused(fault, monkeypatch):
    def kernel(projected, segment_ids, *, dropout_key, **settings):
        projected, segment_ids, dropout_key = WRONG[fault](projected, segment_ids, dropout_key)
        return RIGHT["pallas_gpu"](projected, segment_ids, dropout_key=dropout_key, **settings)

    monkeypatch.setattr(gpu_attention, "kernel_attention", kernel)
    with pytest.raises(UserError, match=r"'pallas_gpu': its kernels .* cpu .* error of .*set model.attention"):
        check_kernels(model("pallas_gpu"))


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [True, False])
def test_kernels_of_norms_are_compared_too(is_right, monkeypatch):
    """In layers of a width that has them."""
    right = gpu_norm.dropout_add_norm

    def kernel(*arguments, dropout_key, **settings):
        key = dropout_key if is_right else dropout_key.fold_in(1)
        return right(*arguments, dropout_key=key, **settings, interpret=True)

    monkeypatch.setattr(gpu_attention, "kernel_attention", RIGHT["pallas_gpu"])
    monkeypatch.setattr(gpu_norm, "dropout_add_norm", kernel)
    one = model("pallas_gpu", hidden_size=256, num_heads=4, num_layers=1)
    if is_right:
        check_kernels(one)
    else:
        with pytest.raises(UserError, match="'pallas_gpu': its kernels do not compute"):
            check_kernels(one)


def test_nothing_is_compared_without_kernels():
    check_kernels(model("reference"))
    assert kernel_errors.cache_info().misses == 0
