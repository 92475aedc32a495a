"""Reference forward pass in numpy, for the parity report where transformers is not installed.

It reads the names and layouts of transformers directly, and uses neither the parameters nor the model of bert_jax. It
is slow and simple on purpose, and computes in float64 from the stored weights, so that its error is below that of a
float32 forward pass. Sources: the papers, and transformers 5.23, models/*/modeling_*.py.

Shapes in names: B rows, S positions, T keys, H hidden, E width of the embedding tables, N heads, D head size,
F feed-forward, V vocabulary, C classes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy.special import erf

from bert_jax.convert.forward_types import (
    MLM_HEADS,
    ForwardInputs,
    ForwardOutputs,
    HeadsPresent,
    TaskKind,
    config_value,
    family_of,
    heads_of,
    is_causal,
    may_be_unused,
    prefix_of,
)
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError

LIBRARY = "numpy"
"""Name of this library in the report."""


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
    *("attention.self.query", "attention.self.key", "attention.self.value"),
    *("attention.output.dense", "attention.output.LayerNorm"),
    *("intermediate.dense", "output.dense", "output.LayerNorm"),
)
_ALBERT_BLOCK = _Block(
    *("attention.query", "attention.key", "attention.value", "attention.dense", "attention.LayerNorm"),
    *("ffn", "ffn_output", "full_layer_layer_norm"),
)
_DISTILBERT_BLOCK = _Block(
    *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm"),
    *("ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
_CONFIG_NAMES = {
    ("distilbert", "num_hidden_layers"): ("n_layers", "num_hidden_layers"),
    ("distilbert", "num_attention_heads"): ("n_heads", "num_attention_heads"),
    ("distilbert", "hidden_act"): ("activation",),
    ("modernbert", "hidden_act"): ("hidden_activation",),
}
"""By family and name in BERT's config: names in the family's config."""


class _Weights:
    """The tensors of a model, cast to float64 one at a time, with a record of which were read."""

    def __init__(self, hf_model: HuggingFaceModel):
        self.hf_model, self.config = hf_model, hf_model.config
        self.family, self.prefix = family_of(hf_model), prefix_of(hf_model)
        epsilon = {"distilbert": 1e-12, "modernbert": self.config.get("norm_eps", 1e-5)}
        self.epsilon = epsilon.get(self.family, self.config.get("layer_norm_eps", 1e-12))
        self._names, self._read = set(hf_model.tensors), set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str) -> np.ndarray:
        """A tensor, float64.

        Raises:
          UserError: it is missing.
        """
        if name not in self._names:
            raise UserError(f"{self.hf_model.source}: tensor '{name}' is missing")
        self._read.add(name)
        return np.asarray(self.hf_model.tensors[name], np.float64)

    def setting(self, name: str) -> Any:
        """A config value by its name in BERT's config."""
        return config_value(self.hf_model, *_CONFIG_NAMES.get((self.family, name), (name,)))

    def dense(self, name: str, x: np.ndarray, *, bias: bool = True) -> np.ndarray:
        """x W^T + b over the last axis."""
        y = x @ self(f"{name}.weight").T
        return y + self(f"{name}.bias") if bias else y

    def norm(self, name: str, x: np.ndarray, *, bias: bool = True) -> np.ndarray:
        """LayerNorm of the last axis (Ba et al. 2016)."""
        variance = x.var(-1, keepdims=True)
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance + self.epsilon) * self(f"{name}.weight")
        return y + self(f"{name}.bias") if bias else y

    def activate(self, name: str, x: np.ndarray) -> np.ndarray:
        """An activation function by its name in a config.

        Raises:
          UserError: the activation is not in _ACTIVATIONS.
        """
        if name not in _ACTIVATIONS:
            raise UserError(f"{self.hf_model.source}: activation '{name}' is not one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name](x)

    def embedding_rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Rows of a table of the encoder.

        Raises:
          UserError: an id is outside it.
        """
        table = self(name)
        if ids.min() < 0 or ids.max() >= len(table):
            raise UserError(f"{self.hf_model.source}: id {ids.max()} is outside '{name}', which has {len(table)} rows")
        return table[ids]

    def unused_tensors(self) -> tuple[str, ...]:
        """Names of tensors that were not read, without those that `may_be_unused`."""
        return tuple(sorted(name for name in self._names - self._read if not may_be_unused(name)))


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of every head that the model has.

    Values at padded positions have no meaning.

    Raises:
      UserError: a tensor or config value is missing or unknown, shapes do not match, or an id or position is outside
        its table.
    """
    heads, weights = heads_of(hf_model), _Weights(hf_model)
    encode = _modern_states if weights.family == "modernbert" else _post_norm_states
    try:
        states = list(encode(weights, inputs))
        logits, pooled_BH = _run_heads(weights, heads, states[-1], inputs.attention_mask_BS)
    except ValueError as error:  # of shapes that do not match
        raise UserError(f"{hf_model.source}: tensors and config do not match: {error}") from error
    return ForwardOutputs(
        [state.astype(np.float32) for state in states],
        {name: values.astype(np.float32) for name, values in logits.items()},
        heads.task,
        None if pooled_BH is None else pooled_BH.astype(np.float32),
        weights.unused_tensors(),
    )


def _post_norm_states(weights: _Weights, inputs: ForwardInputs) -> Iterator[np.ndarray]:
    """Hidden states of BERT, RoBERTa, ALBERT, DistilBERT and ELECTRA."""
    block = {"albert": _ALBERT_BLOCK, "distilbert": _DISTILBERT_BLOCK}.get(weights.family, _BERT_BLOCK)
    num_heads, activation = weights.setting("num_attention_heads"), weights.setting("hidden_act")
    visible_BST = _visible(inputs, None, causal=is_causal(weights.hf_model))
    hidden_BSH = _embed(weights, inputs)
    yield hidden_BSH
    for at in _layer_names(weights):
        query, key, value = (
            _split_heads(weights.dense(at + name, hidden_BSH), num_heads)
            for name in (block.query, block.key, block.value)
        )
        attended_BSH = weights.dense(at + block.attention_out, _attend(query, key, value, visible_BST))
        hidden_BSH = weights.norm(at + block.attention_norm, hidden_BSH + attended_BSH)
        up_BSF = weights.activate(activation, weights.dense(at + block.up, hidden_BSH))
        hidden_BSH = weights.norm(at + block.feed_forward_norm, hidden_BSH + weights.dense(at + block.down, up_BSF))
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
    total_BSE = weights.embedding_rows(f"{at}word_embeddings.weight", ids_BS)
    total_BSE = total_BSE + weights.embedding_rows(f"{at}position_embeddings.weight", positions_BS)
    if family != "distilbert":
        total_BSE += weights.embedding_rows(f"{at}token_type_embeddings.weight", inputs.token_type_ids_BS)
    embedded_BSE = weights.norm(f"{at}LayerNorm", total_BSE)
    if family == "albert":  # always, even where E is H (Lan et al. 2020, section 3.1)
        return weights.dense(f"{weights.prefix}encoder.embedding_hidden_mapping_in", embedded_BSE)
    if family == "electra" and f"{weights.prefix}embeddings_project.weight" in weights:
        return weights.dense(f"{weights.prefix}embeddings_project", embedded_BSE)
    return embedded_BSE


def _layer_names(weights: _Weights) -> Iterator[str]:
    """Prefix of each layer's tensor names, first layer first."""
    depth = weights.setting("num_hidden_layers")
    for layer in range(depth):
        if weights.family == "albert":
            group = layer * weights.config.get("num_hidden_groups", 1) // depth
            for inner in range(weights.config.get("inner_group_num", 1)):
                yield f"{weights.prefix}encoder.albert_layer_groups.{group}.albert_layers.{inner}."
        else:
            yield f"{weights.prefix}{'transformer' if weights.family == 'distilbert' else 'encoder'}.layer.{layer}."


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
    prefix, config = weights.prefix, weights.config
    norm_bias, mlp_bias = config.get("norm_bias", False), config.get("mlp_bias", False)
    attention_bias, num_heads = config.get("attention_bias", False), weights.setting("num_attention_heads")
    words_BSH = weights.embedding_rows(f"{prefix}embeddings.tok_embeddings.weight", inputs.input_ids_BS)
    hidden_BSH = weights.norm(f"{prefix}embeddings.norm", words_BSH, bias=norm_bias)
    yield hidden_BSH
    depth = weights.setting("num_hidden_layers")
    for layer in range(depth):
        at = f"{prefix}layers.{layer}."
        window, base = _window_and_rotary_base(weights.hf_model, layer)
        # The embeddings have just been normalised: the first layer has no norm of its own.
        before = weights.norm(f"{at}attn_norm", hidden_BSH, bias=norm_bias) if layer else hidden_BSH
        qkv = np.split(weights.dense(f"{at}attn.Wqkv", before, bias=attention_bias), 3, axis=-1)
        query, key, value = (_split_heads(x, num_heads) for x in qkv)
        mixed = _attend(_rotate(query, base), _rotate(key, base), value, _visible(inputs, window))
        hidden_BSH = hidden_BSH + weights.dense(f"{at}attn.Wo", mixed, bias=attention_bias)
        before = weights.norm(f"{at}mlp_norm", hidden_BSH, bias=norm_bias)
        gate, up = np.split(weights.dense(f"{at}mlp.Wi", before, bias=mlp_bias), 2, axis=-1)
        gate = weights.activate(weights.setting("hidden_act"), gate)
        hidden_BSH = hidden_BSH + weights.dense(f"{at}mlp.Wo", gate * up, bias=mlp_bias)
        if layer + 1 < depth:
            yield hidden_BSH
    yield weights.norm(f"{prefix}final_norm", hidden_BSH, bias=norm_bias)


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


def _rotate(x_BNSD: np.ndarray, base: float) -> np.ndarray:
    """Rotary positions from 0; dimension i is paired with i + D/2 (Su et al. 2021; rotate_half of transformers)."""
    length, size = x_BNSD.shape[-2:]
    frequencies = base ** (-np.arange(0, size, 2) / size)
    angles_SD = np.tile(np.arange(length)[:, None] * frequencies, 2)
    first, second = np.split(x_BNSD, 2, axis=-1)
    return x_BNSD * np.cos(angles_SD) + np.concatenate([-second, first], -1) * np.sin(angles_SD)


def _run_heads(
    weights: _Weights, heads: HeadsPresent, hidden_BSH: np.ndarray, attention_mask_BS: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Logits by name, and [B, H] of the pooler, tanh of a dense layer on the first token; None without a pooler."""
    logits, pooled_BH, family = {}, None, weights.family
    pooler = f"{weights.prefix}pooler{'' if family == 'albert' else '.dense'}"
    on_pooled = heads.pair or (heads.task is TaskKind.SEQUENCE and family in ("bert", "albert"))
    if on_pooled or f"{pooler}.weight" in weights:
        pooled_BH = np.tanh(weights.dense(pooler, hidden_BSH[:, 0]))
    if heads.mlm:
        logits["mlm"] = _mlm(weights, hidden_BSH)
    if heads.pair:
        name = "cls.seq_relationship" if family == "bert" else "sop_classifier.classifier"
        logits["pair"] = weights.dense(name, pooled_BH)
    if heads.task is not None:
        logits["task"] = _task(weights, heads.task, hidden_BSH, pooled_BH, attention_mask_BS)
    return logits, pooled_BH


def _mlm(weights: _Weights, hidden_BSH: np.ndarray) -> np.ndarray:
    """Logits over the vocabulary [B, S, V], float32: dense, activation, LayerNorm, decoder.

    The decoder is the model's own or else the table of word embeddings; one row at a time saves memory.
    """
    is_modern, name = weights.family == "modernbert", MLM_HEADS[weights.family].decoder
    table = f"{weights.prefix}embeddings.{'tok' if is_modern else 'word'}_embeddings.weight"
    own_table = f"{name}.weight" in weights or weights.config.get("tie_word_embeddings") is False
    table_VE = weights(f"{name}.weight" if own_table else table)
    bias_V = np.zeros(1)
    if not is_modern or weights.config.get("decoder_bias", True):
        # A tied bias is stored under the head's name (transformers, _tied_weights_keys), or under both.
        head = name.rpartition(".")[0]
        stored = [bias for bias in (f"{name}.bias", f"{head}.bias") if bias in weights]
        bias_V, *_ = [weights(bias) for bias in stored or [f"{head or name}.bias"]]
    transformed_BSE = _transform(weights, hidden_BSH)
    return np.stack([(row_SE @ table_VE.T + bias_V).astype(np.float32) for row_SE in transformed_BSE])


def _transform(weights: _Weights, hidden: np.ndarray) -> np.ndarray:
    """Dense layer, activation and norm before the decoder, and before every classifier of ModernBERT."""
    config, family, names = weights.config, weights.family, MLM_HEADS[weights.family]
    is_modern = family == "modernbert"
    if family in ("roberta", "electra"):  # fixed, whatever hidden_act is
        activation = "gelu"
    else:
        activation = config.get("classifier_activation", "gelu") if is_modern else weights.setting("hidden_act")
    dense = weights.dense(names.dense, hidden, bias=not is_modern or config.get("classifier_bias", False))
    activated = weights.activate(activation, dense)
    return weights.norm(names.norm, activated, bias=not is_modern or config.get("norm_bias", False))


def _task(
    weights: _Weights,
    task: TaskKind,
    hidden_BSH: np.ndarray,
    pooled_BH: np.ndarray | None,
    attention_mask_BS: np.ndarray,
) -> np.ndarray:
    """Logits in the shape of the `TaskKind`."""
    family, first_BH = weights.family, hidden_BSH[:, 0]
    if family == "modernbert":
        if task is TaskKind.SEQUENCE and weights.config.get("classifier_pooling", "cls") == "cls":
            hidden_BSH = first_BH
        elif task is TaskKind.SEQUENCE:  # the mean of the real tokens
            real_BS1 = attention_mask_BS[:, :, None].astype(np.float64)
            hidden_BSH = (hidden_BSH * real_BS1).sum(1) / real_BS1.sum(1)
        return weights.dense("classifier", _transform(weights, hidden_BSH))
    if task is TaskKind.REPLACED:
        dense = weights.dense("discriminator_predictions.dense", hidden_BSH)
        activated = weights.activate(weights.setting("hidden_act"), dense)
        return weights.dense("discriminator_predictions.dense_prediction", activated)[..., 0]
    if task is not TaskKind.SEQUENCE:
        return weights.dense("qa_outputs" if task is TaskKind.SPAN else "classifier", hidden_BSH)
    if family == "distilbert":
        return weights.dense("classifier", np.maximum(weights.dense("pre_classifier", first_BH), 0.0))
    if family in ("roberta", "electra"):
        activation = "tanh" if family == "roberta" else "gelu"
        dense = weights.dense("classifier.dense", first_BH)
        return weights.dense("classifier.out_proj", weights.activate(activation, dense))
    return weights.dense("classifier", pooled_BH)
