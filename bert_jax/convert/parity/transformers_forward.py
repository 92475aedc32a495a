"""Reference forward pass in transformers, for the parity report where transformers and PyTorch are installed.

Both libraries are imported only for a forward pass, and nothing is downloaded.
"""

import importlib.metadata
import importlib.util
from typing import Any

import numpy as np

from bert_jax.convert.forward_types import (
    CAUSAL_CLASSES,
    ENCODER_PREFIXES,
    ForwardInputs,
    ForwardOutputs,
    HeadsPresent,
    TaskKind,
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
"""By model_type: prefix of transformers' class names."""
_POOLED = ("bert", "roberta", "albert")
_LOGITS = {"bert": ("prediction_logits", "seq_relationship_logits"), "albert": ("prediction_logits", "sop_logits")}
"""For classes with two heads: the names of MLM and pair logits."""

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
                f"{hf_model.source}: no class of transformers has both pretraining heads and {task.value[3:]}: leave "
                "one out with --drop PATTERN"
            )
        return prefix + task.value
    if pair and not mlm:
        if family != "bert":
            raise UserError(f"{hf_model.source}: no class of transformers has a pair head of {family} alone")
        return "BertForNextSentencePrediction"
    if mlm and not pair and is_causal(hf_model):
        return prefix + CAUSAL_CLASSES[family]
    return prefix + ("ForPreTraining" if pair else "ForMaskedLM" if mlm else "Model")


def run(hf_model: HuggingFaceModel, inputs: ForwardInputs) -> ForwardOutputs:
    """All hidden states and the logits of every head that the model has, in float32 on the CPU, eager attention.

    Values at padded positions have no meaning.

    Raises:
      UserError: no class has these heads, or a tensor is missing or has another shape than the class expects.
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
    """A model of transformers with the given tensors, and the names of tensors that it does not have.

    Raises:
      UserError: no class has these heads, or a tensor is missing or has another shape than the class expects.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    name = class_name(hf_model)
    model_class = getattr(transformers, name)
    wanted = "" if _is_bare(name) else ENCODER_PREFIXES[family_of(hf_model)]
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
    """The tensors in float32, the encoder's with the prefix that the class expects."""
    import torch

    prefix, state = prefix_of(hf_model), {}
    for name in hf_model.tensors:
        inside = name.removeprefix(prefix) if name.startswith(prefix) else None
        target = wanted + inside if prefix and inside is not None else name
        state[target] = torch.tensor(np.asarray(hf_model.tensors[name], np.float32))
    return state


def _tie(hf_model: HuggingFaceModel, state: dict[str, Any], ties: dict[str, str]) -> bool:
    """Whether the decoder equals the word embeddings; if not, a bias is stored under both of its names.

    A stored decoder decides, whatever the config says; without one, the config's tie_word_embeddings does.

    Args:
      hf_model: the source.
      state: the tensors; changed in place.
      ties: `_tied_weights_keys` of the class: name of the copy -> name of the original.
    """
    missing_is_tied = hf_model.config.get("tie_word_embeddings") is not False
    tied = all(
        state[copy].equal(state[original]) if copy in state and original in state else missing_is_tied
        for copy, original in ties.items()
        if copy.endswith("weight")
    )
    for copy, original in ties.items():
        if not tied and copy.endswith("bias"):
            bias = state.get(copy, state.get(original))
            state |= {copy: bias, original: bias} if bias is not None else {}
    return tied


def _config(hf_model: HuggingFaceModel, model_class: type, state: dict[str, Any], tied: bool) -> Any:
    """The config of transformers, with the number of labels that the tensors have."""
    config = model_class.config_class.from_dict(
        dict(hf_model.config) | {"chunk_size_feed_forward": 0}
    )  # only affects memory
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
    """The constructor argument that some encoder classes need if the model has no pooler."""
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


def _logits(hf_model: HuggingFaceModel, heads: HeadsPresent, output: Any) -> dict[str, Any]:
    """Logits as torch tensors, by the names of `ForwardOutputs`."""
    import torch

    if heads.task is TaskKind.SPAN:
        return {"task": torch.stack([output.start_logits, output.end_logits], -1)}
    if heads.mlm and heads.pair:
        names = _LOGITS[family_of(hf_model)]
        return {"mlm": output[names[0]], "pair": output[names[1]]}
    name = "task" if heads.task else "mlm" if heads.mlm else "pair" if heads.pair else None
    return {name: output["logits"]} if name else {}
