"""Checks and normalizes a config.json of transformers: nulls removed, defaults filled in, types and ranges checked."""

from typing import Any

from bert_jax.errors import UserError, require, short_repr

WHOLE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size"),
    *("max_position_embeddings", "embedding_size", "num_hidden_groups", "inner_group_num", "local_attention"),
    *("global_attn_every_n_layers", "dim", "n_layers", "n_heads", "hidden_dim", "pad_token_id"),
)
NUMBERS = {
    **dict.fromkeys(("layer_norm_eps", "norm_eps"), (0, 1)),
    "initializer_range": (0, 100),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), (0, 1)),
    **dict.fromkeys(("attention_dropout", "mlp_dropout", "embedding_dropout"), (0, 1)),
    **dict.fromkeys(("global_rope_theta", "local_rope_theta"), (1, 1e12)),
}
"""By field: the smallest and the largest value."""
TEXTS = (
    *("model_type", "hidden_act", "activation", "hidden_activation", "classifier_activation", "classifier_pooling"),
    "position_embedding_type",
)
FLAGS = (
    *("is_decoder", "tie_word_embeddings", "norm_bias", "attention_bias", "mlp_bias", "classifier_bias"),
    *("decoder_bias", "sinusoidal_pos_embds"),
)
DEFAULTS = {
    "bert": {"hidden_act": "gelu"},
    "roberta": {"hidden_act": "gelu"},
    "xlm-roberta": {"hidden_act": "gelu"},
    "camembert": {"hidden_act": "gelu"},
    "albert": {"hidden_act": "gelu_new"},
    "electra": {"hidden_act": "gelu"},
    "distilbert": {"activation": "gelu"},
    "modernbert": {"hidden_activation": "gelu"},
}
"""By model_type: defaults of transformers' configuration_*.py for fields that the readers require."""


def normalize_hf_config(config: Any, source: str) -> dict[str, Any]:
    """Check the known fields of a config and fill in defaults; unknown fields stay as they are.

    Raises:
      UserError: a value has a wrong type or is out of range.
    """
    require(isinstance(config, dict), f"{source}: config.json must be a JSON object")
    family = config.get("model_type")
    # A padding id of null means no padding token in ModernBERT, and the default in the other families.
    kept = {name: v for name, v in config.items() if v is not None or (family == "modernbert" and "_token_id" in name)}
    for names, kinds, what in (
        (WHOLE, (int,), "a whole number"),
        (NUMBERS, (int, float), "a number"),
        (TEXTS, (str,), "a string"),
        (FLAGS, (bool,), "true or false"),
    ):
        for name in names:
            value = kept.get(name)
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if value is not None and not fits:
                raise UserError(f"{source}: {name} is {short_repr(value)} in config.json: it must be {what}")
    for name, (least, most) in NUMBERS.items():
        _check_range(kept, name, least, most, source)
    _check_range(kept, "local_attention", 0, 10**9, source)
    _check_token_ids(kept, source)
    _check_containers(kept, source)
    defaults = DEFAULTS.get(family, {}) if isinstance(family, str) else {}
    return kept | {name: value for name, value in defaults.items() if name not in kept}


def _check_range(config: dict[str, Any], name: str, least: float, most: float, source: str) -> None:
    value = config.get(name, least)
    # Also refuses NaN: every comparison with it is false.
    fits = least <= value <= most
    require(fits, f"{source}: {name} is {short_repr(value)} in config.json: it must be from {least} to {most:g}")


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
