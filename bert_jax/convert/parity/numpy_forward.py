"""Reference forward pass in numpy, for the parity report where transformers is not installed.

It reads the names and layouts of transformers directly, and uses neither the parameters nor the model of bert_jax. It
is slow and simple on purpose, and computes in float64 from the stored weights, so that its error is below that of a
float32 forward pass. The reader of the source has checked names, shapes and settings. Sources: the papers, and
transformers 5.23, models/*/modeling_*.py.

Shapes in names: B rows, S positions, T keys, H hidden, E width of the embedding tables, N heads, D head size,
F feed-forward, V vocabulary, C classes. MobileBERT's inner arrays have the width of its bottleneck.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.special import erf

from bert_jax.convert.forward_types import (
    CHOICE,
    MLM_HEADS,
    PAIR_HEADS,
    REPLACED,
    SEQUENCE,
    SPAN,
    ForwardInputs,
    ForwardOutputs,
    HeadsPresent,
    family_of,
    heads_of,
    name_states,
    prefix_of,
)
from bert_jax.convert.hf_model import HuggingFaceModel


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + erf(x / np.sqrt(2.0))) / 2.0


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))) / 2.0


_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("gelu", "gelu_python"), _gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_pytorch_tanh"), _gelu_tanh),
    "relu": lambda x: np.maximum(x, 0.0),
    **dict.fromkeys(("silu", "swish"), lambda x: x * (1.0 + np.tanh(x / 2.0)) / 2.0),
    "tanh": np.tanh,
}
"""By the names of transformers' activations.py."""


_BLOCKS = {
    "bert": (
        *("attention.self.query", "attention.self.key", "attention.self.value"),
        *("attention.output.dense", "attention.output.LayerNorm"),
        *("intermediate.dense", "output.dense", "output.LayerNorm"),
    ),
    "albert": (
        *("attention.query", "attention.key", "attention.value", "attention.dense", "attention.LayerNorm"),
        *("ffn", "ffn_output", "full_layer_layer_norm"),
    ),
    "distilbert": (
        *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
        *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
    ),
}
"""Tensor names in a layer that normalizes after each residual sum (Devlin et al. 2019), by family; other families have
BERT's. Query, key, value, the layer after attention and its norm; both layers of the feed-forward part and its norm."""
_CONFIG_NAMES = {
    "distilbert": {"n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "activation": "hidden_act"},
    "modernbert": {"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps"},
}
"""By family: names in its config, and the same in BERT's."""


class _Weights:
    """The tensors of a model, cast to float64 one at a time, and its settings by their names in BERT's config."""

    def __init__(self, hf_model: HuggingFaceModel):
        self.tensors, self.family, self.prefix = hf_model.tensors, family_of(hf_model), prefix_of(hf_model)
        names = _CONFIG_NAMES.get(self.family, {})
        self.config: dict[str, Any] = {names.get(name, name): value for name, value in hf_model.config.items()}

    def __call__(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name], np.float64)

    def dense(self, name: str, x: np.ndarray) -> np.ndarray:
        """x W^T + b over the last axis; b if there is one."""
        return x @ self(f"{name}.weight").T + self._bias(name)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """LayerNorm of the last axis (Ba et al. 2016); with a bias if there is one."""
        epsilon = self.config.get("layer_norm_eps", 1e-5 if self.family == "modernbert" else 1e-12)
        normalized = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
        return normalized * self(f"{name}.weight") + self._bias(name)

    def mobile_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """LayerNorm, or its scale and bias alone (NoNorm; Sun et al. 2020, section 3.4)."""
        if self.config.get("normalization_type", "no_norm") == "layer_norm":
            return self.norm(name, x)
        return x * self(f"{name}.weight") + self(f"{name}.bias")

    def _bias(self, name: str) -> np.ndarray | float:
        return self(f"{name}.bias") if f"{name}.bias" in self.tensors else 0.0

    def activate(self, x: np.ndarray, name: str | None = None) -> np.ndarray:
        """An activation function by its name in a config; None: that of the layers."""
        return _ACTIVATIONS[name or self.config["hidden_act"]](x)


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All outputs. Values at padded positions have no meaning.

    Raises:
      UserError: the kind of a classifier is ambiguous.
    """
    weights = _Weights(hf_model)
    encode = {"modernbert": _modern_states, "mobilebert": _mobile_states}.get(weights.family, _post_norm_states)
    states = list(encode(weights, inputs))
    outputs = name_states(states) | _run_heads(weights, heads_of(hf_model), states[-1], inputs.attention_mask_BS)
    return {name: values.astype(np.float32) for name, values in outputs.items()}


def _post_norm_states(weights: _Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of BERT, RoBERTa, ALBERT, DistilBERT and ELECTRA."""
    *qkv, attention_out, attention_norm, up, down, feed_forward_norm = _BLOCKS.get(weights.family, _BLOCKS["bert"])
    num_heads, visible_BST = weights.config["num_attention_heads"], _visible(weights, inputs)
    hidden_BSH = _embed(weights, inputs)
    yield hidden_BSH
    for at in _layer_names(weights):
        query, key, value = (_split_heads(weights.dense(at + name, hidden_BSH), num_heads) for name in qkv)
        attended_BSH = weights.dense(at + attention_out, _attend(query, key, value, visible_BST))
        hidden_BSH = weights.norm(at + attention_norm, hidden_BSH + attended_BSH)
        up_BSF = weights.activate(weights.dense(at + up, hidden_BSH))
        hidden_BSH = weights.norm(at + feed_forward_norm, hidden_BSH + weights.dense(at + down, up_BSF))
        yield hidden_BSH


