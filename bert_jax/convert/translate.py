"""Converts a `HuggingFaceModel` to and from a `NativeModel`: config, heads and parameters of bert_jax."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.convert.families import FAMILIES
from bert_jax.convert.families.family import Family, HuggingFaceConfig
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.name_map import Params, from_hf_tensors, refuse_unknown_tensors, to_hf_tensors
from bert_jax.convert.tensors import LazyStateDict, LazyTensor, to_lazy_tensors
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves

COMPUTE_FIELDS = ("attention", "compute_dtype", "dense_dtype", "remat", "scan_unroll")
"""Fields of `ModelConfig` that change how outputs are computed, and not their values."""
TRAINING_FIELDS = ("initializer_range", "hidden_dropout", "attention_dropout")
"""Fields of `ModelConfig` that only training reads."""


class NativeModel(NamedTuple):
    """A model of bert_jax, and the family of transformers that it belongs to."""

    family: str
    config: ModelConfig
    heads: Heads
    params: Params
    """Numpy arrays, float32."""


def from_huggingface(hf_model: HuggingFaceModel) -> NativeModel:
    """Convert a model of transformers.

    Raises:
      UserError: an unsupported architecture, a setting that contradicts the tensors, or a tensor that is missing,
        unexpected, or of another shape.
    """
    settings = HuggingFaceConfig(hf_model.config, hf_model.source)
    family = find_family(settings)
    hf_model = with_base_prefix(hf_model)
    config = family.read_config(settings)
    heads = _read_heads(family, settings, hf_model.tensors, config)
    _check_tied_decoder(family, heads, hf_model)
    shapes = bert.shapes(config, heads)
    entries = list(family.entries(shapes, heads))
    refuse_unknown_tensors(
        entries, hf_model, family.copies, [rf"{family.base}\.{pattern}" for pattern in family.buffers]
    )
    params = from_hf_tensors(entries, hf_model, shapes, family.unused_params)
    return NativeModel(family.model_type, config, heads, params)


def _read_heads(family: Family, settings: HuggingFaceConfig, tensors: Mapping, config: ModelConfig) -> Heads:
    """The heads of a model; mlm_activation is None where the MLM head has the activation of the layers."""
    heads = family.read_heads(settings, to_lazy_tensors(tensors))
    same = not heads.mlm or heads.mlm_activation == config.activation
    return dataclasses.replace(heads, mlm_activation=None) if same else heads


def _check_tied_decoder(family: Family, heads: Heads, hf_model: HuggingFaceModel) -> None:
    """Raise UserError for an untied decoder of the MLM head; a stored copy of the embeddings counts as tied."""
    decoder = f"{family.decoder}.weight"
    if heads.mlm and decoder not in hf_model.tensors and hf_model.config.get("tie_word_embeddings") is False:
        raise UserError(
            f"{hf_model.source}: tie_word_embeddings is false, and '{decoder}' is missing: only decoders that are tied "
            "to the word embeddings can be read"
        )


def moments_from_huggingface(model: NativeModel, hf_model: HuggingFaceModel, moments: Mapping) -> Params:
    """First or second moments of an optimizer, by tensor name of transformers, as a tree like the parameters.

    Args:
      model: the result of `from_huggingface(hf_model)`.
      hf_model: the source.
      moments: by the name of their tensor; those of a pooler that was not trained may be missing.
    """
    family, shapes = FAMILIES[model.family], bert.shapes(model.config, model.heads)
    entries = list(family.entries(shapes, model.heads))
    absent = {entry.hf_name for entry in entries} - set(moments)
    zeros = {name: np.zeros_like(hf_model.tensors[name]) for name in absent if ".pooler." in name}
    unused_params = dict.fromkeys(family.unused_params, 0.0)
    hf_moments = HuggingFaceModel(hf_model.config, dict(moments) | zeros, f"{hf_model.source}, moments")
    refuse_unknown_tensors(entries, hf_moments, {}, ())
    return from_hf_tensors(entries, hf_moments, shapes, unused_params)


def moments_to_huggingface(model: NativeModel, tree: Params) -> dict[str, np.ndarray]:
    """The inverse: moments by the name of their tensor in transformers."""
    return to_hf_tensors(FAMILIES[model.family].entries(tree, model.heads), tree)


def to_huggingface_config(model: NativeModel) -> dict[str, Any]:
    """The content of config.json, without settings that the family does not have."""
    family = FAMILIES[model.family]
    return {
        "architectures": [family.architecture(model.config, model.heads)],
        "model_type": family.model_type,
        **family.write_config(model.config, model.heads),
        "bert_jax_version": __version__,
    }


def to_huggingface(model: NativeModel, source: str) -> HuggingFaceModel:
    """Convert a model to the names and layout of transformers.

    Raises:
      UserError: the model has a setting or a head that its family does not have.
    """
    family, heads = FAMILIES[model.family], model.heads
    hf_config = to_huggingface_config(model)
    entries = list(family.entries(model.params, heads))
    _check_round_trip(model, family, hf_config, {entry.param_path for entry in entries})
    hf_model = HuggingFaceModel(hf_config, to_hf_tensors(entries, model.params), source)
    _check_heads(model, family, hf_model)
    return hf_model


def strip_prefix_of_headless_model(hf_model: HuggingFaceModel) -> HuggingFaceModel:
    """A model without heads as transformers saves it, without the family's prefix; others unchanged."""
    base = f"{FAMILIES[hf_model.config['model_type']].base}."
    if not all(name.startswith(base) for name in hf_model.tensors):
        return hf_model
    return dataclasses.replace(
        hf_model, tensors={name.removeprefix(base): hf_model.tensors[name] for name in hf_model.tensors}
    )


