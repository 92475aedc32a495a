"""Weights and inputs of the parity goldens, generated from seeds with numpy."""

import zlib

import numpy as np

SETTINGS = {
    "vocab_size": 151,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
}
"""As transformers' BertConfig names them."""


def tensor_shapes(settings: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of BertForPreTraining by its name in a state dict (modeling_bert.py), the tied decoder once."""
    hidden, wide, vocab = settings["hidden_size"], settings["intermediate_size"], settings["vocab_size"]
    dense, norm = [], ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for layer in range(settings["num_hidden_layers"]):
        own = f"bert.encoder.layer.{layer}."
        dense += [(f"{own}attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
        dense.append((f"{own}attention.output.dense", hidden, hidden))
        dense.append((f"{own}intermediate.dense", wide, hidden))
        dense.append((f"{own}output.dense", hidden, wide))
        norm += [f"{own}attention.output.LayerNorm", f"{own}output.LayerNorm"]
    dense.append(("bert.pooler.dense", hidden, hidden))
    dense.append(("cls.predictions.transform.dense", hidden, hidden))
    dense.append(("cls.seq_relationship", 2, hidden))
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (vocab, hidden),
        "bert.embeddings.position_embeddings.weight": (settings["max_position_embeddings"], hidden),
        "bert.embeddings.token_type_embeddings.weight": (settings["type_vocab_size"], hidden),
        "cls.predictions.bias": (vocab,),
    }
    for name, outputs, inputs in dense:
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name in norm:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes


def make_weights(settings: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random weights; biases and norm scales too, because zeros and ones would hide a swap."""
    weights = {}
    for name, shape in tensor_shapes(settings).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        mean, deviation = (1.0, 0.2) if name.endswith("LayerNorm.weight") else (0.0, 0.12)
        weights[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    return weights


def make_inputs(settings: dict[str, int], lengths: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Padded rows of the given lengths with two token types, as transformers names them."""
    rng = np.random.default_rng(seed)
    shape = len(lengths), max(lengths)
    place = np.arange(shape[1])[None, :]
    real = place < np.array(lengths)[:, None]
    second = place >= np.array([rng.integers(2, length - 1) for length in lengths])[:, None]
    return {
        "input_ids": np.where(real, rng.integers(1, settings["vocab_size"], shape), 0).astype(np.int32),
        "token_type_ids": (second & real).astype(np.int32),
        "attention_mask": real.astype(np.int32),
    }
