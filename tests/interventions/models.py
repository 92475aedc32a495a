"""Small models with a tokenizer, and texts for them."""

import functools
from pathlib import Path

import jax
import numpy as np
from etils import epath

from bert_jax.config import ModelConfig, TaskHead
from bert_jax.convert.formats import native
from bert_jax.convert.source_model import SourceModel
from bert_jax.convert.translate import NativeModel
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.loss_examples import masked_texts
from bert_jax.interventions.pruning_masks import Examples
from bert_jax.interventions.rows import encode_texts
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.tokenizers.tokenizer import Tokenizer
from tests.building import make_tokenizer

LAYERS = 3
HEADS = Heads(pair=True)
SST2_HEADS = Heads(task=TaskHead("classification", ("0", "1"), "pooled"))
TEXTS = (
    "the slow river sings over a stone .",
    "a dark mountain falls .",
    "the wind runs over the river .",
    "a light stone sings .",
    "the quick wind falls over a mountain .",
    "the river runs .",
)


def make_model(heads: Heads = HEADS, seed: int = 0, **changes) -> LoadedModel:
    """Three layers of width 32 with two heads; every parameter is random, so that no bias is 0 and no scale is 1.

    Args:
      heads: of the model.
      seed: of the parameters.
      **changes: other fields of the config.
    """
    tokenizer = small_tokenizer()
    fields = {"vocab_size": tokenizer.vocab_size, "hidden_size": 32, "num_layers": LAYERS, "num_heads": 2}
    fields |= {"intermediate_size": 48, "max_positions": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    config = ModelConfig(**fields | changes)
    params = jax.jit(lambda key: bert.init(config, key, heads))(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: np.asarray(x + rng.normal(0, 0.15, x.shape), np.float32), params)
    return LoadedModel(config, heads, params, tokenizer)


small_model = functools.lru_cache(maxsize=4)(make_model)


@functools.lru_cache(maxsize=1)
def small_tokenizer() -> Tokenizer:
    """WordPiece with single letters and a few words."""
    return make_tokenizer()


def four_heads(layers: int, heads: Heads = HEADS, **changes) -> LoadedModel:
    """With four heads of width 8 and 40 units."""
    return make_model(heads, num_layers=layers, **{"num_heads": 4, "intermediate_size": 40, **changes})


def write_native(model: LoadedModel, directory: Path) -> epath.Path:
    """The model in the native format, in a new directory."""
    directory.mkdir(parents=True)
    model.tokenizer.save(directory / "tokenizer.json")
    made = NativeModel("bert", model.config, model.heads, jax.tree.map(np.asarray, model.params))
    native.write(SourceModel("made", "made", made, directory / "tokenizer.json"), directory)
    return epath.Path(directory)


def masked_examples() -> Examples:
    """TEXTS with masked tokens."""
    return masked_texts(encode_texts(TEXTS, small_tokenizer(), 32), small_tokenizer(), 0.3, seed=0)
