"""Maps the tensor names of Google's TensorFlow 1 BERT and ALBERT to those of transformers, and back.

Sources: google-research/bert, modeling.py (0017e7e) and run_squad.py (1cd50d7); google-research/albert, modeling.py
(507021d), run_pretraining.py (4ae12a2), classifier_utils.py (1dcca98) and lamb_optimizer.py (6ca4dfd), whose heads and
slots are named as BERT's are; transformers 5.23, modeling_bert.py and modeling_albert.py.
"""

import difflib
import re

from bert_jax.errors import UserError

# The tensors of a scope: (suffix in TensorFlow, suffix in transformers, whether one is the transpose of the other).
# tf.layers.dense keeps kernels as [inputs, outputs], torch.nn.Linear as [outputs, inputs]; heads that Google made with
# tf.get_variable are [outputs, inputs] on both sides.
_TENSOR = (("", "", False),)
_DENSE = (("/kernel", ".weight", True), ("/bias", ".bias", False))
_NORM = (("/gamma", ".weight", False), ("/beta", ".bias", False))
_HEAD = (("/output_weights", ".weight", False), ("/output_bias", ".bias", False))

_PARTS = ("query", "key", "value")
_LAYER, _HF_LAYER = "bert/encoder/layer_{n}/", "bert.encoder.layer.{n}."
_GROUP = "bert/encoder/transformer/group_{n}/inner_group_0/"
_HF_GROUP = "albert.encoder.albert_layer_groups.{n}.albert_layers.0."
# Heads of run_classifier.py and run_squad.py, with the same names in both families.
_TASKS = (
    ("", "classifier", (("output_weights", ".weight", False), ("output_bias", ".bias", False))),
    ("cls/squad", "qa_outputs", _HEAD),
)
_SCOPES = {
    "bert": (
        ("bert/embeddings/word_embeddings", "bert.embeddings.word_embeddings.weight", _TENSOR),
        ("bert/embeddings/position_embeddings", "bert.embeddings.position_embeddings.weight", _TENSOR),
        ("bert/embeddings/token_type_embeddings", "bert.embeddings.token_type_embeddings.weight", _TENSOR),
        ("bert/embeddings/LayerNorm", "bert.embeddings.LayerNorm", _NORM),
        *((f"{_LAYER}attention/self/{part}", f"{_HF_LAYER}attention.self.{part}", _DENSE) for part in _PARTS),
        (f"{_LAYER}attention/output/dense", f"{_HF_LAYER}attention.output.dense", _DENSE),
        (f"{_LAYER}attention/output/LayerNorm", f"{_HF_LAYER}attention.output.LayerNorm", _NORM),
        (f"{_LAYER}intermediate/dense", f"{_HF_LAYER}intermediate.dense", _DENSE),
        (f"{_LAYER}output/dense", f"{_HF_LAYER}output.dense", _DENSE),
        (f"{_LAYER}output/LayerNorm", f"{_HF_LAYER}output.LayerNorm", _NORM),
        ("bert/pooler/dense", "bert.pooler.dense", _DENSE),
        ("cls/predictions/transform/dense", "cls.predictions.transform.dense", _DENSE),
        ("cls/predictions/transform/LayerNorm", "cls.predictions.transform.LayerNorm", _NORM),
        ("cls/predictions/output_bias", "cls.predictions.bias", _TENSOR),
        ("cls/seq_relationship", "cls.seq_relationship", _HEAD),
        *_TASKS,
    ),
    "albert": (
        ("bert/embeddings/word_embeddings", "albert.embeddings.word_embeddings.weight", _TENSOR),
        ("bert/embeddings/position_embeddings", "albert.embeddings.position_embeddings.weight", _TENSOR),
        ("bert/embeddings/token_type_embeddings", "albert.embeddings.token_type_embeddings.weight", _TENSOR),
        ("bert/embeddings/LayerNorm", "albert.embeddings.LayerNorm", _NORM),
        ("bert/encoder/embedding_hidden_mapping_in", "albert.encoder.embedding_hidden_mapping_in", _DENSE),
        *((f"{_GROUP}attention_1/self/{part}", f"{_HF_GROUP}attention.{part}", _DENSE) for part in _PARTS),
        (f"{_GROUP}attention_1/output/dense", f"{_HF_GROUP}attention.dense", _DENSE),
        (f"{_GROUP}LayerNorm", f"{_HF_GROUP}attention.LayerNorm", _NORM),
        (f"{_GROUP}ffn_1/intermediate/dense", f"{_HF_GROUP}ffn", _DENSE),
        (f"{_GROUP}ffn_1/intermediate/output/dense", f"{_HF_GROUP}ffn_output", _DENSE),
        (f"{_GROUP}LayerNorm_1", f"{_HF_GROUP}full_layer_layer_norm", _NORM),
        ("bert/pooler/dense", "albert.pooler", _DENSE),
        ("cls/predictions/transform/dense", "predictions.dense", _DENSE),
        ("cls/predictions/transform/LayerNorm", "predictions.LayerNorm", _NORM),
        ("cls/predictions/output_bias", "predictions.bias", _TENSOR),
        ("cls/seq_relationship", "sop_classifier.classifier", _HEAD),
        *_TASKS,
    ),
}
FAMILIES = tuple(_SCOPES)
MODULE = "module/"
"""Prefix of every name in a checkpoint that was trained from TensorFlow Hub's module; it is ignored."""
GLOBAL_STEP = "global_step"
SLOTS = ("/adam_m", "/adam_v")
"""First and second moment, of AdamWeightDecayOptimizer and LAMBOptimizer alike."""
OTHER_SLOTS = ("/AdamWeightDecayOptimizer", "/AdamWeightDecayOptimizer_1", "/Adam", "/Adam_1", "/Momentum")
"""Slots of other optimizers, by the naming of tf.train.Optimizer; transformers' old converter skipped the first two."""
OTHER_STATE = ("beta1_power", "beta2_power")


