"""Reference forward pass in numpy, for the parity report where transformers is not installed.

It reads the names and layouts of transformers directly, and uses neither the parameters nor the model of bert_jax. It
computes in float64 from the stored weights, so its error is below that of a float32 forward pass. Sources: the papers,
and transformers 5.23, models/*/modeling_*.py.

Shapes in names: B rows, S positions, H hidden, E width of the embedding tables, T keys.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bert_jax.convert.forward_types import (
    ForwardInputs,
    ForwardOutputs,
    config_value,
    family_of,
    heads_of,
    is_causal,
    prefix_of,
)
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity.numpy_heads import run_heads
from bert_jax.convert.parity.numpy_layers import Weights, attend, rotate, split_heads
from bert_jax.errors import UserError

LIBRARY = "numpy"
"""Name of this library in the report."""


class _Block(NamedTuple):
    """Tensor names in a layer that normalizes after each residual sum (Devlin et al. 2019)."""

    query: str
    key: str
    value: str
    attention_out: str
    attention_norm: str
    up: str
    down: str
    feed_forward_norm: str


_BERT_BLOCK = _Block(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_ALBERT_BLOCK = _Block(
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.dense",
    "attention.LayerNorm",
    "ffn",
    "ffn_output",
    "full_layer_layer_norm",
)
_DISTILBERT_BLOCK = _Block(
    "attention.q_lin",
    "attention.k_lin",
    "attention.v_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of every head that the model has.

    Values at padded positions have no meaning.

    Raises:
      UserError: a tensor or config value is missing or unknown, shapes do not match, or an id or position is outside
        its table.
    """
    weights, heads = Weights(hf_model), heads_of(hf_model)
    encode = _modern_states if family_of(hf_model) == "modernbert" else _post_norm_states
    try:
        states = list(encode(weights, inputs))
        logits, pooled_BH = run_heads(weights, heads, states[-1], inputs.attention_mask_BS)
    except ValueError as error:  # of shapes that do not match
        raise UserError(f"{hf_model.source}: tensors and config do not match: {error}") from error
    return ForwardOutputs(
        [state.astype(np.float32) for state in states],
        logits,
        heads.task,
        None if pooled_BH is None else pooled_BH.astype(np.float32),
        weights.unused_tensors(),
    )


