"""A small model in the native format, with an MLM head and a head of sst2."""

from pathlib import Path

import jax
import numpy as np

from bert_jax.config import ModelConfig, TaskHead
from bert_jax.convert.formats import native
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.building import make_tokenizer

HEADS = Heads(task=TaskHead("classification", ("0", "1"), "pooled"))


def write(directory: Path, heads: Heads = HEADS, tokenizer: Tokenizer | None = None, **changes) -> Path:
    """Two layers of width 32 with four heads; every parameter is random, so that no bias is 0 and no scale is 1."""
    tokenizer = tokenizer or make_tokenizer()
    config = ModelConfig(
        **{
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 40,
            "max_positions": 64,
            **changes,
        }
    )
    params = jax.jit(lambda key: bert.init(config, key, heads))(jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.asarray(x + rng.normal(0, 0.15, x.shape), np.float32), params)
    directory.mkdir(parents=True)
    tokenizer.save(directory / "tokenizer.json")
    source = SourceModel("made", "made", NativeModel("bert", config, heads, params))
    native.write(source, directory)
    return directory
