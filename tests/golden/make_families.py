"""Makes tests/golden/families.npz with transformers: every family and head, two sizes, random weights.

Command, from the root of the clone, with the extra `parity` installed:

    python -m tests.golden.make_families

Made with transformers 5.23.0 and PyTorch 2.13.0 on a CPU, float32, eager attention. Of every array the file holds at
most `KEPT` values at real tokens; it has names and shapes of the tensors; `drawn` generates their values.
"""

import json
import pathlib
import zlib

import numpy as np

from bert_jax.convert.forward_types import ForwardInputs
from bert_jax.convert.hf_model import HuggingFaceModel
from bert_jax.convert.parity.sample_texts import sample_inputs

PATH = pathlib.Path(__file__).parent / "families.npz"
KEPT = 40

BERT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "max_position_embeddings": 50,
}
WIDE = BERT | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 30}
DISTIL = {"vocab_size": 97, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 56, "max_position_embeddings": 50}
MODERN = BERT | {"num_hidden_layers": 5, "pad_token_id": 0, "local_attention": 12}
THETA = {"full_attention": 500.0, "sliding_attention": 30.0}
ROTARY = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in THETA.items()}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"]
BIASED = {f"{part}_bias": True for part in ("norm", "attention", "mlp", "classifier")}

SETTINGS = {
    "Bert": (BERT, WIDE | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "Roberta": (BERT | {"type_vocab_size": 1}, WIDE | {"hidden_act": "relu", "pad_token_id": 3}),
    "Albert": (
        BERT | {"embedding_size": 16, "num_hidden_groups": 3},
        WIDE | {"embedding_size": 64, "hidden_act": "gelu", "inner_group_num": 2},
    ),
    "DistilBert": (DISTIL, DISTIL | {"dim": 64, "n_layers": 2, "activation": "relu"}),
    "Electra": (BERT | {"embedding_size": 16}, WIDE | {"embedding_size": 64, "hidden_act": "silu"}),
    "MobileBert": (
        BERT | {"embedding_size": 12, "intra_bottleneck_size": 16, "num_feedforward_networks": 3},
        WIDE
        | {"embedding_size": 8, "intra_bottleneck_size": 24, "use_bottleneck_attention": True, "hidden_act": "gelu"}
        | {"normalization_type": "layer_norm", "layer_norm_eps": 1e-5, "num_feedforward_networks": 2}
        | {"key_query_shared_bottleneck": False},
    ),
    "ModernBert": (
        MODERN | {"global_rope_theta": 400.0, "local_rope_theta": 20.0, "classifier_pooling": "mean"},
        MODERN | {"rope_parameters": ROTARY, "layer_types": KINDS, "classifier_activation": "silu"} | BIASED,
    ),
}
"""Two sizes per family."""
TASKS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
TASKS += ("ForMultipleChoice",)
MORE = ("BertForPreTraining", "BertForNextSentencePrediction", "AlbertForPreTraining", "ElectraForPreTraining")
MORE += ("MobileBertForPreTraining", "MobileBertForNextSentencePrediction")
CLASSES = (*(family + task for family in SETTINGS for task in TASKS), *MORE)


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A random tensor, biases and scales too: zeros or ones would hide a swap."""
    middle = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (middle + 0.2 * noise).astype(np.float32)


def make(name: str, size: int, **changes):
    """A transformers model with random weights; `changes` are settings that differ from SETTINGS."""
    import torch
    import transformers

    family = max((family for family in SETTINGS if family.lower() in name.lower()), key=len)
    labels = {} if name.endswith(("QuestionAnswering", "PreTraining")) else {"num_labels": 3}
    model_class = getattr(transformers, name)
    settings = SETTINGS[family][size] | labels | changes
    model = model_class(model_class.config_class(**settings, attn_implementation="eager")).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            tensor.copy_(torch.tensor(drawn(key, tuple(tensor.shape))))
    model.tie_weights()
    return model


def form_of(model) -> HuggingFaceModel:
    """The model as `save_pretrained` writes it: the JSON config, and tied tensors once."""
    copies = (model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}
    tensors = {key: tensor.numpy().copy() for key, tensor in model.state_dict().items() if key not in copies}
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return HuggingFaceModel(config, tensors, type(model).__name__)


def direct(model, inputs: ForwardInputs) -> dict[str, np.ndarray]:
    """ "layer 0", "layer 1", ..., and the logits and pooled vectors of the transformers class.

    MobileBERT gets each text alone, because its result depends on padding; padded positions are 0.
    """
    if model.config.model_type != "mobilebert":
        return direct_batch(model, inputs)
    lengths = inputs.attention_mask_BS.sum(1)
    alone = [ForwardInputs(*(array[i : i + 1, :n] for array in inputs)) for i, n in enumerate(lengths)]
    rows = [direct_batch(model, row) for row in alone]
    joined = {}
    for part, first in rows[0].items():
        has_positions = first.ndim == 3
        shape = inputs.input_ids_BS.shape if has_positions else (len(rows),)
        joined[part] = np.zeros(shape + first.shape[len(shape) :], np.float32)
        for i, row in enumerate(rows):
            joined[part][(i, slice(0, lengths[i])) if has_positions else i] = row[part][0]
    return joined


def direct_batch(model, inputs: ForwardInputs) -> dict[str, np.ndarray]:
    """The same of one padded batch."""
    import torch

    arguments = {"input_ids": inputs.input_ids_BS, "attention_mask": inputs.attention_mask_BS}
    if getattr(model.config, "type_vocab_size", 0):
        arguments["token_type_ids"] = inputs.token_type_ids_BS
    if type(model).__name__.endswith("MultipleChoice"):  # one ending each
        arguments = {key: array[:, None] for key, array in arguments.items()}
    arguments = {key: torch.tensor(array).long() for key, array in arguments.items()}
    with torch.no_grad():
        output = model(**arguments, output_hidden_states=True)
    name = type(model).__name__
    if name.endswith("QuestionAnswering"):
        logits = {"task": torch.stack([output.start_logits, output.end_logits], -1)}
    elif name in ("BertForPreTraining", "MobileBertForPreTraining"):
        logits = {"mlm": output.prediction_logits, "pair": output.seq_relationship_logits}
    elif name == "AlbertForPreTraining":
        logits = {"mlm": output.prediction_logits, "pair": output.sop_logits}
    elif name.endswith(("MaskedLM", "CausalLM", "LMHeadModel")):
        logits = {"mlm": output.logits}
    elif name.endswith("Model"):
        logits = {"pooled": output.pooler_output} if output.get("pooler_output") is not None else {}
    else:
        part = "pair" if name.endswith("NextSentencePrediction") else "task"
        logits = {part: output.logits}
    values = {f"layer {i}": state for i, state in enumerate(output.hidden_states)} | logits
    return {part: tensor.numpy() for part, tensor in values.items()}


def at_real(values: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
    """Without padded positions, where the values have positions."""
    return values[mask_BS > 0] if values.ndim == 3 or values.shape == mask_BS.shape else values


def sampled(values: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
    """At most `KEPT` values, spread evenly over those at real tokens."""
    flat = at_real(values, mask_BS).reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(KEPT, flat.size)).astype(int)]


PARTS = {"layer 0": "embeddings", "pooled": "pooled vector"}
PARTS |= {name: f"{name} logits" for name in ("mlm", "pair", "task")}
"""Names in the goldens -> names in the parity report."""


def goldens() -> dict[str, dict]:
    """By class and size, e.g. "BertModel 0": config, shapes, inputs, and "values", the outputs of transformers."""
    file = np.load(PATH)
    cases, place = json.loads(str(file["about"])), 0
    for case in cases.values():
        values = {}
        for part, count in case["values"].items():
            values[part] = file["values"][place : place + count]
            place += count
        case["values"], case["inputs"] = values, ForwardInputs(*np.array(case["inputs"], np.int32))
    assert place == len(file["values"])
    return cases


def main() -> None:
    cases, values = {}, []
    for name in CLASSES:
        for size in (0, 1):
            model = make(name, size)
            hf_model = form_of(model)
            inputs = ForwardInputs(*(array[::6] for array in sample_inputs(hf_model, None)))
            sampled_outputs = {part: sampled(x, inputs.attention_mask_BS) for part, x in direct(model, inputs).items()}
            values += sampled_outputs.values()
            cases[f"{name} {size}"] = {
                "config": hf_model.config,
                "shapes": {key: tensor.shape for key, tensor in hf_model.tensors.items()},
                "inputs": np.stack(inputs).tolist(),
                "values": {part: x.size for part, x in sampled_outputs.items()},
            }
    np.savez_compressed(PATH, about=np.array(json.dumps(cases)), values=np.concatenate(values))
    print(f"{PATH}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
