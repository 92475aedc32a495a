"""The second side of the parity report where transformers and PyTorch are installed: their class, our form's tensors.

Both libraries are imported only when a forward pass is asked for, and nothing is ever downloaded.
"""

import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from bert_jax.convert.forward_io import (
    DECODERS,
    PREFIXES,
    ForwardInputs,
    ForwardOutputs,
    Heads,
    Task,
    family_of,
    heads_of,
    is_causal,
    may_be_unused,
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
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
}
"""By model_type: how the names of transformers' classes begin."""
_POOLED = ("bert", "roberta", "albert")
_LOGITS = {"bert": ("prediction_logits", "seq_relationship_logits"), "albert": ("prediction_logits", "sop_logits")}
"""Of the classes with two heads: the names of MLM and pair logits."""

_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of their classes at settings and tensors that they do not accept."""


def available() -> bool:
    """Whether PyTorch and a transformers of series 5, the one that the extra `parity` names, are installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return False
    return int(importlib.metadata.version("transformers").partition(".")[0]) >= 5


def library_version() -> str:
    """As the report names this side, e.g. "transformers 5.23.0"."""
    return f"transformers {importlib.metadata.version('transformers')}"


def class_name(hf_model: HuggingFaceModel) -> str:
    """The class that has exactly the heads of the form.

    Raises:
      UserError: no class of theirs has these heads together.
    """
    family, (mlm, pair, task) = family_of(hf_model), heads_of(hf_model)
    prefix = CLASSES[hf_model.config["model_type"]]
    if task is not None:
        if mlm or pair:
            raise UserError(
                f"{hf_model.source}: no class of transformers has both pretraining heads and {task.value[3:]}: leave "
                "one out with --drop PATTERN"
            )
        return prefix + task.value
    if pair and not mlm:
        if family != "bert":
            raise UserError(f"{hf_model.source}: no class of transformers has a pair head of {family} alone")
        return "BertForNextSentencePrediction"
    if mlm and not pair and is_causal(hf_model):
        return prefix + DECODERS[family]
    return prefix + ("ForPreTraining" if pair else "ForMaskedLM" if mlm else "Model")


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of every head that the form has, in float32 on the CPU, eager attention.

    Values at padded positions mean nothing.

    Raises:
      UserError: a tensor is missing or has another shape than their class wants, or there is no such class.
    """
    import torch

    heads = heads_of(hf_model)
    model, unused_tensors = load(hf_model)
    tensors = {name: torch.tensor(np.asarray(array)).long() for name, array in _arguments(hf_model, inputs).items()}
    with torch.no_grad():
        output = model(**tensors, output_hidden_states=True, return_dict=True)
    pooled = output.get("pooler_output")
    return ForwardOutputs(
        [state.numpy() for state in output.hidden_states],
        {name: logits.numpy() for name, logits in _logits(hf_model, heads, output).items()},
        heads.task,
        None if pooled is None else pooled.numpy(),
        unused_tensors,
    )


def load(hf_model: HuggingFaceModel) -> tuple[Any, tuple[str, ...]]:
    """Their model with the form's tensors, ready to be called, and the names of tensors it has no place for.

    Raises:
      UserError: a tensor is missing or has another shape than their class wants, or there is no such class.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    name = class_name(hf_model)
    model_class = getattr(transformers, name)
    wanted = "" if _is_bare(name) else PREFIXES[family_of(hf_model)]
    state = _state(hf_model, wanted)
    ties = dict(model_class._tied_weights_keys or {})
    tied = _tie(hf_model, state, ties)
    try:
        model = model_class(
            _config(hf_model, model_class, state, tied), **_without_pooler(hf_model, state, name)
        ).eval()
        result = model.load_state_dict(state, strict=False)
    except (*_REFUSALS, StrictDataclassError) as error:
        raise UserError(f"{hf_model.source}: {name} refuses this model: {' '.join(str(error).split())}") from error
    partners = ties | {source: target for target, source in ties.items()} if tied else {}
    missing = [key for key in result.missing_keys if partners.get(key) not in state]
    if missing:
        raise UserError(f"{hf_model.source}: tensor '{missing[0]}' is missing, {name} has it")
    return model, tuple(sorted(key for key in result.unexpected_keys if not may_be_unused(key)))


