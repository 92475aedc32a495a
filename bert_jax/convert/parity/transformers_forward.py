"""Reference forward pass in transformers, for the parity report where transformers and PyTorch are installed.

Both libraries are imported only for a forward pass, and nothing is downloaded.
"""

import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from bert_jax.convert.forward_types import (
    CHOICE,
    ENCODER_PREFIXES,
    REPLACED,
    SPAN,
    ForwardInputs,
    ForwardOutputs,
    family_of,
    heads_of,
    is_causal,
    name_states,
    prefix_of,
)
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError

CLASSES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "albert": "Albert",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "modernbert": "ModernBert",
    "mobilebert": "MobileBert",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
}
"""By model_type: prefix of transformers' class names."""
_CAUSAL_SUFFIXES = {"bert": "LMHeadModel", "roberta": "ForCausalLM"}
_POOLED = ("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "AlbertModel", "MobileBertModel")
"""Classes whose constructor can leave out the pooler."""
_HEADS = {
    "prediction_logits": "mlm logits",
    "seq_relationship_logits": "pair logits",
    "sop_logits": "pair logits",
    "pooler_output": "pooled vector",
}
"""By name in transformers' outputs; a head alone has `logits`."""
_CLASSIFIERS = (
    *("classifier.weight", "classifier.out_proj.weight", "qa_outputs.weight", "sop_classifier.classifier.weight"),
)
"""Tensors with a row for each label."""
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that transformers raises for configs and tensors that it does not accept."""


def available() -> bool:
    """Whether PyTorch and transformers 5 (the version of the extra `parity`) are installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return False
    return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5


def library_version() -> str:
    """Name and version for the report, e.g. "transformers 5.23.0"."""
    return f"transformers {importlib.metadata.version('transformers')}"


def class_name(hf_model: HuggingFaceModel) -> str:
    """The class that has exactly the heads of the model.

    Raises:
      UserError: no class of transformers has these heads together.
    """
    family, (mlm, pair, task) = family_of(hf_model), heads_of(hf_model)
    prefix = CLASSES[hf_model.config["model_type"]]
    if task is not None:
        if mlm or pair:
            raise UserError(
                f"{hf_model.source}: no class of transformers has both pretraining heads and {task[3:]}: leave "
                "one out with --drop PATTERN"
            )
        return prefix + task
    if pair and not mlm:
        if family not in ("bert", "mobilebert"):
            raise UserError(f"{hf_model.source}: no class of transformers has a pair head of {family} alone")
        return f"{prefix}ForNextSentencePrediction"
    if mlm and not pair and is_causal(hf_model):
        return prefix + _CAUSAL_SUFFIXES[family]
    return prefix + ("ForPreTraining" if pair else "ForMaskedLM" if mlm else "Model")


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All outputs, in float32 on the CPU, with eager attention. Values at padded positions have no meaning.

    MobileBERT computes each row without its padding: in a padded row, the embedding of a text's last token depends on
    that of the padding after it.

    Raises:
      UserError: no class has these heads, or it refuses the config or lacks a tensor.
    """
    model = _load(hf_model)
    if family_of(hf_model) != "mobilebert":
        return _forward(model, hf_model, inputs)
    lengths = inputs.attention_mask_BS.sum(1)
    rows = [
        _forward(model, hf_model, ForwardInputs(*(array[i : i + 1, :length] for array in inputs)))
        for i, length in enumerate(lengths)
    ]
    return {name: _join_rows([row[name] for row in rows], inputs.input_ids_BS.shape[1]) for name in rows[0]}


def _join_rows(values: list[np.ndarray], longest: int) -> np.ndarray:
    """Outputs of single rows as one array; those of positions, [1, length, ...], are padded with zeros."""
    if values[0].ndim == 3:
        values = [np.pad(x, [(0, 0), (0, longest - x.shape[1]), (0, 0)]) for x in values]
    return np.concatenate(values)


def _forward(model: Any, hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    import torch

    batch = {"input_ids": inputs.input_ids_BS, "attention_mask": inputs.attention_mask_BS}
    if family_of(hf_model) not in ("distilbert", "modernbert"):
        batch["token_type_ids"] = inputs.token_type_ids_BS
    mlm, _, task = heads_of(hf_model)
    if task == CHOICE:  # one ending each
        batch = {name: array[:, None] for name, array in batch.items()}
    batch = {name: torch.tensor(array).long() for name, array in batch.items()}
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True, return_dict=True)
    heads = {name: output[hf_name] for hf_name, name in _HEADS.items() if output.get(hf_name) is not None}
    if task == SPAN:
        heads["task logits"] = torch.stack([output.start_logits, output.end_logits], -1)
    elif output.get("logits") is not None:
        name = "task logits" if task else "mlm logits" if mlm else "pair logits"
        heads[name] = output.logits[..., None] if task == REPLACED else output.logits
    states = name_states(state.numpy() for state in output.hidden_states)
    return states | {name: values.numpy() for name, values in heads.items()}


def _load(hf_model: HuggingFaceModel) -> Any:
    """A model of transformers with the given tensors, whose decoder is tied to the word embeddings.

    Raises:
      UserError: no class has these heads, or it refuses the config or lacks a tensor.
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    name = class_name(hf_model)
    model_class = getattr(transformers, name)
    prefix, wanted = prefix_of(hf_model), ENCODER_PREFIXES[family_of(hf_model)]
    if name.endswith("Model") and not name.endswith("LMHeadModel"):  # an encoder without heads
        wanted = ""
    state = {}
    for key in hf_model.tensors:
        target = wanted + key.removeprefix(prefix) if key.startswith(prefix) else key
        state[target] = torch.tensor(np.asarray(hf_model.tensors[key], np.float32))
    has_pooler = any(key.startswith("pooler.") for key in state)
    try:
        # Chunks change only the use of memory; the reader of the source has checked that a stored decoder is a copy.
        changes = {"chunk_size_feed_forward": 0, "tie_word_embeddings": True}
        config = model_class.config_class.from_dict(hf_model.config | changes)
        config._attn_implementation = "eager"
        num_labels = next((len(state[key]) for key in _CLASSIFIERS if key in state), config.num_labels)
        if config.num_labels != num_labels:
            config.num_labels = num_labels
        model = model_class(config, **({"add_pooling_layer": has_pooler} if name in _POOLED else {})).eval()
        missing = model.load_state_dict(state, strict=False).missing_keys
    except (*_REFUSALS, StrictDataclassError) as error:
        raise UserError(f"{hf_model.source}: {name} refuses this model: {' '.join(str(error).split())}") from error
    ties = dict(model_class._tied_weights_keys or {})
    if missing := [key for key in missing if key not in ties]:
        raise UserError(f"{hf_model.source}: tensor '{missing[0]}' is missing, {name} has it")
    return model
