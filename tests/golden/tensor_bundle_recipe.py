"""What the checkpoints in tensor_bundle/ hold, made again from names wherever it is needed. Needs numpy only.

Names and shapes are written down as Google's code makes them (sources: convert/formats/tensorflow1_names.py), not
taken from our table.
"""

import zlib

import numpy as np

Shapes = dict[str, tuple[int, ...]]

BERT_CONFIG = {
    "vocab_size": 11,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 5,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}
ALBERT_CONFIG = BERT_CONFIG | {
    "embedding_size": 3,
    "num_hidden_groups": 2,
    "inner_group_num": 1,
    "net_structure_type": 0,
}
STEP = 7


def dense(scope: str, inputs: int, outputs: int) -> Shapes:
    return {f"{scope}/kernel": (inputs, outputs), f"{scope}/bias": (outputs,)}


def norm(scope: str, width: int) -> Shapes:
    return {f"{scope}/gamma": (width,), f"{scope}/beta": (width,)}


def embeddings(width: int) -> Shapes:
    return {
        "bert/embeddings/word_embeddings": (11, width),
        "bert/embeddings/position_embeddings": (5, width),
        "bert/embeddings/token_type_embeddings": (2, width),
        **norm("bert/embeddings/LayerNorm", width),
    }


def heads(width: int) -> Shapes:
    """Of pretraining; the masked-token head is as wide as the embeddings."""
    return {
        **dense("bert/pooler/dense", 4, 4),
        **dense("cls/predictions/transform/dense", 4, width),
        **norm("cls/predictions/transform/LayerNorm", width),
        "cls/predictions/output_bias": (11,),
        "cls/seq_relationship/output_weights": (2, 4),
        "cls/seq_relationship/output_bias": (2,),
    }


def bert_variables() -> Shapes:
    """The weights of run_pretraining.py's BERT."""
    shapes = embeddings(4)
    for layer in range(2):
        scope = f"bert/encoder/layer_{layer}"
        for part in ("query", "key", "value"):
            shapes |= dense(f"{scope}/attention/self/{part}", 4, 4)
        shapes |= dense(f"{scope}/attention/output/dense", 4, 4) | norm(f"{scope}/attention/output/LayerNorm", 4)
        shapes |= dense(f"{scope}/intermediate/dense", 4, 6)
        shapes |= dense(f"{scope}/output/dense", 6, 4) | norm(f"{scope}/output/LayerNorm", 4)
    return shapes | heads(4)


def albert_variables() -> Shapes:
    """The weights of run_pretraining.py's ALBERT, in two groups."""
    shapes = embeddings(3) | dense("bert/encoder/embedding_hidden_mapping_in", 3, 4)
    for group in range(2):
        scope = f"bert/encoder/transformer/group_{group}/inner_group_0"
        for part in ("query", "key", "value"):
            shapes |= dense(f"{scope}/attention_1/self/{part}", 4, 4)
        shapes |= dense(f"{scope}/attention_1/output/dense", 4, 4) | norm(f"{scope}/LayerNorm", 4)
        shapes |= dense(f"{scope}/ffn_1/intermediate/dense", 4, 6)
        shapes |= dense(f"{scope}/ffn_1/intermediate/output/dense", 6, 4) | norm(f"{scope}/LayerNorm_1", 4)
    return shapes | heads(3)


def with_slots(shapes: Shapes) -> Shapes:
    """And what AdamWeightDecayOptimizer and LAMBOptimizer add."""
    return shapes | {name + slot: shape for name, shape in shapes.items() for slot in ("/adam_m", "/adam_v")}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32[shape], by the name."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)


def others() -> dict[str, np.ndarray]:
    """Arrays of other dtypes and ranks than weights have; bfloat16 and strings are added by the script."""
    return {
        "empty": np.zeros((0, 3), np.float32),
        "flags": np.array([True, False, True]),
        "half": values("half", (2, 3)).astype(np.float16),
        "int32": np.arange(-2, 3, dtype=np.int32),
        "int64": np.array(1 << 40, np.int64),
        "rank3": values("rank3", (2, 1, 3)),
    }


BFLOAT16 = (1.5, -2.25, 3.0)
"""Exact in bfloat16."""