_RULES = {
    family: [
        (scope + tensorflow_suffix, module + hf_suffix, transposed)
        for scope, module, tensors in scopes
        for tensorflow_suffix, hf_suffix, transposed in tensors
    ]
    for family, scopes in _SCOPES.items()
}
"""By family: name in TensorFlow, name in transformers, whether one is the transpose of the other; {n} is a number."""


def huggingface_name(name: str, family: str, source: str) -> tuple[str, bool]:
    """The name in transformers of a tensor in a TensorFlow checkpoint, and whether the tensor is transposed there.

    Args:
      name: for example `bert/encoder/layer_0/output/dense/kernel`.
      family: `bert` or `albert`.
      source: the checkpoint, for messages.

    Raises:
      UserError: the name is unknown.
    """
    return _translate(name.removeprefix(MODULE), _RULES[family], family, source)


def tensorflow_name(name: str, family: str, source: str) -> tuple[str, bool]:
    """The inverse: for `bert.encoder.layer.0.output.dense.weight`, the name in a TensorFlow checkpoint."""
    flipped = [(hf, tensorflow, transposed) for tensorflow, hf, transposed in _RULES[family]]
    return _translate(name, flipped, family, source)


def _translate(name: str, rules: list[tuple[str, str, bool]], family: str, source: str) -> tuple[str, bool]:
    for known, other, transposed in rules:
        if match := re.fullmatch(re.escape(known).replace(r"\{n\}", r"(\d+)"), name):
            return other.replace("{n}", match[1] if match.groups() else ""), transposed
    nearest = difflib.get_close_matches(name, [known for known, _, _ in rules], n=1, cutoff=0)[0]
    raise UserError(
        f"{source}: tensor '{name}' is not part of Google's {family}; the nearest known name is '{nearest}'"
    )


def slot_of(name: str) -> str | None:
    """The suffix of the optimizer's state for a parameter, "" for a parameter, None for other state."""
    if name in (GLOBAL_STEP, *OTHER_STATE):
        return None
    return next((slot for slot in SLOTS + OTHER_SLOTS if name.endswith(slot)), "")
