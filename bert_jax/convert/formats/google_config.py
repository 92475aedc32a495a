"""Converts configs of Google's BERT and ALBERT (``bert_config.json``, ``albert_config.json``) to and from transformers.

Sources: google-research/bert, modeling.py (0017e7e); google-research/albert, modeling.py (507021d); transformers 5.23,
configuration_bert.py and configuration_albert.py.
"""

from typing import Any

from bert_jax.convert.formats.tensorflow1_names import FAMILIES
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError, require
from bert_jax.storage import StoredPath, read_json_object

EPSILON = 1e-12
"""Of LayerNorm: fixed in tf.contrib.layers.layer_norm, and not in the config files."""
_BERT_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT_DEFAULTS,
    "albert": {
        **_BERT_DEFAULTS,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_hidden_groups": 1,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "inner_group_num": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Defaults of Google's BertConfig and AlbertConfig; vocab_size has none."""

# Google's "gelu" is the exact one (erf) in BERT's first code, and since commit bee6030 (see CyberZHG/keras-bert, issue
# 129) the approximation with tanh, under the same name; in ALBERT it is the approximation. The files do not say
# which one a model was trained with. transformers publishes all of Google's BERTs with "gelu", the exact one, and its
# default for an ALBERT is "gelu_new", the approximation; bert_jax does the same. Files that bert_jax writes have
# GELU_KIND; Google's code keeps unknown keys.
GELU_KIND = "gelu_approximate"
GELUS = {"none": "gelu", "tanh": "gelu_new"}
UNMARKED_GELU = {"bert": "none", "albert": "tanh"}
OTHER_ACTIVATIONS = ("relu", "tanh", "linear")


def read_config(directory: StoredPath) -> dict[str, Any]:
    """Google's config as a config of transformers; unknown keys are kept."""
    files = {family: directory / f"{family}_config.json" for family in FAMILIES}
    present = [family for family, file in files.items() if file.exists()]
    if len(present) != 1:
        state = "both" if present else "none"
        raise UserError(f"{directory} needs one of bert_config.json and albert_config.json, and has {state} of them")
    family, file = present[0], files[present[0]]
    config = DEFAULTS[family] | read_json_object(file, "copy or download it again")
    require("vocab_size" in config, f"{file} has no vocab_size: is it the config of a {family}?")
    config["model_type"] = family
    _check_shape(config, str(file))
    kind, activation = config.pop(GELU_KIND, UNMARKED_GELU[family]), config["hidden_act"]
    if activation == "gelu":
        require(
            isinstance(kind, str) and kind in GELUS, f"{file}: {GELU_KIND} '{kind}' is not one of {', '.join(GELUS)}"
        )
        config["hidden_act"] = GELUS[kind]
    else:
        supported = ", ".join(("gelu", *OTHER_ACTIVATIONS))
        require(activation in OTHER_ACTIVATIONS, f"{file}: hidden_act '{activation}' is not one of {supported}")
    return {"layer_norm_eps": EPSILON, "tie_word_embeddings": True} | config


def _check_shape(config: dict[str, Any], source: str) -> None:
    """Raise UserError for configs from which Google's code and transformers build different models."""
    if config["model_type"] != "albert":
        return
    inner = config.get("inner_group_num", 1)
    require(inner == 1, f"{source}: inner_group_num {inner} is not supported: only 1 is")
    # Google's code then has no projection, but transformers has one.
    same = config["embedding_size"] == config["hidden_size"]
    require(not same, f"{source}: an ALBERT whose embedding_size is its hidden_size is not supported")


def google_config(hf_model: HuggingFaceModel) -> dict[str, Any]:
    """A config of transformers as a config of Google's code.

    Raises:
      UserError: Google's code does not support the model.
    """
    config, source = hf_model.config, hf_model.source
    family = config["model_type"]
    supported = ", ".join(FAMILIES)
    require(family in FAMILIES, f"{source}: a {family} cannot be written for TensorFlow 1: only {supported}")
    fixed = {
        "layer_norm_eps": EPSILON,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    }
    for key, value in fixed.items():
        given = config.get(key, value)
        require(given == value, f"{source}: {key} {given} cannot be written for TensorFlow 1: its code has {value}")
    complete = DEFAULTS[family] | {"hidden_act": GELUS[UNMARKED_GELU[family]]} | config
    _check_shape(complete, source)
    google = {key: complete[key] for key in ("vocab_size", *DEFAULTS[family])}
    activation = google["hidden_act"].replace("gelu_pytorch_tanh", "gelu_new")
    if activation in GELUS.values():
        google["hidden_act"] = "gelu"
        google[GELU_KIND] = next(kind for kind, name in GELUS.items() if name == activation)
    else:
        known = (*GELUS.values(), *OTHER_ACTIVATIONS)
        require(activation in known, f"{source}: hidden_act '{activation}' is not one of {', '.join(known)}")
    return google