def _positions(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> np.ndarray:
    """Position ids [B, S]: from 0; in RoBERTa from the padding id plus one, and real tokens only (fairseq)."""
    ids_BS = inputs.input_ids_BS
    if family_of(hf_model) != "roberta":
        return np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
    pad = hf_model.config.get("pad_token_id", 1)
    real_BS = ids_BS != pad
    return real_BS.cumsum(1) * real_BS + pad


def _embed(weights: Weights, inputs: ForwardInputs, epsilon: float) -> np.ndarray:
    """The input of the first layer, [B, S, H]."""
    hf_model = weights.hf_model
    family, prefix = family_of(hf_model), prefix_of(hf_model)
    total_BSE = weights.embedding_rows(f"{prefix}embeddings.word_embeddings.weight", inputs.input_ids_BS)
    total_BSE = total_BSE + weights.embedding_rows(
        f"{prefix}embeddings.position_embeddings.weight", _positions(hf_model, inputs)
    )
    if family != "distilbert":
        total_BSE += weights.embedding_rows(
            f"{prefix}embeddings.token_type_embeddings.weight", inputs.token_type_ids_BS
        )
    embedded_BSE = weights.norm(f"{prefix}embeddings.LayerNorm", total_BSE, epsilon)
    if family == "albert":  # always, even where E is H (Lan et al. 2020, section 3.1)
        return weights.dense(f"{prefix}encoder.embedding_hidden_mapping_in", embedded_BSE)
    if family == "electra" and f"{prefix}embeddings_project.weight" in weights:
        return weights.dense(f"{prefix}embeddings_project", embedded_BSE)
    return embedded_BSE


def _layer_names(hf_model: HuggingFaceModel) -> Iterator[str]:
    """Prefix of each layer's tensor names, first layer first."""
    family, prefix = family_of(hf_model), prefix_of(hf_model)
    depth = (
        config_value(hf_model, "num_hidden_layers")
        if family != "distilbert"
        else config_value(hf_model, "n_layers", "num_hidden_layers")
    )
    for layer in range(depth):
        if family == "albert":
            group = layer * hf_model.config.get("num_hidden_groups", 1) // depth
            for inner in range(hf_model.config.get("inner_group_num", 1)):
                yield f"{prefix}encoder.albert_layer_groups.{group}.albert_layers.{inner}."
        else:
            yield f"{prefix}{'transformer' if family == 'distilbert' else 'encoder'}.layer.{layer}."


def _post_norm_states(weights: Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of BERT, RoBERTa, ALBERT, DistilBERT and ELECTRA."""
    hf_model = weights.hf_model
    family = family_of(hf_model)
    epsilon = 1e-12 if family == "distilbert" else hf_model.config.get("layer_norm_eps", 1e-12)
    block = {"albert": _ALBERT_BLOCK, "distilbert": _DISTILBERT_BLOCK}.get(family, _BERT_BLOCK)
    num_heads = config_value(hf_model, *(("n_heads",) if family == "distilbert" else ()), "num_attention_heads")
    activate = weights.activation(config_value(hf_model, "activation" if family == "distilbert" else "hidden_act"))
    visible_BST = _visible(inputs, None, causal=is_causal(hf_model))
    hidden_BSH = _embed(weights, inputs, epsilon)
    yield hidden_BSH
    for at in _layer_names(hf_model):
        query, key, value = (
            split_heads(weights.dense(at + name, hidden_BSH), num_heads)
            for name in (block.query, block.key, block.value)
        )
        attended_BSH = weights.dense(at + block.attention_out, attend(query, key, value, visible_BST))
        hidden_BSH = weights.norm(at + block.attention_norm, hidden_BSH + attended_BSH, epsilon)
        up_BSF = activate(weights.dense(at + block.up, hidden_BSH))
        hidden_BSH = weights.norm(
            at + block.feed_forward_norm, hidden_BSH + weights.dense(at + block.down, up_BSF), epsilon
        )
        yield hidden_BSH


def _visible(inputs: ForwardInputs, window: int | None, *, causal: bool = False) -> np.ndarray:
    """Which keys each query attends to, bool [B, S, T]: real tokens, in the window, if causal not later ones."""
    mask_BS = inputs.attention_mask_BS > 0
    place = np.arange(mask_BS.shape[1])
    near_ST = np.full((place.size, place.size), True)
    if window is not None:
        near_ST = np.abs(place[:, None] - place[None, :]) <= window
    if causal:
        near_ST &= place[None, :] <= place[:, None]
    return mask_BS[:, None, :] & near_ST[None]


def _modern_states(weights: Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of ModernBERT (Warner et al. 2024): pre-norm, rotary positions, GeGLU, local and global layers."""
    hf_model, prefix = weights.hf_model, prefix_of(weights.hf_model)
    config = hf_model.config
    epsilon, norm_bias = config.get("norm_eps", 1e-5), config.get("norm_bias", False)
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    num_heads, activate = (
        config_value(hf_model, "num_attention_heads"),
        weights.activation(config_value(hf_model, "hidden_activation")),
    )

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return weights.norm(prefix + name, x, epsilon, bias=norm_bias)

    words_BSH = weights.embedding_rows(f"{prefix}embeddings.tok_embeddings.weight", inputs.input_ids_BS)
    hidden_BSH = norm("embeddings.norm", words_BSH)
    yield hidden_BSH
    depth = config_value(hf_model, "num_hidden_layers")
    for layer in range(depth):
        at = f"layers.{layer}."
        window, base = _window_and_rotary_base(hf_model, layer)
        # The embeddings have just been normalised: the first layer has no norm of its own.
        before = norm(f"{at}attn_norm", hidden_BSH) if layer else hidden_BSH
        qkv = np.split(weights.dense(f"{prefix}{at}attn.Wqkv", before, bias=attention_bias), 3, axis=-1)
        query, key, value = (split_heads(x, num_heads) for x in qkv)
        mixed = attend(rotate(query, base), rotate(key, base), value, _visible(inputs, window))
        hidden_BSH = hidden_BSH + weights.dense(f"{prefix}{at}attn.Wo", mixed, bias=attention_bias)
        wide = weights.dense(f"{prefix}{at}mlp.Wi", norm(f"{at}mlp_norm", hidden_BSH), bias=mlp_bias)
        gate, up = np.split(wide, 2, axis=-1)
        hidden_BSH = hidden_BSH + weights.dense(f"{prefix}{at}mlp.Wo", activate(gate) * up, bias=mlp_bias)
        if layer + 1 < depth:
            yield hidden_BSH
    yield norm("final_norm", hidden_BSH)


def _window_and_rotary_base(hf_model: HuggingFaceModel, layer: int) -> tuple[int | None, float]:
    """Window to each side (None: global) and rotary base of a ModernBERT layer; configs of transformers 4 or 5.

    Raises:
      UserError: rotary positions that are scaled.
    """
    config = hf_model.config
    if config.get("layer_types"):
        is_global = config["layer_types"][layer] == "full_attention"
    else:
        is_global = layer % config.get("global_attn_every_n_layers", 3) == 0
    rotary = (config.get("rope_parameters") or {}).get("full_attention" if is_global else "sliding_attention") or {}
    if rotary.get("rope_type", "default") != "default":
        raise UserError(f"{hf_model.source}: rope_type '{rotary['rope_type']}' is not supported: only 'default' is")
    older = ("global_rope_theta", 160000.0) if is_global else ("local_rope_theta", 10000.0)
    base = rotary.get("rope_theta") or config.get(*older)
    return (None if is_global else config.get("local_attention", 128) // 2), float(base)
