"""A small model with a tokenizer for tests of analyses."""

import functools

import jax
import numpy as np

from bert_jax.config import ModelConfig
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.building import make_tokenizer

LAYERS = 3


@functools.lru_cache(maxsize=4)
def small_model(heads: Heads = Heads(pair=True), seed: int = 0) -> LoadedModel:  # noqa: B008 (frozen)
    """Three layers of width 32 with two heads; every parameter is random, so that no bias is 0 and no scale is 1."""
    tokenizer = small_tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_layers=LAYERS,
        num_heads=2,
        intermediate_size=48,
        max_positions=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    params = jax.jit(lambda key: bert.init(config, key, heads))(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: np.asarray(x + rng.normal(0, 0.15, x.shape), np.float32), params)
    return LoadedModel(config, heads, params, tokenizer)


@functools.lru_cache(maxsize=1)
def small_tokenizer() -> Tokenizer:
    """WordPiece with single letters and a few words."""
    return make_tokenizer()
