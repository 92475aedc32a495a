"""Checks and normalizes a config.json of transformers: nulls removed, defaults filled in, types and ranges checked."""

from typing import Any, NamedTuple

from bert_jax.convert.families import FAMILIES
from bert_jax.errors import require, short_repr


class _Kind(NamedTuple):
    types: tuple[type, ...]
    description: str
    least: float | None = None
    most: float | None = None


_WHOLE, _TEXT, _FLAG = _Kind((int,), "a whole number"), _Kind((str,), "a string"), _Kind((bool,), "true or false")


def _number(least: float, most: float) -> _Kind:
    return _Kind((int, float), "a number", least, most)


FIELDS = {
    name: kind
    for kind, names in (
        (_WHOLE, "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size type_vocab_size"),
        (_WHOLE, "max_position_embeddings embedding_size num_hidden_groups inner_group_num dim n_layers n_heads"),
        (_WHOLE, "hidden_dim global_attn_every_n_layers pad_token_id"),
        (_WHOLE._replace(least=0, most=10**9), "local_attention"),
        (_number(0, 1), "layer_norm_eps norm_eps hidden_dropout_prob attention_probs_dropout_prob dropout"),
        (_number(0, 1), "attention_dropout mlp_dropout embedding_dropout"),
        (_number(0, 100), "initializer_range"),
        (_number(1, 1e12), "global_rope_theta local_rope_theta"),
        (_TEXT, "model_type hidden_act activation hidden_activation position_embedding_type"),
        (_TEXT, "classifier_activation classifier_pooling"),
        (_FLAG, "is_decoder tie_word_embeddings sinusoidal_pos_embds"),
        (_FLAG, "norm_bias attention_bias mlp_bias classifier_bias decoder_bias"),
    )
    for name in names.split()
}
"""The checked fields of all families."""


def normalize_hf_config(config: Any, source: str) -> dict[str, Any]:
    """Check the known fields of a config and fill in defaults; unknown fields stay as they are.

    Raises:
      UserError: a value has a wrong type or is out of range.
    """
    require(isinstance(config, dict), f"{source}: config.json must be a JSON object")
    model_type = config.get("model_type")
    # A padding id of null means no padding token in ModernBERT, and the default in the other families.
    modern = model_type == "modernbert"
    kept = {name: v for name, v in config.items() if v is not None or (modern and "_token_id" in name)}
    for name, kind in FIELDS.items():
        if kept.get(name) is None:
            continue
        value, is_bool = kept[name], isinstance(kept[name], bool)
        fits = isinstance(value, kind.types) and (kind is _FLAG or not is_bool)
        require(fits, f"{source}: {name} is {short_repr(value)} in config.json: it must be {kind.description}")
        if kind.least is not None:
            fits = kind.least <= value <= kind.most  # False for NaN
            bounds = f"from {kind.least} to {kind.most:g}"
            require(fits, f"{source}: {name} is {short_repr(value)} in config.json: it must be {bounds}")
    _check_token_ids(kept, source)
    _check_containers(kept, source)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    defaults = family.defaults if family else {}
    return kept | {name: value for name, value in defaults.items() if name not in kept}


def _check_token_ids(config: dict[str, Any], source: str) -> None:
    """Check the ids of special tokens; transformers allows negative padding ids, which count from the end."""
    for name, value in config.items():
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if name.endswith("_token_id") and value is not None:
            require(whole, f"{source}: {name} is {short_repr(value)} in config.json: it must be a whole number")
    pad, size = config.get("pad_token_id"), config.get("vocab_size")
    require(
        pad is None or size is None or -size <= pad < size,
        f"{source}: pad_token_id is {pad} in config.json: the vocabulary has {size} tokens",
    )


def _check_containers(config: dict[str, Any], source: str) -> None:
    """Check the values that are lists or objects."""
    labels = config.get("id2label", {})
    fits = isinstance(labels, dict) and all(str(key).isdecimal() for key in labels)
    require(fits, f"{source}: id2label is {short_repr(labels)} in config.json: it must map each number to a label")
    for name in ("architectures", "layer_types"):
        words = config.get(name, [])
        fits = isinstance(words, list) and all(isinstance(word, str) for word in words)
        require(fits, f"{source}: {name} is {short_repr(words)} in config.json: it must be a list of strings")
    depth, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    require(
        kinds is None or len(kinds) == depth,
        f"{source}: layer_types has {len(kinds or ())} entries in config.json, num_hidden_layers is {depth}",
    )
    rope = config.get("rope_parameters", {})
    fits = isinstance(rope, dict) and all(part is None or isinstance(part, dict) for part in rope.values())
    require(
        fits or config.get("model_type") != "modernbert",
        f"{source}: rope_parameters is {short_repr(rope)} in config.json",
    )
    for part in rope.values() if config.get("model_type") == "modernbert" else ():
        theta = (part or {}).get("rope_theta")
        fits = theta is None or (isinstance(theta, int | float) and 1 <= theta <= 1e12)
        require(fits, f"{source}: rope_theta is {short_repr(theta)} in config.json: it must be from 1 to 1e+12")