def _check_round_trip(model: NativeModel, family: Family, hf_config: dict[str, Any], written: set[str]) -> None:
    """Raise UserError if the written config, read again, is another model, or if a parameter has no tensor."""
    config = model.config
    if config.num_heads * config.size_per_head != config.layer_width:  # e.g. after heads were removed
        width = "hidden_size" if config.bottleneck_size is None else "bottleneck_size"
        raise UserError(
            f"model.head_size {config.size_per_head} cannot be written as {family.model_type}, whose heads have "
            f"{width} / num_heads = {config.layer_width / config.num_heads:g}: use --to bert-jax"
        )
    again = family.read_config(HuggingFaceConfig(hf_config, "what was written"))
    name = first_architecture_difference(model.config, again)
    if name is not None:
        before, after = getattr(model.config, name), getattr(again, name)
        raise UserError(f"model.{name} {before} cannot be written as {family.model_type}, which has {after}")
    unknown = sorted(name_leaves(model.params).keys() - written - family.unused_params.keys())
    if unknown:
        raise UserError(
            f"{unknown[0]} cannot be written as {family.model_type}, which has no such parameter: use --to bert-jax"
        )


def _check_heads(model: NativeModel, family: Family, hf_model: HuggingFaceModel) -> None:
    """Raise UserError if the heads, read again, compute something else: in some families parts of them are fixed."""
    again = _read_heads(family, HuggingFaceConfig(hf_model.config, "what was written"), hf_model.tensors, model.config)
    before, after = (heads.mlm_activation or model.config.activation for heads in (model.heads, again))
    if before != after:
        raise UserError(f"an MLM head with {before} cannot be written as {family.model_type}, whose head has {after}")
    if model.heads.task is not None and again.task is not None and model.heads.task.reads != again.task.reads:
        raise UserError(
            f"a head that reads '{model.heads.task.reads}' cannot be written as {family.model_type}, whose head reads "
            f"'{again.task.reads}': use --to bert-jax"
        )


def first_architecture_difference(
    first: ModelConfig, second: ModelConfig, ignored: Collection[str] = COMPUTE_FIELDS
) -> str | None:
    """The first field in which two models differ, or None. A field that has no effect in either is skipped."""
    for field in dataclasses.fields(ModelConfig):
        before, after = (_effective_value(config, field.name) for config in (first, second))
        if before != after and field.name not in ignored:
            return field.name
    return None


def _effective_value(config: ModelConfig, name: str) -> Any:
    """A field's value; None where it has no effect."""
    if name == "head_size":
        return config.size_per_head
    if name == "global_every" and config.attention_window is None:
        return None
    if name == "local_rotary_base" and (config.attention_window is None or config.positions != "rotary"):
        return None
    if name == "rotary_base" and config.positions != "rotary":
        return None
    if name == "bottleneck_attention" and config.bottleneck_size is None:
        return None
    return getattr(config, name)


def infer_model_type(config: ModelConfig, heads: Heads) -> str:
    """The family of transformers that a model trained by bert_jax belongs to, from its distinctive settings."""
    if config.embeddings == "trigrams" or config.bottleneck_size is not None:
        return "mobilebert"
    if config.positions == "rotary":
        return "modernbert"
    if config.parameter_groups is not None:
        return "albert"
    if config.embedding_size is not None or (heads.task is not None and heads.task.kind == "replaced"):
        return "electra"
    if config.position_offset:
        return "roberta"
    return "bert" if config.type_vocab_size else "distilbert"


def find_family(settings: HuggingFaceConfig) -> Family:
    """The family of a config.json.

    Raises:
      UserError: the architecture is not supported.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{settings.source}: model_type '{name}' is not supported: use one of {', '.join(FAMILIES)}")
    if "causal" not in FAMILIES[name].class_suffixes:
        settings.require_value("is_decoder", False, f"{name} has no causal model")
    return FAMILIES[name]


WRAPPERS = ("module", "model")
"""Prefixes of wrappers: DistributedDataParallel, and classes that hold the model (Lightning)."""
INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that torch.compile, FSDP and activation checkpointing add, also to modules inside of a model."""


def with_base_prefix(hf_model: HuggingFaceModel) -> HuggingFaceModel:
    """The same tensors with the names of a class with heads: those of the encoder begin with the family's prefix.

    Parts of names that wrappers added are removed if the family knows the name without them; unknown names stay.

    Raises:
      UserError: the architecture is not supported, or two tensors have the same name without such parts.
    """
    family = find_family(HuggingFaceConfig(hf_model.config, hf_model.source))
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in to_lazy_tensors(hf_model.tensors).items():
        canonical = _canonical_name(name, family)
        if canonical in tensors:
            raise UserError(
                f"{hf_model.source}: two tensors are '{canonical}', one of them '{name}': save one state dict"
            )
        tensors[canonical] = tensor
    return dataclasses.replace(hf_model, tensors=LazyStateDict(tensors))


def _canonical_name(name: str, family: Family) -> str:
    rest = ".".join(part for part in name.split(".") if part not in INNER_WRAPPERS)
    while True:
        for candidate in (rest, f"{family.base}.{rest}"):
            if family.known_names.fullmatch(candidate):
                return candidate
        wrapper, _, inner = rest.partition(".")
        if wrapper not in WRAPPERS:
            return name
        rest = inner
