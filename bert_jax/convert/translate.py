"""Between a `Form` and what we train: config, heads and parameters."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from bert_jax import __version__
from bert_jax.config import ModelConfig
from bert_jax.convert.families.albert import ALBERT
from bert_jax.convert.families.bert import BERT
from bert_jax.convert.families.distilbert import DISTILBERT
from bert_jax.convert.families.electra import ELECTRA
from bert_jax.convert.families.family import Family, Names, Settings
from bert_jax.convert.families.modernbert import MODERNBERT
from bert_jax.convert.families.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA
from bert_jax.convert.forward import ALIKE, DECODERS
from bert_jax.convert.hf_model import Form
from bert_jax.convert.name_map import Params, check_names, from_tensors, to_tensors
from bert_jax.convert.tensors import LazyTensors, stored
from bert_jax.errors import UserError
from bert_jax.model import bert
from bert_jax.model.heads import Heads
from bert_jax.training.param_paths import name_leaves

FAMILIES = {
    family.model_type: family
    for family in (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ALBERT, DISTILBERT, ELECTRA, MODERNBERT)
}
OF_COMPUTING = ("attention", "compute_dtype", "remat", "scan_unroll")
"""Fields of a model's config that its numbers do not depend on."""


class Translated(NamedTuple):
    """A model of theirs as ours."""

    family: str
    config: ModelConfig
    heads: Heads
    params: Params
    """Numpy arrays, float32."""


def from_form(form: Form) -> Translated:
    """Our config, heads and parameters.

    Raises:
      UserError: an architecture that we do not have, a setting that contradicts the tensors, or a tensor that is
        missing, unexpected, or of another shape.
    """
    settings = Settings(form.config, form.source)
    family = _family(settings)
    form = dataclasses.replace(form, tensors=_with_base(form.tensors, family))
    config = family.read_config(settings)
    heads = _read_heads(family, settings, form.tensors, config)
    _refuse_untied(family, heads, form)
    entries = list(family.entries(config, heads))
    check_names(entries, form, family.copies, family.buffers)
    params = from_tensors(entries, form, bert.shapes(config, heads), family.unread)
    return Translated(family.model_type, config, heads, params)


def _read_heads(family: Family, settings: Settings, tensors: Mapping[str, np.ndarray], config: ModelConfig) -> Heads:
    """The heads of a form; an MLM head with the activation of the layers has none of its own."""
    heads = family.read_heads(settings, Names(tensors, settings))
    same = not heads.mlm or heads.mlm_activation == config.activation
    return dataclasses.replace(heads, mlm_activation=None) if same else heads


def _refuse_untied(family: Family, heads: Heads, form: Form) -> None:
    """Raise UserError for an MLM head with a decoder of its own; one that is there as a copy is tied all the same."""
    decoder = next(name for name in family.copies if name.endswith("weight"))
    if heads.mlm and decoder not in form.tensors and form.config.get("tie_word_embeddings") is False:
        raise UserError(
            f"{form.source}: tie_word_embeddings is false, and '{decoder}' is missing: only decoders that are tied to "
            "the word embeddings can be read"
        )


def moments_from(model: Translated, form: Form, moments: Mapping[str, np.ndarray]) -> Params:
    """First or second moments of an optimizer, given under their names, as a tree like our parameters.

    Args:
      model: what `from_form` made of the form.
      form: theirs.
      moments: by the names of the tensors they belong to; those of a pooler that nothing trained may be missing.
    """
    family = FAMILIES[model.family]
    entries = list(family.entries(model.config, model.heads))
    absent = {entry.theirs for entry in entries} - set(moments)
    zeros = {name: np.zeros_like(form.tensors[name]) for name in absent if ".pooler." in name}
    unread = dict.fromkeys(family.unread, 0.0)
    moments = Form(form.config, dict(moments) | zeros, f"{form.source}, moments")
    return from_tensors(entries, moments, bert.shapes(model.config, model.heads), unread)


def moments_to(model: Translated, tree: Params) -> dict[str, np.ndarray]:
    """The inverse: moments under the names of the tensors they belong to."""
    return to_tensors(FAMILIES[model.family].entries(model.config, model.heads), tree)


