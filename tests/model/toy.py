"""Small encoders and inputs for tests of the model."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.model import bert
from bert_jax.model.encoder import EncoderInputs
from bert_jax.model.heads import Heads

BERT = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=3,
    num_heads=3,
    intermediate_size=40,
    max_positions=32,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
ROWS, LENGTH = 3, 12


@functools.lru_cache(maxsize=16)
def parameters(config: ModelConfig, seed: int = 0):
    """Every parameter random, so that no bias is 0 and no scale is 1, which would hide mistakes."""
    params = jax.jit(lambda key: bert.init(config, key, Heads(pair=True)))(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(x + rng.normal(0, 0.15, x.shape), jnp.float32), params)


def inputs(lengths: tuple[int, ...] = (12, 7, 9), packed: bool = False, seed: int = 0) -> EncoderInputs:
    """Rows with two token types and padding; `packed` cuts each row into two examples of about half its length."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), LENGTH)
    ids = rng.integers(5, BERT.vocab_size, shape)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    types, cls = np.zeros(shape, np.int32), np.zeros((len(lengths), 2 if packed else 1), np.int32)
    for i, length in enumerate(lengths):
        cuts = (0, length // 2, length) if packed else (0, length)
        for k, (start, stop) in enumerate(itertools.pairwise(cuts)):
            segments[i, start:stop], positions[i, start:stop] = k + 1, np.arange(stop - start)
            types[i, (start + stop) // 2 : stop] = 1
            cls[i, k] = start
    return EncoderInputs(*(jnp.asarray(x, jnp.int32) for x in (ids, types, segments, positions, cls)))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("hidden_states", "activations"))
def encode(config: ModelConfig, params, batch: EncoderInputs, **options):
    """The encoder's output."""
    return bert.model_from_params(config, Heads(pair=True), params).encoder(batch, **options)


def attentions(config: ModelConfig, params, batch: EncoderInputs) -> np.ndarray:
    """Attention probabilities of all layers, [L, B, N, S, S]."""
    site = "attention.probabilities"
    return np.asarray(encode(config, params, batch, activations=(site,)).activations[site])


def real(batch: EncoderInputs) -> jax.Array:
    """1.0 for real tokens, 0.0 for padding, [B, S, 1]."""
    return (batch.segment_ids > 0).astype(jnp.float32)[:, :, None]


def probe(shape: tuple[int, ...], seed: int = 7) -> jax.Array:
    """Fixed random weights: a sum of outputs would lose gradients to LayerNorm's symmetry."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def loss(config: ModelConfig, params, batch: EncoderInputs, **options) -> jax.Array:
    """A scalar that depends on every real hidden vector and on the pooled vectors."""
    output = encode(config, params, batch, **options)
    hidden = output.hidden.astype(jnp.float32) * real(batch)
    return (hidden * probe(hidden.shape)).sum() + (output.pooled * probe(output.pooled.shape, 8)).sum()


def assert_trees_close(left, right, rtol: float, atol: float) -> None:
    """Same structure, and every leaf close."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