def _embed(weights: _Weights, inputs: ForwardInputs) -> np.ndarray:
    """The input of the first layer, [B, S, H]."""
    family, at = weights.family, f"{weights.prefix}embeddings."
    ids_BS = inputs.input_ids_BS
    positions_BS = np.broadcast_to(np.arange(ids_BS.shape[1]), ids_BS.shape)
    if family == "roberta":  # from the padding id plus one, and real tokens only (fairseq)
        pad = weights.config.get("pad_token_id", 1)
        real_BS = ids_BS != pad
        positions_BS = real_BS.cumsum(1) * real_BS + pad
    total_BSE = weights(f"{at}word_embeddings.weight")[ids_BS]
    total_BSE += weights(f"{at}position_embeddings.weight")[positions_BS]
    if family != "distilbert":
        total_BSE += weights(f"{at}token_type_embeddings.weight")[inputs.token_type_ids_BS]
    embedded_BSE = weights.norm(f"{at}LayerNorm", total_BSE)
    if family == "albert":  # always, even where E is H (Lan et al. 2020, section 3.1)
        return weights.dense(f"{weights.prefix}encoder.embedding_hidden_mapping_in", embedded_BSE)
    if f"{weights.prefix}embeddings_project.weight" in weights.tensors:  # ELECTRA's, if E is not H
        return weights.dense(f"{weights.prefix}embeddings_project", embedded_BSE)
    return embedded_BSE


def _layer_names(weights: _Weights) -> Iterator[str]:
    """Prefix of each layer's tensor names, first layer first."""
    depth = weights.config["num_hidden_layers"]
    for layer in range(depth):
        if weights.family == "albert":
            group = layer * weights.config.get("num_hidden_groups", 1) // depth
            for inner in range(weights.config.get("inner_group_num", 1)):
                yield f"{weights.prefix}encoder.albert_layer_groups.{group}.albert_layers.{inner}."
        else:
            yield f"{weights.prefix}{'transformer' if weights.family == 'distilbert' else 'encoder'}.layer.{layer}."


