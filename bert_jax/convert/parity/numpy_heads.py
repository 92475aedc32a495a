"""The heads of the numpy forward pass: every head of the families, on the last hidden state.

Shapes in names: B rows, S positions, H hidden, V vocabulary, C classes.
"""

import numpy as np

from bert_jax.convert.forward_types import HeadsPresent, TaskKind, family_of, prefix_of
from bert_jax.convert.parity.numpy_layers import ACTIVATIONS, Weights

Logits = dict[str, np.ndarray]


def run_heads(
    weights: Weights, heads: HeadsPresent, hidden_BSH: np.ndarray, attention_mask_BS: np.ndarray
) -> tuple[Logits, np.ndarray | None]:
    """Logits by name, float32, and the pooled vectors, float64 [B, H], of a model with a pooler."""
    on_pooled = heads.task is TaskKind.SEQUENCE and family_of(weights.hf_model) in ("bert", "albert")
    pooled_BH = _pool(weights, hidden_BSH, needed=heads.pair or on_pooled)
    logits = {}
    if heads.mlm:
        logits["mlm"] = _mlm(weights, hidden_BSH)
    if heads.pair:
        name = "cls.seq_relationship" if family_of(weights.hf_model) == "bert" else "sop_classifier.classifier"
        logits["pair"] = weights.dense(name, pooled_BH)
    if heads.task is not None:
        logits["task"] = _task(weights, heads.task, hidden_BSH, pooled_BH, attention_mask_BS)
    return {name: values.astype(np.float32) for name, values in logits.items()}, pooled_BH


def _pool(weights: Weights, hidden_BSH: np.ndarray, *, needed: bool) -> np.ndarray | None:
    """tanh of a dense layer on the first token; None if the model has no pooler."""
    inner = "" if family_of(weights.hf_model) == "albert" else ".dense"
    name = f"{prefix_of(weights.hf_model)}pooler{inner}"
    return np.tanh(weights.dense(name, hidden_BSH[:, 0])) if needed or f"{name}.weight" in weights else None


def _mlm(weights: Weights, hidden_BSH: np.ndarray) -> np.ndarray:
    """Logits over the vocabulary [B, S, V], float32: dense, activation, LayerNorm, decoder."""
    config = weights.hf_model.config
    family, epsilon = family_of(weights.hf_model), config.get("layer_norm_eps", 1e-12)
    gelu = ACTIVATIONS["gelu"]
    if family == "modernbert":
        return _decode(
            weights, _modern_transform(weights, hidden_BSH), "decoder", bias=config.get("decoder_bias", True)
        )
    if family == "distilbert":
        activate = weights.activation(config["activation"])
        transformed = activate(weights.dense("vocab_transform", hidden_BSH))
        return _decode(weights, weights.norm("vocab_layer_norm", transformed, 1e-12), "vocab_projector")
    if family == "electra":  # the generator's activation is fixed, whatever hidden_act says; so is RoBERTa's
        transformed = gelu(weights.dense("generator_predictions.dense", hidden_BSH))
        return _decode(
            weights, weights.norm("generator_predictions.LayerNorm", transformed, epsilon), "generator_lm_head"
        )
    if family == "roberta":
        transformed = gelu(weights.dense("lm_head.dense", hidden_BSH))
        return _decode(weights, weights.norm("lm_head.layer_norm", transformed, epsilon), "lm_head.decoder")
    head, inner = ("cls.predictions", ".transform") if family == "bert" else ("predictions", "")
    transformed = weights.activation(config["hidden_act"])(weights.dense(f"{head}{inner}.dense", hidden_BSH))
    return _decode(weights, weights.norm(f"{head}{inner}.LayerNorm", transformed, epsilon), f"{head}.decoder")


def _decode(weights: Weights, transformed_BSE: np.ndarray, name: str, *, bias: bool = True) -> np.ndarray:
    """Logits by the decoder if the model has one, else by the word embeddings; one row at a time saves memory."""
    word = "tok_embeddings" if family_of(weights.hf_model) == "modernbert" else "word_embeddings"
    table = f"{prefix_of(weights.hf_model)}embeddings.{word}.weight"
    own_table = f"{name}.weight" in weights or weights.hf_model.config.get("tie_word_embeddings") is False
    table_VE = weights(f"{name}.weight" if own_table else table)
    # A tied bias is stored under the head's name (transformers, _tied_weights_keys).
    head_bias = f"{name.rpartition('.')[0]}.bias"
    decoder_bias = f"{name}.bias"
    biases = [weights(each) for each in (decoder_bias, head_bias) if each in weights] if bias else [np.zeros(1)]
    bias_V = biases[0] if biases else weights(head_bias if "." in name else decoder_bias)
    return np.stack([(row_SE @ table_VE.T + bias_V).astype(np.float32) for row_SE in transformed_BSE])


def _modern_transform(weights: Weights, hidden: np.ndarray) -> np.ndarray:
    """ModernBERT's head, which precedes its decoder and every classifier."""
    config = weights.hf_model.config
    activate = weights.activation(config.get("classifier_activation", "gelu"))
    risen = activate(weights.dense("head.dense", hidden, bias=config.get("classifier_bias", False)))
    return weights.norm("head.norm", risen, config.get("norm_eps", 1e-5), bias=config.get("norm_bias", False))


def _task(
    weights: Weights,
    task: TaskKind,
    hidden_BSH: np.ndarray,
    pooled_BH: np.ndarray | None,
    attention_mask_BS: np.ndarray,
) -> np.ndarray:
    """Logits in the shape of the `TaskKind`."""
    config = weights.hf_model.config
    family = family_of(weights.hf_model)
    if family == "modernbert":
        if task is TaskKind.SEQUENCE:
            hidden_BSH = _pool_rows(hidden_BSH, attention_mask_BS, config.get("classifier_pooling", "cls"))
        return weights.dense("classifier", _modern_transform(weights, hidden_BSH))
    if task is TaskKind.REPLACED:
        risen = weights.activation(config["hidden_act"])(weights.dense("discriminator_predictions.dense", hidden_BSH))
        return weights.dense("discriminator_predictions.dense_prediction", risen)[..., 0]
    if task is not TaskKind.SEQUENCE:
        return weights.dense("qa_outputs" if task is TaskKind.SPAN else "classifier", hidden_BSH)
    if family == "distilbert":
        return weights.dense("classifier", np.maximum(weights.dense("pre_classifier", hidden_BSH[:, 0]), 0.0))
    if family in ("roberta", "electra"):
        activate = np.tanh if family == "roberta" else ACTIVATIONS["gelu"]
        return weights.dense("classifier.out_proj", activate(weights.dense("classifier.dense", hidden_BSH[:, 0])))
    return weights.dense("classifier", pooled_BH)


def _pool_rows(hidden_BSH: np.ndarray, attention_mask_BS: np.ndarray, pooling: str) -> np.ndarray:
    """One vector per row [B, H]: of the first token, or the mean of the real ones."""
    if pooling == "cls":
        return hidden_BSH[:, 0]
    real_BS1 = attention_mask_BS[:, :, None].astype(np.float64)
    return (hidden_BSH * real_BS1).sum(1) / real_BS1.sum(1)
