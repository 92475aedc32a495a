"""The kernels of a run beside plain attention, on its own device, before it trains.

A kernel is compiled by the device's own compiler. If it computed something else there, the run would train with wrong
gradients and without an error.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.config.sections import KERNEL_ROW_LENGTHS
from bert_jax.distributed.agreement import raise_on_all
from bert_jax.errors import require
from bert_jax.model.bert import Params, init, model_from_params
from bert_jax.model.dropout import DropoutKey
from bert_jax.model.embeddings import EncoderInputs
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves

LARGEST_ERROR = 0.2
"""Relative (L2), of the outputs and of each parameter's gradient. Rounding to bfloat16 gives 0.02 to 0.04, a wrong
dropout mask or attention mask more than 0.4 (tests/training/test_kernel_check.py)."""
HEADS = Heads(mlm=False)


def check_kernels(*models: ModelConfig | None) -> None:
    """Compare the kernels of `model.attention` with `reference` in float32; nothing without kernels. All call this.

    Raises:
      UserError: they differ on the first device of a process.
    """
    for model in models:
        if model is not None and model.attention in KERNEL_ROW_LENGTHS:
            raise_on_all(lambda model=model: _check(model))


def _check(model: ModelConfig) -> None:
    errors = kernel_errors(model)
    what = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    require(
        errors[what] <= LARGEST_ERROR,
        f"model.attention '{model.attention}': its kernels do not compute on {jax.local_devices()[0].device_kind} what "
        f"they should: the error of {what} is {errors[what]:.0%}: set model.attention reference, and report this",
    )


@functools.cache  # runs of several seeds have one model
def kernel_errors(model: ModelConfig) -> dict[str, float]:
    """Relative errors (L2) of the outputs and of each parameter's gradient, by path.

    Args:
      model: of the run. Its first two layers, one of which is local if any is, with random parameters are applied to
        two rows with packed examples and padding.
    """
    # With large weights, attention is to a few tokens, and a wrong mask changes more.
    weights = {
        "initializer_range": 2.0 * model.layer_width**-0.5,
        "parameter_groups": None,
        "num_layers": min(2, model.num_layers),
    }
    model = dataclasses.replace(model, **weights, dense_dtype="compute", remat="none", scan_unroll=None)
    plain = dataclasses.replace(model, attention="reference", compute_dtype="float32")
    params, block = init(model, jax.random.key(0), HEADS), KERNEL_ROW_LENGTHS[model.attention]
    length = min(2 * block, model.max_positions // block * block)
    actual = _outputs_and_gradients(model, params, length)
    with jax.default_matmul_precision("highest"):
        expected = _outputs_and_gradients(plain, params, length)
    pairs = zip(name_leaves(actual).items(), name_leaves(expected).values(), strict=True)
    norm = jnp.linalg.norm
    return {name: float(norm(x - wanted) / jnp.maximum(norm(wanted), 1e-30)) for (name, x), wanted in pairs}


def _outputs_and_gradients(model: ModelConfig, params: Params, length: int) -> Params:
    """The hidden states, 0 for padding, and the gradients of their sum with random weights."""
    rng, shape = np.random.default_rng(0), (2, length)
    segment_ids = np.ones(shape, np.int32)
    segment_ids[0, length // 3 :], segment_ids[1, -length // 8 :] = 2, 0
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    ids = rng.integers(0, model.vocab_size, shape, np.int32)
    cls = np.zeros((2, 1), np.int32)
    inputs = EncoderInputs(*map(jnp.asarray, (ids, np.zeros(shape, np.int32), segment_ids, positions, cls)))
    is_token = (segment_ids > 0)[..., None]
    weights = rng.normal(size=(*shape, model.hidden_size)).astype(np.float32)
    dropout_key = DropoutKey(jnp.uint32(7), jnp.arange(2))

    def weighted_sum(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden = model_from_params(model, HEADS, params).encode(inputs, dropout_key).hidden.astype(jnp.float32)
        return (hidden * is_token * weights).sum(), hidden * is_token

    (_, hidden), gradients = jax.jit(jax.value_and_grad(weighted_sum, has_aux=True))(params)
    return {"outputs": hidden, "gradients": gradients}