def _visible(weights: _Weights, inputs: ForwardInputs, window: int | None = None) -> np.ndarray:
    """Which keys each query attends to, bool [B, S, T]: real tokens, in the window, if causal not later ones."""
    mask_BS = inputs.attention_mask_BS > 0
    place = np.arange(mask_BS.shape[1])
    distance_ST = place[None, :] - place[:, None]
    near_ST = np.abs(distance_ST) <= (len(place) if window is None else window)
    if weights.config.get("is_decoder"):
        near_ST &= distance_ST <= 0
    return mask_BS[:, None, :] & near_ST[None]


def _split_heads(x_BSH: np.ndarray, num_heads: int) -> np.ndarray:
    """[B, S, N x D] to [B, N, S, D]."""
    rows, length, width = x_BSH.shape
    return x_BSH.reshape(rows, length, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def _attend(
    query_BNSD: np.ndarray, key_BNTD: np.ndarray, value_BNTD: np.ndarray, visible_BST: np.ndarray
) -> np.ndarray:
    """Softmax attention with its heads joined again, [B, S, N x D] (Vaswani et al. 2017, section 3.2).

    A query that sees no key gets the mean of all values.
    """
    scores_BNST = query_BNSD @ key_BNTD.swapaxes(-1, -2) / np.sqrt(query_BNSD.shape[-1])
    scores_BNST = np.where(visible_BST[:, None], scores_BNST, np.finfo(np.float32).min)
    weights_BNST = np.exp(scores_BNST - scores_BNST.max(-1, keepdims=True))
    weights_BNST /= weights_BNST.sum(-1, keepdims=True)
    mixed_BSND = (weights_BNST @ value_BNTD).transpose(0, 2, 1, 3)
    return mixed_BSND.reshape(*mixed_BSND.shape[:2], -1)


def _modern_states(weights: _Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of ModernBERT (Warner et al. 2024): pre-norm, rotary positions, GeGLU, local and global layers."""
    prefix, num_heads, depth = (
        weights.prefix,
        weights.config["num_attention_heads"],
        weights.config["num_hidden_layers"],
    )
    words_BSH = weights(f"{prefix}embeddings.tok_embeddings.weight")[inputs.input_ids_BS]
    hidden_BSH = weights.norm(f"{prefix}embeddings.norm", words_BSH)
    yield hidden_BSH
    for layer in range(depth):
        at = f"{prefix}layers.{layer}."
        window, base = _window_and_rotary_base(weights.config, layer)
        # The embeddings have just been normalised: the first layer has no norm of its own.
        before = weights.norm(f"{at}attn_norm", hidden_BSH) if layer else hidden_BSH
        qkv = np.split(weights.dense(f"{at}attn.Wqkv", before), 3, axis=-1)
        query, key, value = (_split_heads(x, num_heads) for x in qkv)
        mixed = _attend(_rotate(query, base), _rotate(key, base), value, _visible(weights, inputs, window))
        hidden_BSH = hidden_BSH + weights.dense(f"{at}attn.Wo", mixed)
        before = weights.norm(f"{at}mlp_norm", hidden_BSH)
        gate, up = np.split(weights.dense(f"{at}mlp.Wi", before), 2, axis=-1)
        hidden_BSH = hidden_BSH + weights.dense(f"{at}mlp.Wo", weights.activate(gate) * up)
        if layer + 1 < depth:
            yield hidden_BSH
    yield weights.norm(f"{prefix}final_norm", hidden_BSH)


def _window_and_rotary_base(config: dict[str, Any], layer: int) -> tuple[int | None, float]:
    """Window to each side (None: global) and rotary base of a ModernBERT layer; configs of transformers 4 or 5."""
    if config.get("layer_types"):
        is_global = config["layer_types"][layer] == "full_attention"
    else:
        is_global = layer % config.get("global_attn_every_n_layers", 3) == 0
    rotary = (config.get("rope_parameters") or {}).get("full_attention" if is_global else "sliding_attention") or {}
    older = ("global_rope_theta", 160000.0) if is_global else ("local_rope_theta", 10000.0)
    base = rotary.get("rope_theta") or config.get(*older)
    return (None if is_global else config.get("local_attention", 128) // 2), float(base)


def _rotate(x_BNSD: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions from 0; dimension i is paired with i + D/2 (Su et al. 2021; rotate_half of transformers)."""
    length, size = x_BNSD.shape[-2:]
    frequencies = base ** (-np.arange(0, size, 2) / size)
    angles_SD = np.tile(np.arange(length)[:, None] * frequencies, 2)
    first, second = np.split(x_BNSD, 2, axis=-1)
    return x_BNSD * np.cos(angles_SD) + np.concatenate([-second, first], -1) * np.sin(angles_SD)


def _mobile_states(weights: _Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of MobileBERT (Sun et al. 2020): trigrams, bottlenecks, several feed-forward networks."""
    prefix, config = weights.prefix, weights.config
    visible_BST = _visible(weights, inputs)
    hidden_BSH = _embed_trigrams(weights, inputs)
    yield hidden_BSH

    def dense_norm(name: str, x: np.ndarray, residual: np.ndarray | float = 0.0) -> np.ndarray:
        return weights.mobile_norm(f"{name}.LayerNorm", weights.dense(f"{name}.dense", x) + residual)

    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{layer}."
        inner = query_key = value = hidden_BSH
        if config.get("use_bottleneck", True):
            inner = dense_norm(f"{at}bottleneck.input", hidden_BSH)
            if config.get("use_bottleneck_attention", False):
                query_key = value = inner
            elif config.get("key_query_shared_bottleneck", True):
                query_key = dense_norm(f"{at}bottleneck.attention", hidden_BSH)
        sources = {"query": query_key, "key": query_key, "value": value}
        heads = (
            _split_heads(weights.dense(f"{at}attention.self.{name}", x), config["num_attention_heads"])
            for name, x in sources.items()
        )
        inner = dense_norm(f"{at}attention.output", _attend(*heads, visible_BST), inner)
        for network in (*(f"ffn.{i}." for i in range(config.get("num_feedforward_networks", 4) - 1)), ""):
            up = weights.activate(weights.dense(f"{at}{network}intermediate.dense", inner))
            inner = dense_norm(f"{at}{network}output", up, inner)
        has_exit = config.get("use_bottleneck", True)
        hidden_BSH = dense_norm(f"{at}output.bottleneck", inner, hidden_BSH) if has_exit else inner
        yield hidden_BSH


def _embed_trigrams(weights: _Weights, inputs: ForwardInputs) -> np.ndarray:
    """MobileBERT's input of the first layer: the words after, at and before each token; zeros outside of the text."""
    at = f"{weights.prefix}embeddings."
    words_BSE = weights(f"{at}word_embeddings.weight")[inputs.input_ids_BS]
    words_BSE *= inputs.attention_mask_BS[:, :, None]
    edge_B1E = np.zeros_like(words_BSE[:, :1])
    after, before = np.hstack([words_BSE[:, 1:], edge_B1E]), np.hstack([edge_B1E, words_BSE[:, :-1]])
    trigrams = np.concatenate([after, words_BSE, before], -1)
    total_BSH = weights.dense(f"{at}embedding_transformation", trigrams)
    total_BSH += weights(f"{at}position_embeddings.weight")[: words_BSE.shape[1]]
    total_BSH += weights(f"{at}token_type_embeddings.weight")[inputs.token_type_ids_BS]
    return weights.mobile_norm(f"{at}LayerNorm", total_BSH)


def _run_heads(
    weights: _Weights, heads: HeadsPresent, hidden_BSH: np.ndarray, attention_mask_BS: np.ndarray
) -> ForwardOutputs:
    """The logits of each head, and the pooler's output: tanh of a dense layer on the first token."""
    outputs, family = {}, weights.family
    pooler = f"{weights.prefix}pooler{'' if family == 'albert' else '.dense'}"
    if f"{pooler}.weight" in weights.tensors:
        outputs["pooled vector"] = np.tanh(weights.dense(pooler, hidden_BSH[:, 0]))
    if heads.mlm:
        outputs["mlm logits"] = _mlm(weights, hidden_BSH)
    if heads.pair:
        outputs["pair logits"] = weights.dense(PAIR_HEADS[family], outputs["pooled vector"])
    if heads.task in (SEQUENCE, CHOICE):
        pooled_BH = outputs.get("pooled vector")
        outputs["task logits"] = _classify_sequence(weights, heads.task, hidden_BSH, pooled_BH, attention_mask_BS)
    elif heads.task is not None:
        outputs["task logits"] = _classify_tokens(weights, heads.task, hidden_BSH)
    return outputs


def _mlm(weights: _Weights, hidden_BSH: np.ndarray) -> np.ndarray:
    """Logits over the vocabulary [B, S, V], float32: dense, activation, LayerNorm, and the table of word embeddings.

    One row at a time saves memory.
    """
    words = "tok_embeddings" if weights.family == "modernbert" else "word_embeddings"
    table_VE, decoder = weights(f"{weights.prefix}embeddings.{words}.weight"), MLM_HEADS[weights.family].decoder
    # The bias is stored under the head's name, the decoder's, or both (transformers, _tied_weights_keys).
    biases = (f"{name}.bias" for name in (decoder, decoder.rpartition(".")[0]))
    bias_V = next((weights(name) for name in biases if name in weights.tensors), 0.0)
    transformed_BSE = _transform(weights, hidden_BSH)
    if weights.family == "mobilebert":  # further columns of the decoder
        table_VE = np.hstack([table_VE, weights("cls.predictions.dense.weight").T])
    return np.stack([(row_SE @ table_VE.T + bias_V).astype(np.float32) for row_SE in transformed_BSE])


def _transform(weights: _Weights, hidden: np.ndarray) -> np.ndarray:
    """Dense layer, activation and norm before the decoder, and before every classifier of ModernBERT."""
    names = MLM_HEADS[weights.family]
    if weights.family == "modernbert":
        activation = weights.config.get("classifier_activation", "gelu")
    else:  # fixed in two families, whatever hidden_act is
        activation = "gelu" if weights.family in ("roberta", "electra") else None
    return weights.norm(names.norm, weights.activate(weights.dense(names.dense, hidden), activation))


def _classify_tokens(weights: _Weights, task: str, hidden_BSH: np.ndarray) -> np.ndarray:
    """Logits [B, S, C]."""
    if weights.family == "modernbert":
        return weights.dense("classifier", _transform(weights, hidden_BSH))
    if task == REPLACED:
        activated_BSH = weights.activate(weights.dense("discriminator_predictions.dense", hidden_BSH))
        return weights.dense("discriminator_predictions.dense_prediction", activated_BSH)
    return weights.dense("qa_outputs" if task == SPAN else "classifier", hidden_BSH)


def _classify_sequence(
    weights: _Weights,
    task: str,
    hidden_BSH: np.ndarray,
    pooled_BH: np.ndarray | None,
    attention_mask_BS: np.ndarray,
) -> np.ndarray:
    """Logits [B, C]."""
    family, first_BH = weights.family, hidden_BSH[:, 0]
    if family == "modernbert":
        real_BS1 = attention_mask_BS[:, :, None].astype(np.float64)
        mean_BH = (hidden_BSH * real_BS1).sum(1) / real_BS1.sum(1)
        pooling = weights.config.get("classifier_pooling", "cls")
        return weights.dense("classifier", _transform(weights, first_BH if pooling == "cls" else mean_BH))
    if family == "distilbert":
        return weights.dense("classifier", np.maximum(weights.dense("pre_classifier", first_BH), 0.0))
    if family == "electra" and task == CHOICE:
        summary_BH = weights.activate(weights.dense("sequence_summary.summary", first_BH), "gelu")
        return weights.dense("classifier", summary_BH)
    if family in ("roberta", "electra") and task == SEQUENCE:
        activation = "tanh" if family == "roberta" else "gelu"
        return weights.dense(
            "classifier.out_proj", weights.activate(weights.dense("classifier.dense", first_BH), activation)
        )
    return weights.dense("classifier", pooled_BH)