def _state(hf_model: HuggingFaceModel, wanted: str) -> dict[str, Any]:
    """The tensors in float32, the encoder's under the prefix that their class wants."""
    import torch

    prefix, state = prefix_of(hf_model), {}
    for name in hf_model.tensors:
        inside = name.removeprefix(prefix) if name.startswith(prefix) else None
        target = wanted + inside if prefix and inside is not None else name
        state[target] = torch.tensor(np.asarray(hf_model.tensors[name], np.float32))
    return state


def _tie(hf_model: HuggingFaceModel, state: dict[str, Any], ties: dict[str, str]) -> bool:
    """Whether the decoder is the table of word embeddings; if not, a bias under one of its two names gets both.

    A decoder that is there counts, whatever the config says; where there is none, the config may forbid the tie.

    Args:
      form: whose config it is.
      state: the tensors; changed in place.
      ties: their `_tied_weights_keys`: name of the copy -> name of the original.
    """
    missing_is_tied = hf_model.config.get("tie_word_embeddings") is not False
    tied = all(
        state[copy].equal(state[original]) if copy in state and original in state else missing_is_tied
        for copy, original in ties.items()
        if copy.endswith("weight")
    )
    for copy, original in ties.items():
        if not tied and copy.endswith("bias"):
            output = state.get(copy, state.get(original))
            state |= {copy: output, original: output} if output is not None else {}
    return tied


def _config(hf_model: HuggingFaceModel, model_class: type, state: dict[str, Any], tied: bool) -> Any:
    """Their config, with as many labels as the tensors have."""
    config = model_class.config_class.from_dict(
        dict(hf_model.config) | {"chunk_size_feed_forward": 0}
    )  # saves memory alone
    config._attn_implementation = "eager"
    config.tie_word_embeddings = tied
    for name in (
        "classifier.weight",
        "classifier.out_proj.weight",
        "qa_outputs.weight",
        "sop_classifier.classifier.weight",
    ):
        if name in state and config.num_labels != len(state[name]):
            config.num_labels = len(state[name])
    return config


def _without_pooler(hf_model: HuggingFaceModel, state: dict[str, Any], name: str) -> dict[str, bool]:
    """What tells the bare encoders of some families that there is no pooler."""
    has = any(part in state for part in ("pooler.weight", "pooler.dense.weight"))
    return {"add_pooling_layer": has} if _is_bare(name) and family_of(hf_model) in _POOLED else {}


def _is_bare(name: str) -> bool:
    """Whether a class is an encoder without heads."""
    return name.endswith("Model") and not name.endswith("LMHeadModel")


def _arguments(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> dict[str, np.ndarray]:
    arguments = {"input_ids": inputs.input_ids_BS, "attention_mask": inputs.attention_mask_BS}
    if family_of(hf_model) not in ("distilbert", "modernbert"):
        arguments["token_type_ids"] = inputs.token_type_ids_BS
    return arguments


def _logits(hf_model: HuggingFaceModel, heads: Heads, output: Any) -> dict[str, Any]:
    """Their logits, torch tensors, under our names."""
    import torch

    if heads.task is Task.SPAN:
        return {"task": torch.stack([output.start_logits, output.end_logits], -1)}
    if heads.mlm and heads.pair:
        names = _LOGITS[family_of(hf_model)]
        return {"mlm": output[names[0]], "pair": output[names[1]]}
    name = "task" if heads.task else "mlm" if heads.mlm else "pair" if heads.pair else None
    return {name: output["logits"]} if name else {}
