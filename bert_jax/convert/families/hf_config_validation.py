"""Checks and normalizes a config.json of transformers: nulls removed, defaults filled in, types and ranges checked."""

from typing import Annotated, Any, TypedDict

from bert_jax import field_validation
from bert_jax.convert.families import FAMILIES
from bert_jax.errors import require
from bert_jax.field_validation import Interval, Share

_KINDS = (
    (int, "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size type_vocab_size"),
    (int, "max_position_embeddings embedding_size num_hidden_groups inner_group_num dim n_layers n_heads"),
    (int, "hidden_dim global_attn_every_n_layers intra_bottleneck_size num_feedforward_networks"),
    (int | None, "pad_token_id bos_token_id cls_token_id sep_token_id mask_token_id decoder_start_token_id"),
    (list[int] | int | None, "eos_token_id"),
    (Annotated[int, Interval("[0, 1e9]")], "local_attention"),
    (Share, "layer_norm_eps norm_eps hidden_dropout_prob attention_probs_dropout_prob dropout"),
    (Share, "attention_dropout mlp_dropout embedding_dropout"),
    (Annotated[float, Interval("[0, 100]")], "initializer_range"),
    (Annotated[float, Interval("[1, 1e12]")], "global_rope_theta local_rope_theta"),
    (str, "model_type hidden_act activation hidden_activation position_embedding_type"),
    (str, "classifier_pooling normalization_type"),
    (bool, "is_decoder tie_word_embeddings sinusoidal_pos_embds"),
    (bool, "norm_bias attention_bias mlp_bias classifier_bias decoder_bias"),
    (bool, "trigram_input use_bottleneck use_bottleneck_attention key_query_shared_bottleneck"),
    (list[str], "architectures layer_types"),
    (dict, "id2label"),
)
HfConfig = TypedDict("HfConfig", {name: kind for kind, names in _KINDS for name in names.split()}, total=False)
"""The checked fields of all families."""


class _Rotary(TypedDict, total=False):
    rope_theta: Annotated[float, Interval("[1, 1e12]")] | None


class _ModernBert(TypedDict, total=False):
    rope_parameters: dict[str, _Rotary | None]
    classifier_activation: str


class _MobileBert(TypedDict, total=False):
    classifier_activation: bool


_OF_FAMILY = {"modernbert": _ModernBert, "mobilebert": _MobileBert}
"""By model_type: fields that have another type or no meaning in other families."""


def validate_hf_config(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Check the known fields of a config and fill in defaults; unknown fields stay as they are.

    Raises:
      UserError: a value has a wrong type or is out of range.
    """
    model_type = config.get("model_type")
    # A padding id of null means no padding token in ModernBERT, and the default in the other families.
    modern = model_type == "modernbert"
    kept = {name: v for name, v in config.items() if v is not None or (modern and "_token_id" in name)}
    field_validation.from_json(HfConfig, kept, f"{source}, config")
    if model_type in _OF_FAMILY:
        field_validation.from_json(_OF_FAMILY[model_type], kept, f"{source}, config")
    pad, size = kept.get("pad_token_id"), kept.get("vocab_size")
    # transformers counts negative ids from the end.
    fits = pad is None or size is None or -size <= pad < size
    require(fits, f"{source}: pad_token_id is {pad}: the vocabulary has {size} tokens")
    numbered = all(str(key).isdecimal() for key in kept.get("id2label", ()))
    require(numbered, f"{source}: id2label must map each number to a label")
    family = FAMILIES.get(model_type)
    defaults = family.defaults if family else {}
    return kept | {name: value for name, value in defaults.items() if name not in kept}