def to_form(model: Translated, source: str) -> Form:
    """A model of ours as theirs.

    Raises:
      UserError: the model has a setting or a head that the family does not have.
    """
    family, heads = FAMILIES[model.family], model.heads
    described = {
        "architectures": [family.architecture(model.config, heads)],
        "model_type": family.model_type,
        **family.write_config(model.config, heads),
        "bert_jax_version": __version__,
    }
    entries = list(family.entries(model.config, heads))
    _refuse_others(model, family, described, {entry.ours for entry in entries})
    form = Form(described, to_tensors(entries, model.params), source)
    _refuse_other_activation(model, family, form)
    return form


def without_base(form: Form) -> Form:
    """A model without heads as transformers saves it: the encoder's names have no prefix then."""
    base = f"{FAMILIES[form.config['model_type']].base}."
    if not all(name.startswith(base) for name in form.tensors):
        return form
    return dataclasses.replace(form, tensors={name.removeprefix(base): form.tensors[name] for name in form.tensors})


def _refuse_others(model: Translated, family: Family, described: dict[str, Any], written: set[str]) -> None:
    """See that what is written, read again, is this very model."""
    again = family.read_config(Settings(described, "what was written"))
    name = other_field(model.config, again)
    if name is not None:
        was, now = getattr(model.config, name), getattr(again, name)
        raise UserError(f"model.{name} {was} cannot be written as {family.model_type}, which has {now}")
    unknown = sorted(name_leaves(model.params).keys() - written - family.unread.keys())
    if unknown:
        raise UserError(f"{unknown[0]} cannot be written as {family.model_type}, which has no such part")


def _refuse_other_activation(model: Translated, family: Family, form: Form) -> None:
    """See that the MLM head, read again, has this activation: in some families it is not a setting."""
    again = _read_heads(family, Settings(form.config, "what was written"), form.tensors, model.config)
    was, now = (heads.mlm_activation or model.config.activation for heads in (model.heads, again))
    if was != now:
        raise UserError(f"an MLM head with {was} cannot be written as {family.model_type}, whose head has {now}")


def other_field(one: ModelConfig, two: ModelConfig, ignored: Collection[str] = OF_COMPUTING) -> str | None:
    """The first field in which two models differ; None if in none. A field that means nothing in either is no field."""
    for field in dataclasses.fields(ModelConfig):
        was, now = (_meaning(config, field.name) for config in (one, two))
        if was != now and field.name not in ignored:
            return field.name
    return None


def _meaning(config: ModelConfig, name: str) -> Any:
    """A field's value; None where nothing hangs on it."""
    if name == "head_size":
        return config.size_per_head
    if name == "global_every" and config.attention_window is None:
        return None
    if name == "local_rotary_base" and (config.attention_window is None or config.positions != "rotary"):
        return None
    if name == "rotary_base" and config.positions != "rotary":
        return None
    return getattr(config, name)


def family_of(config: ModelConfig, heads: Heads) -> str:
    """The family that a model trained here belongs to, by what is particular to each."""
    if config.positions == "rotary":
        return "modernbert"
    if config.parameter_groups is not None:
        return "albert"
    if config.embedding_size is not None or (heads.task is not None and heads.task.kind == "replaced"):
        return "electra"
    if config.position_offset:
        return "roberta"
    return "bert" if config.type_vocab_size else "distilbert"


def _family(settings: Settings) -> Family:
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"{settings.source}: model_type '{name}' is not supported: use one of {', '.join(FAMILIES)}")
    if settings.architecture.endswith("ForMultipleChoice"):
        raise UserError(f"{settings.source}: architecture '{settings.architecture}' is not supported")
    if ALIKE.get(name, name) not in DECODERS:
        settings.refuse("is_decoder", False, f"no {name} can look back alone")
    return FAMILIES[name]


def _with_base(tensors: Mapping[str, np.ndarray], family: Family) -> LazyTensors:
    """The same under the names that they have in a model with heads."""
    bare = not any(name.startswith(f"{family.base}.") for name in tensors)
    prefix = f"{family.base}." if bare else ""
    return LazyTensors({prefix + name: tensor for name, tensor in stored(tensors).items()})
