"""Converts configs of Google's BERT and ALBERT (``bert_config.json``, ``albert_config.json``) to and from transformers.

Sources: google-research/bert, modeling.py (0017e7e); google-research/albert, modeling.py (507021d); transformers 5.23,
configuration_bert.py and configuration_albert.py.
"""

from typing import Any

from bert_jax.convert.families import albert
from bert_jax.convert.families.family import SHARED_FIELDS
from bert_jax.convert.formats.tensorflow1_names import FAMILIES
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.errors import UserError, require
from bert_jax.storage.json_files import read_json_object
from bert_jax.storage.paths import StoredPath

EPSILON = 1e-12
"""Of LayerNorm: fixed in tf.contrib.layers.layer_norm, and not in the config files."""
DEFAULTS: dict[str, dict[str, Any]] = {
    family: {field.hf_name: field.default for field in fields if field.hf_name not in ("vocab_size", "layer_norm_eps")}
    for family, fields in (("bert", SHARED_FIELDS), ("albert", albert.FIELDS))
}
DEFAULTS["albert"]["inner_group_num"] = 1
"""The fields of Google's BertConfig and AlbertConfig besides vocab_size; most sizes have no default."""

# Google's "gelu" is the exact one (erf) in BERT's first code, and since commit bee6030 (see CyberZHG/keras-bert, issue
# 129) the approximation with tanh, under the same name; in ALBERT it is the approximation. The files do not say
# which one a model was trained with. transformers publishes all of Google's BERTs with "gelu", the exact one, and its
# default for an ALBERT is "gelu_new", the approximation; bert_jax does the same. Files that bert_jax writes have
# GELU_KIND; Google's code keeps unknown keys.
GELU_KIND = "gelu_approximate"
GELUS = {"none": "gelu", "tanh": "gelu_new"}
LABEL_FIELDS = ("architectures", "id2label", "label2id", "problem_type")
"""Fields of a classifier or tagger that bert_jax adds to Google's config."""
UNMARKED_GELU = {"bert": "none", "albert": "tanh"}


def read_config(directory: StoredPath) -> dict[str, Any]:
    """Google's config as a config of transformers; unknown keys are kept."""
    files = {family: directory / f"{family}_config.json" for family in FAMILIES}
    present = [family for family, file in files.items() if file.exists()]
    if len(present) != 1:
        state = "both" if present else "none"
        raise UserError(f"{directory} needs one of bert_config.json and albert_config.json, and has {state} of them")
    family, file = present[0], files[present[0]]
    given = read_json_object(file, "copy or download it again")
    config = DEFAULTS[family] | given | {"model_type": family}
    _check_projection(config, str(file))
    kind = str(config.pop(GELU_KIND, UNMARKED_GELU[family]))
    if given.get("hidden_act", "gelu") == "gelu":
        config["hidden_act"] = GELUS.get(kind, kind)
    return {"layer_norm_eps": EPSILON, "tie_word_embeddings": True} | config


def _check_projection(config: dict[str, Any], source: str) -> None:
    """Raise UserError for an ALBERT in which Google's code has no projection, but transformers has one."""
    same = config["model_type"] == "albert" and config["embedding_size"] == config["hidden_size"]
    require(not same, f"{source}: an ALBERT whose embedding_size is its hidden_size is not supported")


def google_config(hf_model: HuggingFaceModel) -> dict[str, Any]:
    """The config of a model that `to_huggingface` made, as a config of Google's code.

    Raises:
      UserError: Google's code does not support the model.
    """
    config, source = hf_model.config, hf_model.source
    family = config["model_type"]
    supported = ", ".join(FAMILIES)
    require(family in FAMILIES, f"{source}: a {family} cannot be written for TensorFlow 1: only {supported}")
    for key, value in {"layer_norm_eps": EPSILON, "is_decoder": False}.items():
        given = config.get(key, value)
        require(given == value, f"{source}: {key} {given} cannot be written for TensorFlow 1: its code has {value}")
    _check_projection(config, source)
    google = {key: config[key] for key in ("vocab_size", *DEFAULTS[family])}
    # Google's files do not say what a classifier reads, nor its labels; its code keeps unknown keys.
    google |= {key: config[key] for key in LABEL_FIELDS if "id2label" in config and key in config}
    for kind, name in GELUS.items():
        if config["hidden_act"] == name:
            google |= {"hidden_act": "gelu", GELU_KIND: kind}
    return google
