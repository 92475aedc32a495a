"""What Google's TensorFlow 1 code calls the tensors of a BERT or an ALBERT, and what transformers does.

Sources: google-research/bert, modeling.py (0017e7e) and run_squad.py (1cd50d7); google-research/albert, modeling.py
(507021d), run_pretraining.py (4ae12a2), classifier_utils.py (1dcca98) and lamb_optimizer.py (6ca4dfd), whose heads and
slots are named as BERT's are; transformers 5.23, modeling_bert.py and modeling_albert.py.
"""

import difflib
import re
from typing import NamedTuple

from bert_jax.errors import UserError

# What lies in a scope of theirs: (name in TensorFlow, name in transformers, whether one is the other transposed).
# tf.layers.dense keeps kernels as [inputs, outputs], torch.nn.Linear as [outputs, inputs]; heads that Google made with
# tf.get_variable are [outputs, inputs] on both sides.
_TENSOR = (("", "", False),)
_DENSE = (("/kernel", ".weight", True), ("/bias", ".bias", False))
_NORM = (("/gamma", ".weight", False), ("/beta", ".bias", False))
_HEAD = (("/output_weights", ".weight", False), ("/output_bias", ".bias", False))

_PARTS = ("query", "key", "value")
_LAYER, _THEIR_LAYER = "bert/encoder/layer_{n}/", "bert.encoder.layer.{n}."
_GROUP = "bert/encoder/transformer/group_{n}/inner_group_0/"
_THEIR_GROUP = "albert.encoder.albert_layer_groups.{n}.albert_layers.0."
# Of run_classifier.py and run_squad.py, by the same names in both families.
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
        *((f"{_LAYER}attention/self/{part}", f"{_THEIR_LAYER}attention.self.{part}", _DENSE) for part in _PARTS),
        (f"{_LAYER}attention/output/dense", f"{_THEIR_LAYER}attention.output.dense", _DENSE),
        (f"{_LAYER}attention/output/LayerNorm", f"{_THEIR_LAYER}attention.output.LayerNorm", _NORM),
        (f"{_LAYER}intermediate/dense", f"{_THEIR_LAYER}intermediate.dense", _DENSE),
        (f"{_LAYER}output/dense", f"{_THEIR_LAYER}output.dense", _DENSE),
        (f"{_LAYER}output/LayerNorm", f"{_THEIR_LAYER}output.LayerNorm", _NORM),
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
        *((f"{_GROUP}attention_1/self/{part}", f"{_THEIR_GROUP}attention.{part}", _DENSE) for part in _PARTS),
        (f"{_GROUP}attention_1/output/dense", f"{_THEIR_GROUP}attention.dense", _DENSE),
        (f"{_GROUP}LayerNorm", f"{_THEIR_GROUP}attention.LayerNorm", _NORM),
        (f"{_GROUP}ffn_1/intermediate/dense", f"{_THEIR_GROUP}ffn", _DENSE),
        (f"{_GROUP}ffn_1/intermediate/output/dense", f"{_THEIR_GROUP}ffn_output", _DENSE),
        (f"{_GROUP}LayerNorm_1", f"{_THEIR_GROUP}full_layer_layer_norm", _NORM),
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
"""Before every name in a checkpoint that was trained from TensorFlow Hub's module; it says nothing."""
BEAM_HEAD = ("start_logits/", "end_logits/", "answer_class/")
"""Scopes of run_squad_v2.py of ALBERT, whose head picks ends for each of the likeliest starts."""

GLOBAL_STEP = "global_step"
SLOTS = ("/adam_m", "/adam_v")
"""First and second moment, of AdamWeightDecayOptimizer and LAMBOptimizer alike."""
OTHER_SLOTS = ("/AdamWeightDecayOptimizer", "/AdamWeightDecayOptimizer_1", "/Adam", "/Adam_1", "/Momentum")
"""Of other optimizers, as tf.train.Optimizer names slots; transformers' converter of old left out the first two."""
OTHER_STATE = ("beta1_power", "beta2_power")


class TensorName(NamedTuple):
    """What a tensor is on the other side."""

    name: str
    transposed: bool


_RULES = {
    family: [
        (scope + ours, module + theirs, transposed)
        for scope, module, inside in scopes
        for ours, theirs, transposed in inside
    ]
    for family, scopes in _SCOPES.items()
}
"""By family: name in TensorFlow, name in transformers, whether one is the other transposed; {n} is a number."""


def huggingface_name(name: str, family: str, source: str) -> TensorName:
    """The name in transformers of a tensor in a TensorFlow checkpoint.

    Args:
      name: as `bert/encoder/layer_0/output/dense/kernel`.
      family: `bert` or `albert`.
      source: the checkpoint, for messages.

    Raises:
      UserError: no rule knows the name.
    """
    plain = name.removeprefix(MODULE)
    if plain.startswith(BEAM_HEAD):
        advice = "use a pretrained model or one of run_squad_v1.py"
        raise UserError(f"{source}: '{name}' is of run_squad_v2.py's beam search, which is not supported: {advice}")
    return _translate(plain, _RULES[family], family, source)


def tensorflow_name(name: str, family: str, source: str) -> TensorName:
    """The name in a TensorFlow checkpoint of a tensor in transformers.

    Args:
      name: as `bert.encoder.layer.0.output.dense.weight`.
      family: `bert` or `albert`.
      source: where the tensor is, for messages.

    Raises:
      UserError: no rule knows the name.
    """
    flipped = [(theirs, ours, transposed) for ours, theirs, transposed in _RULES[family]]
    return _translate(name, flipped, family, source)


def _translate(name: str, rules: list[tuple[str, str, bool]], family: str, source: str) -> TensorName:
    for known, other, transposed in rules:
        if match := re.fullmatch(re.escape(known).replace(r"\{n\}", r"(\d+)"), name):
            return TensorName(other.replace("{n}", match[1] if match.groups() else ""), transposed)
    number = re.search(r"\d+", name)
    filled = [known.replace("{n}", number[0] if number else "0") for known, _, _ in rules]
    nearest = difflib.get_close_matches(name, filled, n=1, cutoff=0)[0]
    raise UserError(f"{source}: tensor '{name}' is none of Google's {family}; the nearest known name is '{nearest}'")


def is_optimizer_state(name: str) -> bool:
    """Whether a tensor of a checkpoint is none of the model's."""
    return name == GLOBAL_STEP or name in OTHER_STATE or name.endswith(SLOTS + OTHER_SLOTS)
